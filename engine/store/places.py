"""Which place of a tier holds which page: the books of a tier that has its places to itself.

A place is free, being written (claimed), or held. Who copies from a held page holds it meanwhile:
a place whose page is forgotten becomes free only when the last such reader has left, so no copy
ever runs over a place that is given to another page. Nothing here touches bytes; copies run outside
the lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.store.tier import COUNTED_AS, PageRecord, Status, TierStats

UNKNOWN = b""  # bytes of no one knows whom may lie there


@dataclass(slots=True, eq=False)
class Held:
    """A page in its place. is_listed: a later get may still find it."""

    record: PageRecord
    place: int
    checksum: bytes
    readers: int = 0
    is_listed: bool = True


class Places:
    """All methods may be called by several threads at once.

    Of every place it is known whose bytes lie there, held or not: that is what a purge wipes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._changed = threading.Condition()
        self._held: dict[bytes, Held] = {}
        self._free = deque(range(capacity))
        self._owners: list[bytes | None] = [None] * capacity  # None: wiped, or never written
        self._counts: Counter[str] = Counter()
        self._calls = 0
        self._is_closed = False

    # --- calls, so that closing can wait for them ------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[bool]:
        """Around every call of the tier; False: it is closed."""
        with self._changed:
            is_open = not self._is_closed
            self._calls += is_open
        try:
            yield is_open
        finally:
            if is_open:
                with self._changed:
                    self._calls -= 1
                    self._changed.notify_all()

    def close(self, deadline: float) -> bool:
        """No call begins any more; True once the last has left."""
        with self._changed:
            self._is_closed = True
            return self._changed.wait_for(lambda: not self._calls, seconds_left(deadline))

    # --- writing ---------------------------------------------------------------------------------

    def claim(self, record: PageRecord) -> int | Status:
        """A place to write this page to, until publish or abandon; OK if it is held already."""
        with self._changed:
            if record.key in self._held:
                return Status.OK
            if not self._free:
                return Status.NOSPACE
            place = self._free.popleft()
            self._owners[place] = record.owner
            return place

    def publish(self, record: PageRecord, place: int, checksum: bytes) -> None:
        """The claimed place is written in full."""
        with self._changed:
            if record.key in self._held:  # another thread was quicker
                self._free.append(place)
            else:
                self._held[record.key] = Held(record, place, checksum)
                self._counts["stored"] += 1
            self._changed.notify_all()

    def abandon(self, place: int) -> None:
        """The claimed place may be written in part, over whatever lay there."""
        with self._changed:
            self._owners[place] = UNKNOWN
            self._free.append(place)
            self._changed.notify_all()

    # --- reading ---------------------------------------------------------------------------------

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are held."""
        with self._changed:
            if self._is_closed:
                return 0
            missing = (at for at, key in enumerate(keys) if key not in self._held)
            return next(missing, len(keys))

    def hold(self, key: bytes) -> Held | None:
        """The page, which keeps its place until release."""
        with self._changed:
            held = self._held.get(key)
            if held is not None:
                held.readers += 1
            return held

    def release(self, held: Held) -> None:
        with self._changed:
            held.readers -= 1
            self._free_if_unused(held)

    def prove(self, held: Held) -> None:
        """It was read and is wholly what it says."""
        with self._changed:
            if held.is_listed:
                self._owners[held.place] = held.record.owner

    def records(self) -> list[PageRecord]:
        """Parents before children; none once closed."""
        with self._changed:
            records = [] if self._is_closed else [held.record for held in self._held.values()]
        return sorted(records, key=lambda record: record.depth)

    # --- forgetting ------------------------------------------------------------------------------

    def forget(self, key: bytes) -> bool:
        with self._changed:
            held = self._held.get(key)
            if held is None:
                return False
            self._unlist(held)
            self._counts["removed"] += 1
            return True

    def remove(self, keys: Sequence[bytes]) -> list[Status]:
        """A tier's remove: its bytes stay until they are overwritten."""
        with self.call() as is_open:
            if not is_open:
                return [Status.UNAVAILABLE] * len(keys)
            return [Status.OK if self.forget(key) else Status.MISS for key in keys]

    def distrust(self, held: Held) -> None:
        """Its bytes are not what they should be: forget it, and whose they are."""
        with self._changed:
            self._owners[held.place] = UNKNOWN
            self._unlist(held)

    def purge(self, owner: bytes, wipe: Callable[[int], Status], deadline: float) -> Status:
        """Forget all of an owner's pages and wipe every place where bytes of theirs may lie.

        Waits for readers, and for writers that had begun. wipe runs unlocked, on a place that is
        nobody's meanwhile.
        """
        while True:
            with self._changed:
                for held in [one for one in self._held.values() if one.record.owner == owner]:
                    self._unlist(held)
                    self._counts["removed"] += 1
                theirs = {at for at, whose in enumerate(self._owners) if whose in (owner, UNKNOWN)}
                if not theirs:
                    return Status.OK
                ready = theirs.intersection(self._free)
                if not ready:
                    left = seconds_left(deadline)
                    if left <= 0:
                        return Status.TIMEOUT
                    self._changed.wait(left)
                    continue
                self._free = deque(place for place in self._free if place not in ready)
            status = self._wipe(ready, wipe, deadline)
            if status is not Status.OK:
                return status

    # --- a start and its end ---------------------------------------------------------------------

    def adopt(self, pages: Sequence[Held], owners: Sequence[bytes | None]) -> None:
        """What a scan found, and whose bytes lie in each place, before the first call."""
        with self._changed:
            self._held = {}
            for held in pages:
                self._held.setdefault(held.record.key, held)
            taken = {held.place for held in self._held.values()}
            self._free = deque(place for place in range(self.capacity) if place not in taken)
            self._owners = list(owners)

    def unproven(self) -> list[bytes]:
        """Keys of pages that were found at the start and not read since."""
        with self._changed:
            return [key for key, held in self._held.items() if self._owners[held.place] == UNKNOWN]

    def doubts(self) -> bool:
        """Some place holds bytes of no one knows whom."""
        with self._changed:
            return UNKNOWN in self._owners

    def count(self, statuses: Sequence[Status], *, ok: str | None = None) -> None:
        """ok: the counter of those that went well."""
        with self._changed:
            for status in statuses:
                name = COUNTED_AS.get(status, ok)
                if name is not None:
                    self._counts[name] += 1

    def stats(self) -> TierStats:
        with self._changed:
            return TierStats(self.capacity, self.capacity - len(self._free), **self._counts)

    # --- within the lock -------------------------------------------------------------------------

    def _unlist(self, held: Held) -> None:
        if held.is_listed:
            held.is_listed = False
            del self._held[held.record.key]
            self._free_if_unused(held)

    def _free_if_unused(self, held: Held) -> None:
        if not held.is_listed and not held.readers:
            self._free.append(held.place)
            self._changed.notify_all()

    # --- outside of it ---------------------------------------------------------------------------

    def _wipe(self, ready: set[int], wipe: Callable[[int], Status], deadline: float) -> Status:
        status = Status.OK
        try:
            while ready and status is Status.OK:
                place = next(iter(ready))
                status = Status.TIMEOUT if seconds_left(deadline) <= 0 else wipe(place)
                if status is Status.OK:
                    with self._changed:
                        self._owners[place] = None
                        self._free.append(place)
                    ready.discard(place)
        finally:
            with self._changed:
                self._free.extend(ready)
                self._changed.notify_all()
        return status


def seconds_left(deadline: float) -> float:
    """To wait for, as long as a lock can."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
