"""Random lives of sequences over tiers that fail, delay, corrupt, lose and hang.

All that SchedulerMachine asks for holds here too: whatever tiers do, tokens are those of a cold run
alone, and every page is in one place.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.config import TierConfig
from engine.schedule.orders import Fetch, Order
from engine.store.tier import Status
from policies.contract.wire import Sampling, Tier
from tests.engine.order_bench import OrderBench
from tests.engine.test_scheduler_machine import PAGE_SIZE, ROOTS, SchedulerMachine

MISHAPS = {
    "get": (Status.TIMEOUT, Status.MISS, Status.STALE, Status.CORRUPT, Status.UNAVAILABLE),
    "put": (Status.TIMEOUT, Status.NOSPACE, Status.UNAVAILABLE),
}
TIERS: tuple[Tier, ...] = ("host", "disk", "cluster")


class TieredMachine(SchedulerMachine):
    @initialize(
        num_pages=st.integers(6, 14),
        step_tokens=st.integers(1, 24),
        max_running=st.integers(1, 6),
        context_tokens=st.integers(20, 60),
        sizes=st.dictionaries(st.sampled_from(TIERS), st.sampled_from([2, 9, 30]), min_size=1),
        prefill=st.sampled_from([1.0, 10.0]),
    )
    def build(  # type: ignore[override]
        self,
        num_pages: int,
        step_tokens: int,
        max_running: int,
        context_tokens: int,
        sizes: dict[Tier, int],
        prefill: float,
    ) -> None:
        capacities = {tier: 0 if tier == "cluster" else sizes[tier] for tier in sizes}
        self.tiers = tuple(
            TierConfig(name=tier, capacity_pages=size, bytes_per_s=1e6, latency_s=1e-3)
            for tier, size in capacities.items()
        )
        super().build(num_pages, step_tokens, max_running, context_tokens, prefill, False)
        self.orders = OrderBench(self.scheduler.tiers, self.runner, capacities)
        self.purged: set[bytes] = set()

    # --- rules ----------------------------------------------------------------------------------

    def ready(self) -> list[Order]:
        return self.orders.ready() if hasattr(self, "orders") else []

    @precondition(ready)
    @rule(data=st.data())
    def carry_out(self, data: st.DataObject) -> None:
        """One order is carried out, each of its pages well or badly."""
        order = data.draw(st.sampled_from(self.ready()))
        mishaps = MISHAPS["get" if isinstance(order, Fetch) else "put"]
        faults = data.draw(
            st.one_of(
                st.just({}),
                st.dictionaries(
                    st.integers(0, 4), st.sampled_from(mishaps), min_size=1, max_size=3
                ),
                st.just(dict.fromkeys(range(40), Status.TIMEOUT)),
                st.sampled_from([dict.fromkeys(range(40), status) for status in mishaps]),
            )
        )
        self.orders.carry_out(order, self.now, lambda _, at: faults.get(at, Status.OK))

    @precondition(lambda self: self.ready())
    @rule()
    def carry_out_all(self) -> None:
        self.orders.settle(self.now, quiet=False)

    @precondition(lambda self: hasattr(self, "orders") and self.orders.overdue)
    @rule(data=st.data(), lands=st.booleans())
    def quiet(self, data: st.DataObject, lands: bool) -> None:
        at = data.draw(st.integers(0, len(self.orders.overdue) - 1))
        self.orders.quiet(at, self.now, lands=lands)

    @rule(
        family=st.integers(0, 1),
        length=st.integers(9, 32),
        root=st.sampled_from(ROOTS),
        longer=st.sampled_from([(), (1,), (9,)]),
    )
    def come_back(self, family: int, length: int, root: bytes, longer: tuple[int, ...]) -> None:
        """A prompt that was here before, when the device has it no more; at once a longer one, that
        waits for the same fetch, or for another behind it."""
        while self.scheduler.cache.evict(self.now):
            pass
        for more in (0, *longer):
            sampling = Sampling(max_tokens=2, seed=more)
            self.submit_one(family, length + more, root, sampling, None, None)

    @rule()
    def serve_all(self) -> None:
        """As on a quiet day: everything is computed and everything is copied."""
        self.run_on(25)
        self.orders.settle(self.now, quiet=False)
        self.run_on(25)
        self.orders.settle(self.now, quiet=False)

    @rule(
        what=st.sampled_from(["lose", "lose", "purge", "drain"]),
        tier=st.sampled_from(TIERS),
        root=st.sampled_from(ROOTS),
        data=st.data(),
    )
    def calamity(self, what: str, tier: Tier, root: bytes, data: st.DataObject) -> None:
        """A tier loses pages behind our back, or all of them; a tenant is purged; a drain."""
        if what == "lose":
            store = self.orders.stores.get(tier)
            if store is not None and store.pages:
                lost = data.draw(st.sets(st.sampled_from(sorted(store.pages))))
                for key in lost or list(store.pages):
                    del store.pages[key]
        elif what == "purge":
            self.scheduler.purge(root[:16])
            self.scheduler.tiers.purge(root[:16], self.now + 10.0)
            self.purged.add(root[:16])
        else:
            self.scheduler.tiers.demote(self.now)

    def submit_one(self, family: int, length: int, root: bytes, *rest: object) -> int | None:
        sequence_id = super().submit_one(family, length, root, *rest)
        if sequence_id is not None:
            self.purged.discard(root[:16])
        return sequence_id

    # --- what must hold -------------------------------------------------------------------------

    def may_wait(self) -> bool:
        return bool(self.orders.overdue or self.ready())

    def settle(self) -> bool:
        return self.orders.settle(self.now)

    @precondition(lambda self: len(self.results) < len(self.flights))
    @rule(not_due=st.sets(st.integers(1, 12), max_size=3))
    def compute(self, not_due: set[int]) -> None:
        self.orders.meddle()
        super().compute(not_due)
        self.orders.meddle()

    @invariant()
    def the_books_wait_for_nothing_that_is_over(self) -> None:
        if hasattr(self, "orders"):
            assert self.may_wait() or self.scheduler.tiers.is_idle

    @invariant()
    def a_purged_tenant_is_nowhere(self) -> None:
        if not hasattr(self, "orders"):
            return
        for owner in self.purged:
            assert all(page.owner != owner for page in self.scheduler.cache.contents())
            assert self.scheduler.tiers.owned(owner) == 0

    def teardown(self) -> None:
        if not hasattr(self, "orders"):
            return
        super().teardown()
        while self.orders.settle(self.now):
            pass
        self.books_agree()
        assert self.scheduler.pool.num_held == 0, "a hold is left"
        for tier, store in self.orders.stores.items():
            for record, states in store.pages.values():
                unpurged = (tier, record.owner) in self.orders.unpurged
                assert unpurged or record.owner not in self.purged
                assert len(states) == PAGE_SIZE


SMALL = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_tiered_machine() -> None:
    run_state_machine_as_test(TieredMachine, settings=SMALL)


@pytest.mark.slow
def test_tiered_machine_at_length() -> None:
    run_state_machine_as_test(
        TieredMachine, settings=settings(SMALL, max_examples=3000, stateful_step_count=80)
    )
