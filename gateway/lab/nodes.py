"""One modelled node: prefill and decode in one batch, a queue, and tiers of pages.

Between two events nothing changes but counters, so a node is advanced by multiplication and not
step by step: while a prompt is computed a step takes max(least step, chunk ÷ rate), without one the
least step, and either way some time for each decoding sequence and each token of its context. All
decoding sequences get one token a step, so each ends when a common counter has passed its mark.
The prompt that a chunk is spent on is the shortest uncached one, where waiting counts as work done
at the node's rate: the engine's own order (engine/schedule/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from gateway.lab.pages import Pages
from gateway.lab.workload import PAGE_TOKENS, Request
from policies.backlog import Credit
from policies.contract.wire import Tier
from policies.tiering import pages_worth_fetching

_EPSILON = 1e-6  # of a token


@dataclass(frozen=True, slots=True)
class TierSpec:
    """tokens_per_s: how fast its pages come to the device. is_shared: all nodes have one."""

    name: Tier
    tokens: float
    tokens_per_s: float
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Defaults: an accelerator with an 8B model. speed scales its rate, its chunk with it."""

    speed: float = 1.0
    prefill_tokens_per_s: float = 8000.0
    chunk_tokens: float = 256.0
    least_step_s: float = 0.012
    sequence_step_s: float = 50e-6
    context_token_step_s: float = 0.03e-6
    device_tokens: float = 500_000.0
    tiers: tuple[TierSpec, ...] = ()


# Fetch rates and capacities of the routing study's scenarios.
HOST = TierSpec("host", 2e6, 80_000.0)
DISK = TierSpec("disk", 8e6, 16_000.0)


def cluster(num_nodes: int) -> TierSpec:
    return TierSpec("cluster", 8e6 * num_nodes, 40_000.0, is_shared=True)


@dataclass(slots=True, eq=False)
class Work:
    """A request on its node. expected_tokens: to compute, as routing believed; left: as the node
    knows, for certain once it is begun."""

    request: Request
    node: int
    arrived_at: float
    expected_tokens: int
    credit: Credit
    left: float = 0.0
    cached_tokens: int = 0
    is_begun: bool = False
    first_token_at: float = 0.0
    ended_at: float = 0.0
    end_mark: float = 0.0  # of the counter of decoded tokens


@dataclass(slots=True)
class PageNews:
    """What a tier took in and let go."""

    tier: Tier
    stored: list[bytes]
    removed: list[bytes]


@dataclass(slots=True)
class NodeTier:
    spec: TierSpec
    pages: Pages
    free_at: float = 0.0  # when the fetches that are queued have come


class ModelNode:
    """`arrive`, `fetched` and `advance` in the order of time; `next_at` says when to advance."""

    def __init__(self, index: int, spec: NodeSpec, shared: dict[Tier, Pages]) -> None:
        self.index = index
        self.spec = spec
        self.tokens_per_s = spec.prefill_tokens_per_s * spec.speed
        self.chunk_tokens = spec.chunk_tokens * spec.speed
        self.device = Pages(int(spec.device_tokens / PAGE_TOKENS))
        self.tiers = [
            NodeTier(
                one,
                shared[one.name] if one.is_shared else Pages(int(one.tokens / PAGE_TOKENS)),
            )
            for one in spec.tiers
        ]
        self.news: list[PageNews] = []  # taken by the caller
        self.held_tokens = 0  # by sequences that are begun
        self._now = 0.0
        self._running: Work | None = None
        self._waiting: list[tuple[float, int, Work]] = []
        self._decoding: list[tuple[float, int, Work]] = []
        self._context_tokens = 0.0
        self._mark = 0.0
        self._number = count()
        self._set_pace()

    # --- what routing is told -------------------------------------------------------------------

    @property
    def kv_share(self) -> float:
        return self.held_tokens / self.spec.device_tokens

    @property
    def measured_tokens_per_s(self) -> float:
        """Of a step with a prompt, beside what decodes."""
        return self.chunk_tokens / self._step_with_prompt_s

    def running(self, now: float) -> tuple[Work, int] | None:
        """The prompt that is computed, and its tokens left after the last whole step."""
        work = self._running
        if work is None:
            return None
        steps = int((now - self._now) / self._step_with_prompt_s)
        return work, int(max(1.0, work.left - steps * self.chunk_tokens))

    # --- events ---------------------------------------------------------------------------------

    def arrive(self, work: Work, now: float) -> float | None:
        """Queue it. Returns when its fetch from slower tiers will have come, if there is one."""
        self.advance(now)
        request = work.request
        most = request.max_hit_pages
        depth = self.device.depth(request.keys, most)
        ready_at = now
        for tier, first, stop in self._worth_fetching(request, depth):
            start = max(now, tier.free_at)
            tier.free_at = start + (stop - first) * PAGE_TOKENS / tier.spec.tokens_per_s
            ready_at = max(ready_at, tier.free_at)
            depth = stop
        work.left = float(request.prompt_tokens - depth * PAGE_TOKENS)
        if ready_at > now:
            return ready_at
        self._enqueue(work)
        return None

    def fetched(self, work: Work, now: float) -> None:
        """What was fetched for it is on the device."""
        self.advance(now)
        pages = (work.request.prompt_tokens - int(work.left)) // PAGE_TOKENS
        self._tell("device", self.device, work.request.keys[:pages])
        self._enqueue(work)

    def next_at(self) -> float:
        """When its prompt is computed or a sequence ends; inf: it is idle."""
        at = inf
        if self._running is not None:
            at = self._now + max(0.0, self._running.left) / self.measured_tokens_per_s
        if self._decoding:
            at = min(at, self._now + max(0.0, self._decoding[0][0] - self._mark) * self._step_s)
        return at

    def advance(self, now: float) -> None:
        """Only counters change."""
        passed_s = now - self._now
        if passed_s <= 0.0:
            return
        if self._running is not None:
            computed = min(self._running.left, passed_s * self.measured_tokens_per_s)
            self._running.left -= computed
        decoded = passed_s / self._step_s
        self._mark += decoded
        self._context_tokens += decoded * len(self._decoding)
        self._now = now

    def settle(self) -> tuple[list[Work], list[Work]]:
        """(those with their first token now, those that ended now), once advanced to next_at."""
        answered: list[Work] = []
        ended: list[Work] = []
        if self._running is not None and self._running.left <= _EPSILON:
            answered.append(self._answer(self._running, ended))
        while self._decoding and self._decoding[0][0] <= self._mark + _EPSILON:
            _, _, work = heappop(self._decoding)
            self._context_tokens -= work.request.prompt_tokens + work.request.output_tokens
            self._end(work, ended)
        if not self._decoding:
            self._context_tokens = 0.0
        self._begin_next()
        return answered, ended

    # --- inside ---------------------------------------------------------------------------------

    def _worth_fetching(self, request: Request, depth: int) -> list[tuple[NodeTier, int, int]]:
        most = request.max_hit_pages
        depths: dict[Tier, int] = {}
        rates: dict[Tier, float] = {}
        for tier in self.tiers:
            reach = tier.pages.depth(request.keys, most)
            if reach > depth:
                depths[tier.spec.name] = reach
                rates[tier.spec.name] = tier.spec.tokens_per_s
        if not depths:
            return []
        runs = pages_worth_fetching(
            depths, depth, PAGE_TOKENS, PAGE_TOKENS, rates, {}, self.measured_tokens_per_s
        )
        tier_by_name = {tier.spec.name: tier for tier in self.tiers}
        return [(tier_by_name[name], first, stop) for name, first, stop in runs]

    def _enqueue(self, work: Work) -> None:
        heappush(self._waiting, (self._rank(work), next(self._number), work))
        running = self._running
        if running is not None and self._waiting[0][0] < self._rank(running):
            heappush(self._waiting, (self._rank(running), next(self._number), running))
            self._running = None
        self._begin_next()

    def _rank(self, work: Work) -> float:
        return work.left + self.tokens_per_s * work.arrived_at

    def _begin_next(self) -> None:
        """The first of the queue, if its tokens fit beside what is held."""
        if self._running is None and self._waiting:
            work = self._waiting[0][2]
            request = work.request
            needed = request.prompt_tokens + request.output_tokens
            if work.is_begun:
                heappop(self._waiting)
                self._running = work
            elif not self.held_tokens or self.held_tokens + needed <= self.spec.device_tokens:
                heappop(self._waiting)
                self.held_tokens += needed
                self._begin(work)
        self._set_pace()

    def _begin(self, work: Work) -> None:
        request = work.request
        hit = self.device.depth(request.keys, request.max_hit_pages)
        work.is_begun = True
        work.cached_tokens = hit * PAGE_TOKENS
        left = float(request.prompt_tokens - work.cached_tokens)
        work.left = left
        self._running = work

    def _answer(self, work: Work, ended: list[Work]) -> Work:
        request = work.request
        work.left = 0.0
        work.first_token_at = self._now
        self._running = None
        self._tell("device", self.device, request.keys)
        for tier in self.tiers:
            self._tell(tier.spec.name, tier.pages, request.keys)
        if request.output_tokens == 1:
            self._end(work, ended)
        else:
            work.end_mark = self._mark + request.output_tokens - 1
            self._context_tokens += request.prompt_tokens
            heappush(self._decoding, (work.end_mark, next(self._number), work))
        return work

    def _end(self, work: Work, ended: list[Work]) -> None:
        work.ended_at = self._now
        self.held_tokens -= work.request.prompt_tokens + work.request.output_tokens
        ended.append(work)

    def _tell(self, tier: Tier, pages: Pages, keys: Sequence[bytes]) -> None:
        stored, removed = pages.use(keys)
        if stored or removed:
            self.news.append(PageNews(tier, stored, removed))

    def _set_pace(self) -> None:
        spec = self.spec
        decoding_s = (
            spec.sequence_step_s * len(self._decoding)
            + spec.context_token_step_s * self._context_tokens
        )
        chunk_s = self.chunk_tokens / self.tokens_per_s
        self._step_with_prompt_s = max(spec.least_step_s, chunk_s) + decoding_s
        self._step_s = (
            spec.least_step_s + decoding_s if self._running is None else self._step_with_prompt_s
        )
