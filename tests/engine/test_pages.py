"""Pages: free + held + cached = all, whatever happens; every hold is given back exactly once."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engine.schedule.pages import HoldError, HoldKind, PageId, PagePool

NUM_PAGES = 6
KINDS = st.sampled_from(list(HoldKind))
PAGES = st.integers(0, NUM_PAGES - 1).map(PageId)


class PagePoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holds: dict[tuple[int, HoldKind], int] = {}
        self.generations = [0] * NUM_PAGES

    def total(self, page: int) -> int:
        return sum(count for (at, _), count in self.holds.items() if at == page)

    @rule(kind=st.sampled_from([HoldKind.SEQUENCE, HoldKind.TRANSFER]))
    def take(self, kind: HoldKind) -> None:
        free = [page for page in range(NUM_PAGES) if not self.total(page)]
        page = self.pool.take(kind)
        if page is None:
            assert not free
            return
        assert page in free
        self.holds[page, kind] = 1
        self.generations[page] += 1

    @rule(page=PAGES, kind=KINDS)
    def hold(self, page: PageId, kind: HoldKind) -> None:
        if kind is HoldKind.CACHE and self.holds.get((page, kind)):
            return  # the cache maps a page once
        if not self.total(page):
            with pytest.raises(HoldError):
                self.pool.hold([page], kind)
            return
        self.pool.hold([page], kind)
        self.holds[page, kind] = self.holds.get((page, kind), 0) + 1

    @rule(page=PAGES, kind=KINDS)
    def release(self, page: PageId, kind: HoldKind) -> None:
        if not self.holds.get((page, kind)):
            with pytest.raises(HoldError):
                self.pool.release([page], kind)
            return
        self.pool.release([page], kind)
        self.holds[page, kind] -= 1

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        self.pool.invariants()
        free = sum(not self.total(page) for page in range(NUM_PAGES))
        cached = sum(
            self.total(page) == 1 and self.holds.get((page, HoldKind.CACHE)) == 1
            for page in range(NUM_PAGES)
        )
        assert (self.pool.num_free, self.pool.num_cached) == (free, cached)
        assert self.pool.num_held == NUM_PAGES - free - cached
        assert self.pool.generations == self.generations


SMALL = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_page_pool_machine() -> None:
    run_state_machine_as_test(PagePoolMachine, settings=SMALL)


@pytest.mark.slow
def test_page_pool_machine_at_length() -> None:
    run_state_machine_as_test(
        PagePoolMachine, settings=settings(SMALL, max_examples=5000, stateful_step_count=80)
    )


def test_double_release_is_an_error_and_frees_nothing_twice() -> None:
    pool = PagePool(2)
    page = pool.take(HoldKind.SEQUENCE)
    assert page is not None
    pool.release([page], HoldKind.SEQUENCE)
    with pytest.raises(HoldError, match="no SEQUENCE hold"):
        pool.release([page], HoldKind.SEQUENCE)
    assert pool.num_free == 2
    pool.invariants()


def test_a_page_with_a_transfer_hold_outlives_its_sequence() -> None:
    pool = PagePool(1)
    page = pool.take(HoldKind.SEQUENCE)
    assert page is not None
    pool.hold([page], HoldKind.TRANSFER)
    pool.release([page], HoldKind.SEQUENCE)
    assert pool.take(HoldKind.SEQUENCE) is None
    pool.release([page], HoldKind.TRANSFER)
    assert pool.take(HoldKind.SEQUENCE) == page


def test_reassignment_raises_the_generation() -> None:
    pool = PagePool(1)
    for generation in (1, 2, 3):
        page = pool.take(HoldKind.SEQUENCE)
        assert page is not None
        assert pool.generations[page] == generation
        pool.release([page], HoldKind.SEQUENCE)


def test_equal_histories_assign_equal_pages() -> None:
    def history() -> list[PageId | None]:
        pool = PagePool(5)
        taken = [pool.take(HoldKind.SEQUENCE) for _ in range(4)]
        pool.release([page for page in taken[1:3] if page is not None], HoldKind.SEQUENCE)
        return [*taken, pool.take(HoldKind.SEQUENCE), pool.take(HoldKind.STEP)]

    assert history() == history() == [0, 1, 2, 3, 2, 1]
