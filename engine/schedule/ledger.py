"""Orders that are out, and the pages that each keeps until nobody touches them any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.schedule.orders import Drop, Flush, Order, PurgeTier
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.shelf import Shelf
from engine.store.tier import Status

_UNDROPPED_KEYS = 4096  # of a tier; of more it is not known that they lie there in vain


@dataclass(slots=True, eq=False)
class Minor:
    """An order of which only its end matters. keys: that it is to remove."""

    shelf: Shelf
    order: Drop | PurgeTier | Flush
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """Pages of one order, and keys that it may put even when it is overdue."""

    shelf: Shelf
    kind: HoldKind
    pages: list[PageId]
    keys: tuple[bytes, ...] = ()
    num_fetching: int = 0  # of the pages: those that a fetch writes


Entry = TypeVar("Entry")


class Ledger(Generic[Entry]):
    """Entry: what the books remember of an order beside it."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._orders: list[Order] = []
        self._last_id = 0
        self.under_way: dict[int, Entry | Minor] = {}
        self.overdue: dict[int, Held] = {}

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def give(self, order: Order, entry: Entry | Minor) -> None:
        self._orders.append(order)
        self.under_way[order.order_id] = entry

    def drop(self, shelf: Shelf, keys: Iterable[bytes]) -> None:
        """Let the tier forget what the index has forgotten."""
        wanted = tuple(key for key in (*shelf.undropped, *keys) if key not in shelf.index)
        if wanted:
            shelf.undropped.clear()
            order = Drop(self.next_id(), shelf.name, wanted)
            self.give(order, Minor(shelf, order, wanted))

    def purge(self, shelf: Shelf, owner: bytes, deadline: float, keys: tuple[bytes, ...]) -> int:
        """Returns the order's id; keys: what of the owner the index had."""
        order = PurgeTier(self.next_id(), shelf.name, owner, deadline)
        self.give(order, Minor(shelf, order, keys))
        return order.order_id

    def flush(self, shelf: Shelf) -> None:
        order = Flush(self.next_id(), shelf.name)
        self.give(order, Minor(shelf, order))

    @property
    def is_flushing(self) -> bool:
        return any(
            isinstance(entry, Minor) and isinstance(entry.order, Flush)
            for entry in self.under_way.values()
        )

    def end_minor(self, minor: Minor, statuses: tuple[Status, ...]) -> None:
        """What could not be removed is tried again beside the next drop."""
        settled = (Status.OK, Status.MISS)
        if isinstance(minor.order, Drop):
            answers = zip(minor.keys, statuses, strict=True)
            left = [key for key, status in answers if status not in settled]
        else:
            left = [] if statuses == (Status.OK,) else list(minor.keys)
        minor.shelf.undropped += left
        del minor.shelf.undropped[:-_UNDROPPED_KEYS]

    def give_back(self, order_id: int, held: Held, *, is_overdue: bool) -> None:
        """An order's pages, unless its call may still touch them: then when it is quiet."""
        if is_overdue:
            self.overdue[order_id] = held
        else:
            self._pool.release(held.pages, held.kind)

    def quiet(self, order_id: int) -> Held | None:
        """An overdue order lets go; None: it kept nothing."""
        held = self.overdue.pop(order_id, None)
        if held is not None:
            self._pool.release(held.pages, held.kind)
            self.drop(held.shelf, held.keys)
        return held

    def holds(self, kind: HoldKind) -> Iterator[PageId]:
        """Pages of overdue orders, once for each hold."""
        for held in self.overdue.values():
            if held.kind is kind:
                yield from held.pages
