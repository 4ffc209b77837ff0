"""Carries out the orders of tiers' books against an ArenaRunner's pages, as badly as it is told to.

Each order is begun, then answered, then (after a TIMEOUT) goes quiet, when a test says so. What a
tier stores are copies of the arena's states; while a call is under way or overdue its pages are
scribbled on or read again, so that a page given back too early shows in somebody's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.schedule.orders import (
    CopyDown,
    CopyOut,
    Drop,
    Fetch,
    Flush,
    Order,
    OrderDone,
    OrderQuiet,
    PurgeTier,
)
from engine.schedule.tiers import SlowerTiers
from engine.store.tier import PageRecord, Status
from tests.engine.arena_runner import ArenaRunner

GARBAGE = -7
Stored = tuple[PageRecord, list[int]]
Fault = Callable[[Order, int], Status]  # (order, index of the page) → what comes of it


def sound(order: Order, index: int) -> Status:
    return Status.OK


@dataclass
class FakeTier:
    capacity: int
    pages: dict[bytes, Stored] = field(default_factory=dict)


class OrderBench:
    """capacities by tier name; 0: unlimited, and content unknown to the books."""

    def __init__(self, books: SlowerTiers, runner: ArenaRunner, capacities: dict[str, int]) -> None:
        self.books = books
        self.runner = runner
        self.stores = {name: FakeTier(capacity) for name, capacity in capacities.items()}
        self.waiting: list[Order] = []
        self.overdue: list[tuple[Order, list[int]]] = []  # and which of its pages
        self.unpurged: set[tuple[str, bytes]] = set()  # (tier, owner) of purges that failed

    def gather(self) -> None:
        self.waiting += self.books.take_orders()

    def ready(self) -> list[Order]:
        """Orders that may be carried out next: fetches in any order, writes as they came."""
        self.gather()
        writing: set[str] = set()
        found = []
        for order in self.waiting:
            if isinstance(order, Fetch):
                found.append(order)
            elif order.tier not in writing:
                writing.add(order.tier)
                found.append(order)
        return found

    def carry_out(self, order: Order, now: float, fault: Fault = sound) -> None:
        self.waiting.remove(order)
        store = self.stores[order.tier]
        match order:
            case CopyOut():
                statuses = [
                    self._put(store, record, self._read(page, record), fault(order, at))
                    for at, (page, record) in enumerate(
                        zip(order.page_ids, order.records, strict=True)
                    )
                ]
            case CopyDown():
                source = self.stores[order.source].pages
                statuses = []
                for at, record in enumerate(order.records):
                    held = source.get(record.key)
                    if held is None:
                        statuses.append(Status.MISS)
                    else:
                        statuses.append(self._put(store, record, held[1], fault(order, at)))
            case Fetch():
                statuses = [
                    self._get(store, order, at, fault(order, at)) for at in range(len(order.keys))
                ]
            case Drop():
                statuses = []
                for at, key in enumerate(order.keys):
                    status = fault(order, at)
                    if status is Status.OK:
                        status = Status.OK if store.pages.pop(key, None) else Status.MISS
                    statuses.append(status)
            case PurgeTier():
                statuses = [fault(order, 0)]
                self.unpurged.add((order.tier, order.owner))
                if statuses == [Status.OK]:
                    self.unpurged.discard((order.tier, order.owner))
                    for key, (record, _) in list(store.pages.items()):
                        if record.owner == order.owner:
                            del store.pages[key]
            case Flush():
                statuses = [fault(order, 0)]
        late = [at for at, status in enumerate(statuses) if status is Status.TIMEOUT]
        if late:
            self.overdue.append((order, late))
        self.books.take(OrderDone(order.order_id, tuple(statuses), 1e-5), now)

    def meddle(self) -> None:
        """Overdue calls are still at it."""
        for order, late in self.overdue:
            if isinstance(order, Fetch):
                for at in late:
                    self.runner.arena[order.page_ids[at]] = [GARBAGE] * self.runner.page_size

    def quiet(self, at: int, now: float, *, lands: bool = False) -> None:
        """An overdue call returns; lands: a put that was given up is stored after all."""
        self.meddle()
        order, late = self.overdue.pop(at)
        if lands and isinstance(order, CopyOut):
            for index in late:
                page, record = order.page_ids[index], order.records[index]
                states = self._read(page, record)
                if states is not None:
                    self._put(self.stores[order.tier], record, states, Status.OK)
        self.books.take(OrderQuiet(order.order_id), now)

    def settle(self, now: float, *, quiet: bool = True) -> bool:
        """Everything is carried out well and goes quiet; whether there was anything. Orders that
        make ever more orders are an error."""
        count = 0
        while ready := self.ready():
            count += 1
            assert count < 1000, "orders without end"
            self.carry_out(ready[0], now)
        while quiet and self.overdue:
            count += 1
            self.quiet(0, now)
        return count > 0

    def _read(self, page: int, record: PageRecord) -> list[int] | None:
        """None: the page is another's by its tag."""
        if self.runner.tags[page] != record.generation:
            return None
        return list(self.runner.arena[page])

    def _put(
        self, store: FakeTier, record: PageRecord, states: list[int] | None, status: Status
    ) -> Status:
        if states is None:
            return Status.STALE
        if status is not Status.OK:
            return status
        if record.key in store.pages:
            assert store.pages[record.key][1] == states, "two contents of one key"
            return Status.OK
        if store.capacity and len(store.pages) >= store.capacity:
            return Status.NOSPACE
        store.pages[record.key] = (record, states)
        return Status.OK

    def _get(self, store: FakeTier, order: Fetch, at: int, status: Status) -> Status:
        page = order.page_ids[at]
        self.runner.arena[page] = [GARBAGE] * self.runner.page_size
        key = order.keys[at]
        if status is Status.CORRUPT:
            store.pages.pop(key, None)
        if status is not Status.OK:
            return status
        held = store.pages.get(key)
        if held is None:
            return Status.MISS
        self.runner.arena[page] = list(held[1])
        self.runner.tags[page] = order.generations[at]
        return Status.OK
