"""TieredStore: orders are answered once, in order, and no page is taken for another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256

import pytest

from engine.schedule.orders import (
    CopyDown,
    CopyOut,
    Drop,
    Fetch,
    Flush,
    Order,
    OrderDone,
    OrderNews,
    OrderQuiet,
    PurgeTier,
)
from engine.store.fault_tier import Fault, FaultTier
from engine.store.guard import Guard
from engine.store.host import HostTier
from engine.store.slot_file import SlotFileTier
from engine.store.tier import PageRecord, Status
from engine.store.tiered import TieredStore
from tests.engine.arena_runner import ArenaRunner
from tests.engine.tiered_bench import LAYOUT, PAGE_SIZE, ArenaBytes

OWNER = bytes(16)
PATIENCE_S = 20.0  # for what must happen, on a busy machine


def key(at: int) -> bytes:
    return sha256(b"%d" % at).digest()


def record(at: int, generation: int) -> PageRecord:
    return PageRecord(key(at), key(at - 1), at, OWNER, generation)


class Rig:
    """Eight pages, page n at generation n + 1 and full of n, over a host and a disk."""

    def __init__(self, *guards: Guard) -> None:
        self.runner = ArenaRunner(8, PAGE_SIZE)
        for page in range(8):
            self.runner.tags[page] = page + 1
            self.runner.arena[page] = [page] * PAGE_SIZE
        self.memory = ArenaBytes(self.runner)
        self.woken = 0
        self.store = TieredStore(guards, self.memory, wake=self.wake)
        self.news: list[OrderNews] = []

    def wake(self) -> None:
        self.woken += 1

    def copy_out(self, order_id: int, *pages: int, tier: str = "host") -> CopyOut:
        records = tuple(record(page, page + 1) for page in pages)
        return CopyOut(order_id, tier, pages, records)  # type: ignore[arg-type]

    def fetch(
        self, order_id: int, *pairs: tuple[int, int], tier: str = "host", within_s: float = 20.0
    ) -> Fetch:
        """(what is asked for, into which page), at generation 100."""
        return Fetch(
            order_id,
            tier,  # type: ignore[arg-type]
            tuple(key(at) for at, _ in pairs),
            tuple(page for _, page in pairs),
            (100,) * len(pairs),
            time.monotonic() + within_s,
        )

    def until(self, done: Callable[[list[OrderNews]], bool], within_s: float = PATIENCE_S) -> None:
        until = time.monotonic() + within_s
        while not done(self.news):
            assert time.monotonic() < until, self.news
            time.sleep(0.001)
            self.news += self.store.take()

    def do(self, order: Order) -> tuple[Status, ...]:
        self.store.give([order])
        return self.answer(order.order_id)

    def answer(self, order_id: int) -> tuple[Status, ...]:
        found: list[OrderDone] = []

        def is_there(news: list[OrderNews]) -> bool:
            found[:] = [n for n in news if isinstance(n, OrderDone) and n.order_id == order_id]
            return bool(found)

        self.until(is_there)
        assert len(found) == 1
        return found[0].statuses


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(Guard(HostTier(LAYOUT, 6)))
    yield made
    made.store.close(2.0)
    assert made.memory.lent == 0, "what was borrowed is given back"


def test_a_page_comes_back_with_its_new_tag(rig: Rig) -> None:
    assert rig.do(rig.copy_out(1, 2, 3)) == (Status.OK, Status.OK)
    assert rig.do(rig.fetch(2, (2, 6), (3, 7), (4, 5))) == (Status.OK, Status.OK, Status.MISS)
    assert rig.runner.arena[6:8] == [[2] * PAGE_SIZE, [3] * PAGE_SIZE]
    assert rig.runner.tags[5:8] == [6, 100, 100], "and no tag of what did not come"
    assert rig.woken == 2


def test_a_page_that_is_another_by_now_is_not_stored(rig: Rig) -> None:
    order = rig.copy_out(1, 2, 3)
    rig.runner.tags[3] += 1
    assert rig.do(order) == (Status.OK, Status.STALE)
    assert rig.do(rig.fetch(2, (3, 7))) == (Status.MISS,)


def plan(*faults: Fault | None) -> tuple[Iterator[Fault | None], threading.Event]:
    """These in turn, and whether it is the turn of the last one."""
    is_last = threading.Event()

    def turns() -> Iterator[Fault | None]:
        yield from faults[:-1]
        is_last.set()
        yield faults[-1]

    return turns(), is_last


def test_a_page_that_becomes_another_while_it_is_copied_is_stale() -> None:
    faults, is_copied = plan(Fault.HANG)
    tier = FaultTier(HostTier(LAYOUT, 6), faults)
    rig = Rig(Guard(tier))
    rig.store.give([rig.copy_out(1, 2)])
    assert is_copied.wait(PATIENCE_S)
    rig.runner.tags[2] += 1
    tier.release()
    assert rig.answer(1) == (Status.STALE,)
    rig.store.close(1.0)


def test_a_page_given_to_another_while_it_is_fetched_is_not_published() -> None:
    faults, is_fetched = plan(None, Fault.HANG)
    tier = FaultTier(HostTier(LAYOUT, 6), faults)
    rig = Rig(Guard(tier))
    assert rig.do(rig.copy_out(1, 2)) == (Status.OK,)
    rig.store.give([rig.fetch(2, (2, 6))])
    assert is_fetched.wait(PATIENCE_S)
    rig.runner.tags[6] = 55
    tier.release()
    assert rig.answer(2) == (Status.STALE,)
    assert rig.runner.tags[6] == 55
    assert rig.runner.arena[6] == [6] * PAGE_SIZE
    rig.store.close(1.0)


def test_an_overdue_fetch_is_told_at_its_deadline_and_is_quiet_when_it_returns() -> None:
    faults, is_fetched = plan(None, Fault.OVERRUN)
    tier = FaultTier(HostTier(LAYOUT, 6), faults)
    rig = Rig(Guard(tier))
    assert rig.do(rig.copy_out(1, 2)) == (Status.OK,)
    rig.store.give([rig.fetch(2, (2, 6), within_s=0.5)])
    assert is_fetched.wait(PATIENCE_S)
    assert rig.answer(2) == (Status.TIMEOUT,)  # and no later than `until` has patience
    time.sleep(0.1)
    rig.news += rig.store.take()
    assert OrderQuiet(2) not in rig.news
    tier.release()
    rig.until(lambda news: OrderQuiet(2) in news)
    assert rig.runner.tags[6] == 7, "too late to be the page"
    rig.store.close(1.0)


def test_an_order_that_cannot_begin_is_answered_and_the_next_one_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_memory(page_ids: object) -> list[memoryview]:
        raise MemoryError("no pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(rig.memory, "outgoing", no_memory)
        assert rig.do(rig.copy_out(1, 2, 3)) == (Status.UNAVAILABLE,) * 2
    assert "no pinned memory" in capfd.readouterr().err
    assert rig.do(rig.copy_out(2, 2)) == (Status.OK,)


def test_writes_to_a_tier_keep_their_order(rig: Rig) -> None:
    rig.store.give(
        [
            rig.copy_out(1, 0, 1, 2, 3, 4, 5),
            rig.copy_out(2, 6),
            Drop(3, "host", (key(5),)),
            rig.copy_out(4, 6),
            Drop(5, "host", (key(6),)),
            rig.copy_out(6, 6),
            PurgeTier(7, "host", OWNER, time.monotonic() + PATIENCE_S),
            Flush(8, "host"),
        ]
    )
    assert rig.answer(8) == (Status.OK,)
    told = [news.order_id for news in rig.news if isinstance(news, OrderDone)]
    assert told == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [rig.answer(at)[0] for at in (2, 4, 6, 7)] == [
        Status.NOSPACE,
        Status.OK,
        Status.OK,
        Status.OK,
    ]
    assert rig.do(rig.fetch(9, (6, 7), (0, 5))) == (Status.MISS, Status.MISS)


def test_more_fetches_than_a_guard_takes_at_once_all_come(rig: Rig) -> None:
    assert rig.do(rig.copy_out(1, 0)) == (Status.OK,)
    rig.store.give(rig.fetch(at, (0, at)) for at in range(2, 8))
    assert [rig.answer(at) for at in range(2, 8)] == [(Status.OK,)] * 6


def test_a_copy_from_tier_to_tier(tmp_path: object) -> None:
    host, disk = HostTier(LAYOUT, 6), SlotFileTier(tmp_path, LAYOUT, 6)  # type: ignore[arg-type]
    rig = Rig(Guard(host), Guard(disk))
    assert rig.do(rig.copy_out(1, 2, 3)) == (Status.OK, Status.OK)
    records = tuple(record(at, at + 1) for at in (2, 3, 4))
    told = rig.do(CopyDown(2, "host", "disk", records))
    assert told == (Status.OK, Status.OK, Status.MISS)
    assert rig.do(rig.fetch(3, (2, 6), (3, 7), tier="disk")) == (Status.OK, Status.OK)
    assert rig.runner.arena[6:8] == [[2] * PAGE_SIZE, [3] * PAGE_SIZE]
    assert rig.do(CopyDown(4, "host", "disk", records[2:])) == (Status.MISS,)
    rig.store.close(2.0)


def test_a_closed_store_ends_in_time_whatever_hangs() -> None:
    faults, is_copied = plan(Fault.OVERRUN)
    tier = FaultTier(HostTier(LAYOUT, 6), faults)
    rig = Rig(Guard(tier))
    rig.store.give([rig.copy_out(1, 2)])
    assert is_copied.wait(PATIENCE_S)
    closed = time.monotonic()
    rig.store.close(0.2)
    assert time.monotonic() - closed < PATIENCE_S
    tier.release()
