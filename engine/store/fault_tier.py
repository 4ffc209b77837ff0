"""A tier around another that fails on purpose, by a plan: what a cache must live through."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from engine.store.places import seconds_left
from engine.store.tier import PageRecord, Status, Tier, TierStats
from policies.contract.wire import Tier as TierName

OVERRUN_S = 60.0  # the longest that an overrun lasts if no one releases it


class Fault(Enum):
    """What befalls one page of a get or a put."""

    DROP = "drop"  # a get misses; a put says OK and keeps nothing
    DELAY = "delay"  # delay_s late
    CORRUPT = "corrupt"  # a bit of what is stored flips, before a get or after a put
    HANG = "hang"  # until release or the deadline
    OVERRUN = "overrun"  # until release, whatever the deadline
    NOSPACE = "nospace"  # of a put; a get goes well
    UNAVAILABLE = "unavailable"


def seeded_faults(seed: int, rates: Mapping[Fault, float]) -> Iterator[Fault | None]:
    """Without end; each page meets a fault with its rate. The same seed gives the same plan."""
    chance = random.Random(seed)
    kinds: list[Fault | None] = [None, *rates]
    weights = [1.0 - sum(rates.values()), *rates.values()]
    while True:
        yield from chance.choices(kinds, weights, k=256)


class FaultTier:
    """Pages of gets and puts meet the plan's faults in turn, none once it has ended; all other
    calls go through. injected counts the faults that did befall a page."""

    def __init__(
        self,
        inner: Tier,
        faults: Iterable[Fault | None],
        *,
        flip: Callable[[bytes], bool] | None = None,
        delay_s: float = 0.005,
    ) -> None:
        """flip: changes a bit of what inner holds of a key, beneath its checksum; False: it holds
        none. Without it a corrupted get is answered as a tier that checks would answer."""
        self.inner = inner
        self.injected: Counter[Fault] = Counter()
        self._faults = iter(faults)
        self._flip = flip
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._released = threading.Event()

    @property
    def name(self) -> TierName:
        return self.inner.name

    @property
    def capacity_pages(self) -> int:
        return self.inner.capacity_pages

    def release(self) -> None:
        """What hangs goes on, and nothing hangs any more."""
        self._released.set()

    def records(self) -> Iterable[PageRecord]:
        return self.inner.records()

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        return self.inner.lookup(keys, deadline)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        statuses: list[Status | None] = []
        for key, view in zip(keys, into, strict=True):
            fault = self._next_fault()
            status = self._befall(fault, deadline)
            if fault is Fault.DROP:
                status = Status.MISS
            elif fault is Fault.CORRUPT and self._flip is None:
                view[0] ^= 1
                status = Status.CORRUPT
            elif fault is Fault.NOSPACE or (fault is Fault.CORRUPT and not self._flips(key)):
                fault = None
            self._count(fault)
            statuses.append(status)
        passing = [at for at, status in enumerate(statuses) if status is None]
        found = self.inner.get([keys[at] for at in passing], [into[at] for at in passing], deadline)
        return _merged(statuses, found)

    def put(
        self, records: Sequence[PageRecord], payloads: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        statuses: list[Status | None] = []
        to_flip: list[bytes] = []
        for record in records:
            fault = self._next_fault()
            status = self._befall(fault, deadline)
            if fault is Fault.DROP:
                status = Status.OK
            elif fault is Fault.NOSPACE:
                status = Status.NOSPACE
            elif fault is Fault.CORRUPT:
                to_flip.append(record.key)
            if fault is not Fault.CORRUPT:
                self._count(fault)
            statuses.append(status)
        passing = [at for at, status in enumerate(statuses) if status is None]
        stored = self.inner.put(
            [records[at] for at in passing], [payloads[at] for at in passing], deadline
        )
        for key in to_flip:
            if self._flips(key):
                self._count(Fault.CORRUPT)
        return _merged(statuses, stored)

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        return self.inner.remove(keys, deadline)

    def purge(self, owner: bytes, deadline: float) -> Status:
        return self.inner.purge(owner, deadline)

    def flush(self, deadline: float) -> Status:
        return self.inner.flush(deadline)

    def stats(self) -> TierStats:
        return self.inner.stats()

    def close(self) -> None:
        self.release()
        self.inner.close()

    def _flips(self, key: bytes) -> bool:
        return self._flip is not None and self._flip(key)

    def _next_fault(self) -> Fault | None:
        with self._lock:
            return next(self._faults, None)

    def _count(self, fault: Fault | None) -> None:
        if fault is not None:
            with self._lock:
                self.injected[fault] += 1

    def _befall(self, fault: Fault | None, deadline: float) -> Status | None:
        """What gets and puts meet alike; None: the page is asked of the tier within."""
        left = seconds_left(deadline)
        if fault is Fault.UNAVAILABLE:
            return Status.UNAVAILABLE
        if fault is Fault.DELAY:
            time.sleep(min(left, self._delay_s))
        elif fault is Fault.HANG:
            self._released.wait(left)
        elif fault is Fault.OVERRUN:
            self._released.wait(OVERRUN_S)
        is_late = fault in (Fault.DELAY, Fault.HANG, Fault.OVERRUN) and not seconds_left(deadline)
        return Status.TIMEOUT if is_late else None


def _merged(statuses: Sequence[Status | None], passed: Iterable[Status]) -> list[Status]:
    """passed: of those that are None, in order."""
    rest = iter(passed)
    return [next(rest) if status is None else status for status in statuses]
