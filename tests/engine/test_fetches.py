"""Fetches: only what arrived whole is found, and no page is given back while a call writes it."""

from __future__ import annotations

import pytest

from engine.config import TierConfig
from engine.schedule.orders import Order
from engine.store.tier import Status
from tests.engine.arena_runner import alone
from tests.engine.order_bench import OrderBench
from tests.engine.scheduler_bench import PAGE_SIZE, Bench, ids

PROMPT = ids(6 * PAGE_SIZE + 1)


class FetchBench(Bench):
    """The six pages of PROMPT are in the host tier, and nothing is on the device."""

    def __init__(self) -> None:
        host = TierConfig(name="host", capacity_pages=30, bytes_per_s=1e6, latency_s=1e-3)
        super().__init__(num_pages=14, tiers=(host,), page_bytes=1000)  # type: ignore[arg-type]
        self.orders = OrderBench(self.scheduler.tiers, self.runner, {"host": 30})
        self.prompt_pages: dict[int, int] = {}
        self.submit(1, PROMPT, max_tokens=1)
        self.drain()
        self.orders.settle(self.now)
        while self.scheduler.cache.evict(self.now):
            pass

    @property
    def num_held(self) -> int:
        return self.scheduler.pool.num_held

    def ask(self, sequence_id: int, num_pages: int) -> Order:
        """A sequence waits for so many pages of PROMPT: the fetch of those that none waited for."""
        before = self.orders.ready()
        self.prompt_pages[sequence_id] = num_pages
        self.submit(sequence_id, PROMPT[: num_pages * PAGE_SIZE + 1])
        (order,) = [order for order in self.orders.ready() if order not in before]
        return order

    def answer(self, order: Order, *statuses: Status) -> None:
        """Of its first pages; the others arrive."""
        self.orders.carry_out(order, self.now, lambda _, at: [*statuses, *[Status.OK] * 9][at])

    def finish(self) -> None:
        """All is served, to the token, while overdue calls go on writing."""
        for _ in range(50):
            self.orders.settle(self.now, quiet=False)
            self.orders.meddle()
            self.step()
        for sequence_id, num_pages in self.prompt_pages.items():
            prompt = PROMPT[: num_pages * PAGE_SIZE + 1]
            assert self.tokens(sequence_id) == alone(prompt, 4)


@pytest.mark.parametrize(
    "status", [Status.MISS, Status.CORRUPT, Status.STALE, Status.UNAVAILABLE, Status.TIMEOUT]
)
def test_what_is_behind_a_page_that_failed_is_not_found(status: Status) -> None:
    bench = FetchBench()
    bench.answer(bench.ask(2, 6), Status.OK, Status.OK, status)
    assert len(bench.scheduler.cache) == 2
    bench.finish()


def test_nothing_is_found_of_a_fetch_behind_one_that_failed() -> None:
    bench = FetchBench()
    first, second = bench.ask(2, 2), bench.ask(3, 6)
    bench.answer(second)
    assert len(bench.scheduler.cache) == 0, "what is before it is on its way"
    bench.answer(first, Status.OK, Status.MISS)
    assert len(bench.scheduler.cache) == 1
    bench.finish()


def test_pages_of_an_overdue_fetch_are_held_until_it_is_quiet() -> None:
    bench = FetchBench()
    bench.answer(bench.ask(2, 6), Status.OK, Status.TIMEOUT)
    assert bench.num_held == 6
    bench.finish()
    assert bench.num_held == 6
    bench.orders.quiet(0, bench.now)
    assert bench.num_held == 0


@pytest.mark.parametrize("quiet_first", [True, False])
def test_an_overdue_fetch_gives_its_pages_back_when_both_it_and_what_it_follows_are_over(
    quiet_first: bool,
) -> None:
    """Its call may return before that of the pages that it follows."""
    bench = FetchBench()
    first, second = bench.ask(2, 2), bench.ask(3, 6)
    bench.answer(second, Status.OK, Status.TIMEOUT)
    if quiet_first:
        bench.orders.quiet(0, bench.now)
    assert bench.num_held == 6
    bench.answer(first)
    assert len(bench.scheduler.cache) == 3
    if not quiet_first:
        assert bench.num_held == 6
        bench.orders.quiet(0, bench.now)
    assert bench.num_held == 0
    assert bench.scheduler.tiers.is_idle
    bench.finish()
