"""Plays requests on modelled nodes: arrivals, fetches, prompts and ends, in the order of time.

Deterministic: the same requests, nodes and router give the same outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

from gateway.lab.nodes import ModelNode, NodeSpec, PageNews, Work
from gateway.lab.pages import Pages
from gateway.lab.view import Told, View
from gateway.lab.workload import PAGE_TOKENS, Request
from policies.contract.wire import Tier


class Router(Protocol):
    """Chooses a node: the live policy, or one to compare it with."""

    def choose(self, view: View, request: Request, now: float) -> tuple[int, int]:
        """(index of the node, its tokens to compute as far as is known)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """works: of all requests, in order of their ends."""

    works: Sequence[Work]
    nodes: Sequence[ModelNode]


def play(
    requests: Sequence[Request],
    specs: Sequence[NodeSpec],
    router: Router,
    told: Told | None = None,
    *,
    until_s: float = inf,
) -> Outcome:
    """requests: in order of arrival; those that follow others come when these have ended. What
    would come after until_s does not come."""
    run = _Run(specs, router, told or Told(), until_s)
    run.play(requests)
    return Outcome(run.works, run.nodes)


class _Run:
    def __init__(
        self, specs: Sequence[NodeSpec], router: Router, told: Told, until_s: float
    ) -> None:
        shared: dict[Tier, Pages] = {
            tier.name: Pages(int(tier.tokens / PAGE_TOKENS))
            for spec in specs
            for tier in spec.tiers
            if tier.is_shared
        }
        self.nodes = [ModelNode(index, spec, shared) for index, spec in enumerate(specs)]
        self.works: list[Work] = []
        self._router = router
        self._view = View(self.nodes, told)
        self._until_s = until_s
        self._next: dict[Request, Request] = {}  # the turn that follows
        self._number = count()
        # (when, number, what): a request arrives, a fetch has come, a node has something to settle.
        # A node's entry is void once the node has planned anew.
        self._heap: list[tuple[float, int, Request | Work | ModelNode]] = []
        self._planned: dict[int, int] = {}  # node → number of its entry that counts
        self._late: deque[tuple[float, int, PageNews]] = deque()

    def play(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.follows is None:
                self._push(request.at, request)
            else:
                self._next[request.follows] = request
        while self._heap:
            now, number, what = heappop(self._heap)
            while self._late and self._late[0][0] <= now:
                _, index, news = self._late.popleft()
                self._view.take(index, news)
            if isinstance(what, Request):
                self._arrive(what, now)
            elif isinstance(what, Work):
                node = self.nodes[what.node]
                node.fetched(what, now)
                self._plan(node, now)
            elif self._planned[what.index] == number:
                what.advance(now)
                self._settle(what, now)
                self._plan(what, now)

    def _push(self, at: float, what: Request | Work | ModelNode) -> int:
        number = next(self._number)
        heappush(self._heap, (at, number, what))
        return number

    def _arrive(self, request: Request, now: float) -> None:
        if now > self._until_s:
            return
        index, tokens = self._router.choose(self._view, request, now)
        view = self._view.nodes[index]
        work = Work(request, index, now, tokens, view.send(request, tokens))
        ready_at = self.nodes[index].arrive(work, now)
        if ready_at is not None:
            self._push(ready_at, work)
        self._plan(self.nodes[index], now)

    def _settle(self, node: ModelNode, now: float) -> None:
        answered, ended = node.settle()
        view = self._view.nodes[node.index]
        for work in answered:
            view.answered(work)
        for work in ended:
            view.ended(work)
            self.works.append(work)
            following = self._next.get(work.request)
            if following is not None:
                self._push(now + following.at, following)

    def _plan(self, node: ModelNode, now: float) -> None:
        """Its news goes out, and its next event is where it is now."""
        late_s = self._view.told.late_s
        for news in node.news:
            if late_s:
                self._late.append((now + late_s, node.index, news))
            else:
                self._view.take(node.index, news)
        node.news.clear()
        at = node.next_at()
        if at < inf:
            self._planned[node.index] = self._push(at, node)
        else:
            self._planned[node.index] = -1
