"""Carries out the scheduler's orders: the threads between device pages and the slower tiers.

    engine loop ──give──▶ mover ──▶ Guard of a tier ──▶ its threads
         ▲                  │ ▲                             │
         └──take── news ◀───┘ └──────── answers ◀───────────┘

The mover is one thread that owns all that is said here: which order is next for a tier, and what
memory a copy reads and a fetch writes. It never waits for a tier: a guard answers by the deadline.
Writes go to a tier one after the other, so a page that is dropped and put again is there.

While a call is overdue its tier rests: no other copy or fetch begins, so a tier that hangs for ever
keeps the pages of two fetches and one copy, and no more.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, assert_never

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
from engine.store.guard import Guard
from engine.store.tier import Status
from policies.contract.wire import Tier as TierName

WRITE_S = 5.0  # a put, a remove or a flush that takes longer is given up
_READS_AT_ONCE = 2  # of a tier; its guard leaves as many threads to writes
_IDLE_SCRATCH = 2  # buffers kept for the next copies between tiers


class PageMemory(Protocol):
    """The device's pages as bytes of the host (execute/page_memory.py). Used by one thread, but for
    generation and assign."""

    @property
    def page_bytes(self) -> int: ...

    def generation(self, page_id: int) -> int:
        """What its tag says now."""

    def assign(self, assigned: Sequence[tuple[int, int]]) -> None:
        """(page_id, generation) pairs: write the tags. Called by the engine's loop."""

    def outgoing(self, page_ids: Sequence[int]) -> list[memoryview]:
        """What these pages hold, to be read until free."""

    def incoming(self, page_ids: Sequence[int]) -> list[memoryview]:
        """Where to write what these pages shall hold, until free."""

    def arrive(self, page_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        """What was written into these views of incoming is in the pages when this returns."""

    def free(self, views: Sequence[memoryview]) -> None:
        """Nobody reads or writes these views any more."""


@dataclass(slots=True, eq=False)
class _Lane:
    """Orders of one tier that wait, and how many are at its guard."""

    guard: Guard
    reads: deque[Order] = field(default_factory=deque)
    writes: deque[Order] = field(default_factory=deque)
    reading: int = 0
    writing: bool = False
    overdue: int = 0  # orders that were answered while their call may still touch pages


@dataclass(slots=True, eq=False)
class _Job:
    """An order at a guard: one call, for a copy between tiers one after the other."""

    order: Order
    lane: _Lane
    is_read: bool  # of lane; its place there is given up when the call is answered
    started: float
    at_once: int = 1  # reads of the lane that share its speed
    views: list[memoryview] = field(default_factory=list)
    at: list[int] = field(default_factory=list)  # whose pages the views are, as indices
    statuses: list[Status] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)  # of the pages that a fetch writes, before it
    scratch: mmap.mmap | None = None
    is_overdue: bool = False


class TieredStore:
    """One tier of each name, fastest first. give and take are for the engine's loop."""

    def __init__(
        self,
        guards: Iterable[Guard],
        memory: PageMemory,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """wake: called from another thread when there is something to take."""
        self.wake = wake
        self._memory = memory
        self._clock = clock
        self._lanes = {guard.name: _Lane(guard) for guard in guards}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._news: deque[tuple[OrderNews, list[tuple[int, int]]]] = deque()
        self._scratch: list[mmap.mmap] = []
        self._mover = threading.Thread(target=self._run, name="tier-mover", daemon=True)
        self._mover.start()

    def give(self, orders: Iterable[Order]) -> None:
        for order in orders:
            self._inbox.put(lambda order=order: self._take_in(order))  # type: ignore[misc]

    def take(self) -> list[OrderNews]:
        """What happened since the last call; the tags of pages that arrived are written by now."""
        if not self._news:
            return []
        taken: list[OrderNews] = []
        while self._news:
            news, assigned = self._news.popleft()
            if assigned:
                self._memory.assign(assigned)
            taken.append(news)
        return taken

    def states(self) -> dict[TierName, Literal["ok", "broken"]]:
        return {
            name: "broken" if lane.overdue else lane.guard.state
            for name, lane in self._lanes.items()
        }

    def close(self, within_s: float) -> None:
        """End the threads, and the tiers as far as they answer in time."""
        until = self._clock() + within_s
        self._inbox.put(None)
        self._mover.join(within_s)
        closers = [
            threading.Thread(target=lane.guard.close, name=f"close-{name}", daemon=True)
            for name, lane in self._lanes.items()
        ]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(max(0.0, until - self._clock()))

    # --- the mover's own ------------------------------------------------------------------------

    def _run(self) -> None:
        while (act := self._inbox.get()) is not None:
            act()

    def _take_in(self, order: Order) -> None:
        lane = self._lanes[order.tier]
        (lane.reads if isinstance(order, Fetch) else lane.writes).append(order)
        self._advance(lane)

    def _advance(self, lane: _Lane) -> None:
        """Hand the next orders to the guard, as many as may be there at once."""
        while lane.reads and lane.reading < _READS_AT_ONCE:
            lane.reading += 1
            self._try(_Job(lane.reads.popleft(), lane, True, self._clock(), lane.reading))
        while lane.writes and not lane.writing:
            lane.writing = True
            self._try(_Job(lane.writes.popleft(), lane, False, self._clock()))

    def _try(self, job: _Job) -> None:
        """Whatever goes wrong before the guard has it, the order has its answer."""
        if job.lane.overdue and isinstance(job.order, Fetch | CopyOut | CopyDown):
            self._refuse(job)
            return
        try:
            self._begin(job)
        except Exception:  # such as no memory for a copy: to the cache it is a miss
            traceback.print_exc()
            self._refuse(job)

    def _refuse(self, job: _Job) -> None:
        job.at = list(range(_num_pages(job.order)))
        self._inbox.put(lambda: self._answered(job, [Status.UNAVAILABLE] * len(job.at)))

    def _begin(self, job: _Job) -> None:
        order, guard = job.order, job.lane.guard
        deadline = self._clock() + WRITE_S
        match order:
            case Fetch():
                job.at = list(range(len(order.keys)))
                job.views = self._memory.incoming(order.page_ids)
                job.tags = [self._memory.generation(page) for page in order.page_ids]
                guard.submit_get(order.keys, job.views, order.deadline, **self._calls(job))
            case CopyOut():
                job.statuses = [Status.STALE] * len(order.records)
                job.at = self._sound(order, range(len(order.records)))
                job.views = self._memory.outgoing([order.page_ids[at] for at in job.at])
                records = [order.records[at] for at in job.at]
                guard.submit_put(records, job.views, deadline, **self._calls(job))
            case CopyDown():
                job.at = list(range(len(order.records)))
                job.scratch, job.views = self._borrow(len(order.records))
                keys = [record.key for record in order.records]
                source = self._lanes[order.source].guard
                source.submit_get(keys, job.views, deadline, **self._source_calls(job))
            case Drop():
                job.at = list(range(len(order.keys)))
                guard.submit_remove(order.keys, deadline, **self._calls(job))
            case PurgeTier():
                job.at = [0]
                guard.submit_purge(order.owner, order.deadline, **self._calls(job))
            case Flush():
                job.at = [0]
                guard.submit_flush(deadline, **self._calls(job))
            case _:
                assert_never(order)

    def _calls(self, job: _Job) -> dict[str, Callable[..., None]]:
        """Answers come on a guard's thread; the mover takes them."""
        return {
            "on_done": lambda statuses: self._inbox.put(lambda: self._answered(job, statuses)),
            "on_quiet": lambda: self._inbox.put(lambda: self._quiet(job)),
        }

    def _source_calls(self, job: _Job) -> dict[str, Callable[..., None]]:
        # Scratch that an overdue read may still write is never used again: nothing is put from it.
        return {
            "on_done": lambda found: self._inbox.put(lambda: self._down(job, found)),
            "on_quiet": lambda: None,
        }

    def _down(self, job: _Job, found: list[Status]) -> None:
        """A copy between tiers was read: put what is right."""
        order = job.order
        assert isinstance(order, CopyDown)
        lost = (Status.MISS, Status.CORRUPT)
        job.statuses = [status if status in lost else Status.STALE for status in found]
        job.at = [at for at, status in enumerate(found) if status is Status.OK]
        if not job.at:
            self._answered(job, [])
            return
        job.lane.guard.submit_put(
            [order.records[at] for at in job.at],
            [job.views[at] for at in job.at],
            self._clock() + WRITE_S,
            **self._calls(job),
        )

    def _answered(self, job: _Job, statuses: list[Status]) -> None:
        """The guard says how it went; pages of TIMEOUT stay with the job until it is quiet."""
        order, lane = job.order, job.lane
        told = job.statuses or list(statuses)
        for at, status in zip(job.at, statuses, strict=True):
            told[at] = status
        assigned: list[tuple[int, int]] = []
        match order:
            case Fetch():
                right = [at for at, status in enumerate(told) if status is Status.OK]
                for at in right:
                    if self._memory.generation(order.page_ids[at]) != job.tags[at]:
                        told[at] = Status.STALE  # it was given to another meanwhile
                assigned = [
                    (order.page_ids[at], order.generations[at])
                    for at in right
                    if told[at] is Status.OK
                ]
                here = [at for at in right if told[at] is Status.OK]
                self._memory.arrive(
                    [order.page_ids[at] for at in here], [job.views[at] for at in here]
                )
            case CopyOut():
                stored = [at for at in job.at if told[at] is Status.OK]
                foreign = set(stored) - set(self._sound(order, stored))
                for at in foreign:
                    told[at] = Status.STALE  # the books forget it, and drop what was put
        job.is_overdue = Status.TIMEOUT in told
        lane.overdue += job.is_overdue
        seconds = self._clock() - job.started
        if job.is_read:
            seconds /= max(job.at_once, lane.reading)
        self._tell(OrderDone(order.order_id, tuple(told), seconds), assigned)
        if job.is_read:
            lane.reading -= 1
        else:
            lane.writing = False
        self._advance(lane)

    def _quiet(self, job: _Job) -> None:
        """No tier touches the job's memory any more."""
        if job.scratch is None:
            self._memory.free(job.views)
        elif len(self._scratch) < _IDLE_SCRATCH:
            self._scratch.append(job.scratch)
        job.views = []
        if job.is_overdue:
            job.lane.overdue -= 1
            self._tell(OrderQuiet(job.order.order_id), [])

    def _sound(self, order: CopyOut, at: Iterable[int]) -> list[int]:
        """Of these indices, those whose page still is what the order says."""
        return [
            index
            for index in at
            if self._memory.generation(order.page_ids[index]) == order.records[index].generation
        ]

    def _tell(self, news: OrderNews, assigned: list[tuple[int, int]]) -> None:
        self._news.append((news, assigned))
        self.wake()

    def _borrow(self, num_pages: int) -> tuple[mmap.mmap, list[memoryview]]:
        """Page-aligned memory for a copy between tiers."""
        size = self._memory.page_bytes
        memory = next((one for one in self._scratch if len(one) >= num_pages * size), None)
        if memory is None:
            memory = mmap.mmap(-1, num_pages * size)
        else:
            self._scratch.remove(memory)
        view = memoryview(memory)
        return memory, [view[at * size : (at + 1) * size] for at in range(num_pages)]


def _num_pages(order: Order) -> int:
    """How many statuses an order is answered with."""
    match order:
        case Fetch() | Drop():
            return len(order.keys)
        case CopyOut() | CopyDown():
            return len(order.records)
        case PurgeTier() | Flush():
            return 1
