"""Published ways to choose a node, as their projects describe them, on the nodes of gateway/lab.

Each returns (node, tokens that it will compute there as far as it knows).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count

from gateway.lab.view import NodeView, View
from gateway.lab.workload import PAGE_TOKENS, Request

RADIX_TREE_PAGES = 32_768  # a node's share of SGLang's tree: 2^26 characters
TIER_CREDIT = {"device": 1.0, "host": 0.75, "disk": 0.25, "cluster": 0.25}  # of Dynamo


class RoundRobin:
    def __init__(self) -> None:
        self._turn = count()

    def choose(self, view: View, request: Request, now: float) -> tuple[int, int]:
        return next(self._turn) % len(view.nodes), request.prompt_tokens


class LeastRequests:
    def choose(self, view: View, request: Request, now: float) -> tuple[int, int]:
        return _least(view.nodes), request.prompt_tokens


class SessionHash:
    """Rendezvous hashing of the session, whatever the load; every session names itself."""

    def choose(self, view: View, request: Request, now: float) -> tuple[int, int]:
        key = request.session.to_bytes(8, "little")

        def weight(index: int) -> bytes:
            return blake2b(index.to_bytes(4, "little"), key=key, digest_size=8).digest()

        return max(range(len(view.nodes)), key=weight), request.prompt_tokens


class ApproximateRadix:
    """SGLang's router: a tree of what was sent where, without news of evictions. The owner of a
    match that is long enough, else the node with the fewest requests; this one too once the counts
    are apart."""

    def __init__(self, *, match: float = 0.5, absolute: int = 32, relative: float = 1.1) -> None:
        self._match = match
        self._absolute = absolute
        self._relative = relative
        self._owners: dict[bytes, OrderedDict[int, None]] = {}  # of each page, the latest last
        self._pages: dict[int, OrderedDict[bytes, None]] = {}  # of each node, the latest last

    def choose(self, view: View, request: Request, now: float) -> tuple[int, int]:
        counts = [one.in_flight for one in view.nodes]
        least, most = min(counts), max(counts)
        depth, owner = self._find(request.keys[: request.max_hit_pages])
        is_uneven = most - least > self._absolute and most > self._relative * least
        if is_uneven or owner is None or depth * PAGE_TOKENS <= self._match * request.prompt_tokens:
            chosen, hit = _least(view.nodes), 0
        else:
            chosen, hit = owner, depth * PAGE_TOKENS
        self._insert(request.keys, chosen)
        return chosen, request.prompt_tokens - hit

    def _find(self, keys: Sequence[bytes]) -> tuple[int, int | None]:
        depth, owner = 0, None
        for key in keys:
            owners = self._owners.get(key)
            if not owners:
                break
            depth, owner = depth + 1, next(reversed(owners))
        return depth, owner

    def _insert(self, keys: Sequence[bytes], node: int) -> None:
        pages = self._pages.setdefault(node, OrderedDict())
        for key in reversed(keys):
            owners = self._owners.setdefault(key, OrderedDict())
            owners[node] = pages[key] = None
            owners.move_to_end(node)
            pages.move_to_end(key)
        while len(pages) > RADIX_TREE_PAGES:
            key, _ = pages.popitem(last=False)
            owners = self._owners[key]
            del owners[node]
            if not owners:
                del self._owners[key]


class KvEventCost:
    """Dynamo's KV router: blocks to prefill less credit for what events say is there, plus blocks
    in use by what decodes, all with weights; the least wins."""

    def __init__(self, *, prefill_scale: float = 1.0) -> None:
        self._scale = prefill_scale

    def choose(self, view: View, request: Request, now: float) -> tuple[int, int]:
        keys, most = request.keys[::-1], request.max_hit_pages
        best = (float("inf"), 0, request.prompt_tokens)
        for index, one in enumerate(view.nodes):
            hit, credit = 0, 0.0
            for tier, reach in one.reach(keys):
                depth = min(reach, most)
                if depth > hit:
                    credit += TIER_CREDIT[tier] * (depth - hit)
                    hit = depth
            prefill = (one.unanswered_tokens + request.prompt_tokens) / PAGE_TOKENS
            decode = (one.in_flight_tokens + request.prompt_tokens) / PAGE_TOKENS
            cost = self._scale * max(0.0, prefill - credit) + decode
            best = min(best, (cost, index, request.prompt_tokens - hit * PAGE_TOKENS))
        return best[1], best[2]


def _least(nodes: Sequence[NodeView]) -> int:
    return min(range(len(nodes)), key=lambda index: nodes[index].in_flight)
