"""Replays a trace against caches: our policy in one tier or several, LRU, and the best possible.

Computing takes no time here: a page is there for the next request as soon as one has asked for it.
A request's hit is the leading run of its pages that some tier holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from benchmarks.tiering.trace import PAGE_TOKENS, Request
from policies.contract.wire import Tier
from policies.tiering import TierIndex


@dataclass(slots=True)
class Tally:
    """Tokens asked for, found by tier; pages written into each tier."""

    prompt: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return sum(self.hits.values()) / max(1, self.prompt)


@dataclass(frozen=True, slots=True)
class Node:
    """Its tiers, quickest first; several nodes may share one."""

    tiers: Mapping[Tier, TierIndex]

    def serve(self, request: Request, tally: Tally) -> None:
        """Find the prompt's pages, use them, and write through what each tier lacks."""
        first = 0
        for name, index in self.tiers.items():
            depth = index.depth(request.keys)
            if depth > first:
                tokens = request.tokens_of(depth) - request.tokens_of(first)
                tally.hits[name] = tally.hits.get(name, 0) + tokens
                first = depth
        tally.prompt += request.tokens
        for name, index in self.tiers.items():
            depth = index.depth(request.keys)
            index.touch(request.keys, request.now)
            for page in request.pages[depth:]:
                if index.admit(page, request.now) is None:
                    break
                tally.written[name] = tally.written.get(name, 0) + 1


def make_node(
    tokens: Mapping[Tier, float],
    *,
    shared: Mapping[Tier, TierIndex] | None = None,
    disk_needs_second_use: bool = True,
) -> Node:
    """With tiers of so many tokens each, then those that are shared."""
    own = {
        name: TierIndex(
            int(size / PAGE_TOKENS),
            needs_second_use=disk_needs_second_use and name == "disk",
        )
        for name, size in tokens.items()
    }
    return Node({**own, **(shared or {})})


def replay(requests: Sequence[Request], route: Callable[[Request], Node]) -> Tally:
    tally = Tally()
    for request in requests:
        route(request).serve(request, tally)
    return tally


def replay_policy(requests: Sequence[Request], capacity_pages: int) -> float:
    """Hit ratio in tokens of one tier."""
    node = Node({"device": TierIndex(capacity_pages)})
    return replay(requests, lambda _: node).ratio


def replay_lru(requests: Sequence[Request], capacity_pages: int, *, tail_first: bool) -> float:
    """Hit ratio of LRU. A chain's pages are used tail first when its tail shall go first: then the
    oldest page of all never has a resident child."""
    held: OrderedDict[bytes, None] = OrderedDict()
    hit = 0
    for request in requests:
        hit += request.tokens_of(_leading(request.keys, held))
        for key in reversed(request.keys) if tail_first else request.keys:
            held[key] = None
            held.move_to_end(key)
            if len(held) > capacity_pages:
                held.popitem(last=False)
    return hit / max(1, sum(request.tokens for request in requests))


def replay_infinite(requests: Sequence[Request]) -> float:
    return replay_lru(requests, sum(len(one.keys) for one in requests), tail_first=True)


def replay_best(requests: Sequence[Request], capacity_pages: int) -> float:
    """Hit ratio of the best possible choice, which knows the future (Belady, 1966; pages that come
    too late are not admitted). A child is never used before its parent, so chains stay whole."""
    never = len(requests)
    next_uses = _next_uses(requests)
    held: dict[bytes, int] = {}  # key → number of the request that uses it next
    latest: list[tuple[int, int, bytes]] = []  # (-next use, -depth, key), lazily up to date
    hit = 0
    for request, following in zip(requests, next_uses, strict=True):
        hit += request.tokens_of(_leading(request.keys, held))
        for depth, (key, next_use) in enumerate(zip(request.keys, following, strict=True)):
            if next_use == never:
                held.pop(key, None)
                continue
            if key not in held and len(held) >= capacity_pages:
                while held.get(latest[0][2]) != -latest[0][0]:
                    heappop(latest)
                if -latest[0][0] <= next_use:
                    continue
                del held[heappop(latest)[2]]
            held[key] = next_use
            heappush(latest, (-next_use, -depth, key))
    return hit / max(1, sum(request.tokens for request in requests))


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each page of each request the number of the next request with it, else their count."""
    seen: dict[bytes, int] = {}
    made: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number].keys
        made.append([seen.get(key, len(requests)) for key in keys])
        seen.update(dict.fromkeys(keys, number))
    made.reverse()
    return made


def _leading(keys: Sequence[bytes], held: Mapping[bytes, object]) -> int:
    """How many leading keys are held; there may be more behind a gap."""
    return next((depth for depth, key in enumerate(keys) if key not in held), len(keys))
