"""What a gateway knows of modelled nodes: its own credits and counts, and pages it was told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from gateway.lab.nodes import ModelNode, PageNews, Work
from gateway.lab.workload import Request
from policies.backlog import Backlog, Credit
from policies.contract.wire import PageEvent, PageEvents, PageRemoved, PageStored, Tier
from policies.residency import Residency

MAX_KEYS = 1 << 18


@dataclass(frozen=True, slots=True)
class Told:
    """How page events reach the gateway: each is lost with probability `lost`, unnoticed and never
    repaired, the others come late_s after the step. is_on=False: no node tells any."""

    is_on: bool = True
    lost: float = 0.0
    late_s: float = 0.0
    seed: int = 7


class NodeView:
    """One node's books; store: of the tier that all nodes share, the same for all.

    In flight: sent and not ended; unanswered: of these without a first token, whole until then.
    """

    def __init__(self, node: ModelNode, store: Residency) -> None:
        self.node = node
        self.name = str(node.index)
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.unanswered_tokens = 0
        self.backlog = Backlog()
        self.residency = Residency(MAX_KEYS)
        self.store = store
        self.tiers: tuple[Tier, ...] = (
            "device",
            *[tier.spec.name for tier in node.tiers if not tier.spec.is_shared],
        )
        self.seconds_by_tier: dict[Tier, float] = {"device": 0.0}
        for tier in node.tiers:
            self.seconds_by_tier[tier.spec.name] = 1.0 / tier.spec.tokens_per_s
        self._steps = 0

    def send(self, request: Request, tokens: int) -> Credit:
        """tokens: that it will compute of it, as far as is known."""
        self.in_flight += 1
        self.in_flight_tokens += request.prompt_tokens
        self.unanswered_tokens += tokens
        return self.backlog.open(tokens)

    def follow(self, now: float) -> None:
        """Take in what the node's steps told of the prompt that it computes."""
        if (running := self.node.running(now)) is not None:
            work, left = running
            self._steps += 1
            self.backlog.advance(work.credit, left, self._steps)

    def answered(self, work: Work) -> None:
        """Its first token came, so its pages are there, whatever becomes of their events."""
        self._steps += 1
        self.backlog.answer(work.credit, self._steps)
        self.unanswered_tokens -= work.expected_tokens
        self.residency.expect(work.request.keys[::-1])

    def ended(self, work: Work) -> None:
        self.in_flight -= 1
        self.in_flight_tokens -= work.request.prompt_tokens

    def reach(self, deepest_first: Sequence[bytes]) -> list[tuple[Tier, int]]:
        """How far each tier takes a prompt, in pages; the fastest first."""
        runs = self.residency.reach(deepest_first, self.tiers)
        if len(self.store):
            runs += self.store.reach(deepest_first, ("cluster",))
        return runs


class View:
    """All nodes, and the way on which their news comes."""

    def __init__(self, nodes: Sequence[ModelNode], told: Told) -> None:
        self.told = told
        self.store = Residency(MAX_KEYS)
        self.nodes = [NodeView(node, self.store) for node in nodes]
        self._random = Random(told.seed)
        self._numbers: dict[int, int] = {}

    def take(self, index: int, news: PageNews) -> None:
        """A node's news arrives, less what gets lost on the way."""
        if not self.told.is_on:
            return
        events: list[PageEvent] = [PageStored(key, news.tier) for key in news.stored]
        events += [PageRemoved(key, news.tier) for key in news.removed]
        if self.told.lost:
            events = [one for one in events if self._random.random() >= self.told.lost]
        residency = self.store if news.tier == "cluster" else self.nodes[index].residency
        first = self._numbers.get(id(residency), 0)
        self._numbers[id(residency)] = first + len(events)
        residency.apply(PageEvents(0, first, events))
