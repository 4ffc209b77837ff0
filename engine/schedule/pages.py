"""One tier's pages: who holds each, which are free, and the generation that tags reassignments.

A page is free only when no hold is left; no timeout ends a hold. A page whose only hold is the
cache's is idle: counted as cached, and the first to go when pages are needed.

    free ──take──▶ held ──release──▶ free
                   │  ▲
           release │  │ hold (a prefix hit)
                   ▼  │
                   idle (cached) ──the cache evicts──▶ free
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import NewType

PageId = NewType("PageId", int)


class HoldKind(IntEnum):
    SEQUENCE = 0
    CACHE = 1
    STEP = 2  # a step in flight still writes or reads the page
    TRANSFER = 3
    TIER_COPY = 4
    PIN = 5


class HoldError(RuntimeError):
    """A hold was taken on a free page or given back twice: the books are wrong."""


class PagePool:
    """Page ids 0 … num_pages-1. The free list is a stack, so that few pages are ever touched."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.generations = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._counts = [[0] * num_pages for _ in HoldKind]
        self._totals = [0] * num_pages
        # Pages that only the cache holds, longest idle first: insertion order is the LRU order,
        # a counter and not a clock, so that equal histories evict equally.
        self._idle: OrderedDict[PageId, None] = OrderedDict()
        self._idled: dict[PageId, None] = {}  # became idle since take_idled, in that order

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free) - len(self._idle)

    @property
    def idle(self) -> Collection[PageId]:
        """Pages that only the cache holds, longest idle first."""
        return self._idle

    def take_idled(self) -> Iterable[PageId]:
        """Pages that became idle since the last call, in that order; some may be idle no more."""
        idled, self._idled = self._idled, {}
        return idled

    def take(self, kind: HoldKind) -> PageId | None:
        """Assign a free page to who will write it; its generation rises. None: no page is free."""
        if not self._free:
            return None
        page = PageId(self._free.pop())
        self.generations[page] += 1
        self._counts[kind][page] = 1
        self._totals[page] = 1
        return page

    def hold(self, pages: Iterable[PageId], kind: HoldKind) -> None:
        """Add one hold to each page. Raises HoldError on a free page: take() assigns those."""
        counts, totals = self._counts[kind], self._totals
        for page in pages:
            if not totals[page]:
                raise HoldError(f"page {page} is free and cannot get a {kind.name} hold")
            counts[page] += 1
            totals[page] += 1
            if page in self._idle:
                del self._idle[page]

    def release(self, pages: Iterable[PageId], kind: HoldKind) -> None:
        """Take one hold from each page, in order. Raises HoldError where there is none."""
        counts, totals = self._counts[kind], self._totals
        cache = self._counts[HoldKind.CACHE]
        for page in pages:
            if not counts[page]:
                raise HoldError(f"page {page} has no {kind.name} hold to release")
            counts[page] -= 1
            totals[page] -= 1
            if not totals[page]:
                self._idle.pop(page, None)
                self._free.append(page)
            elif totals[page] == cache[page]:
                self._idle[page] = None
                self._idled.pop(page, None)
                self._idled[page] = None

    def holds(self, page: PageId, kind: HoldKind) -> int:
        return self._counts[kind][page]

    def num_with(self, kind: HoldKind) -> int:
        """Pages that have a hold of this kind; asked for reports, not in steps."""
        return sum(map(bool, self._counts[kind]))

    def invariants(self) -> None:
        """Raise AssertionError unless free + held + cached = all and every count agrees."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert self.num_free + self.num_held + self.num_cached == self.num_pages
        for page in range(self.num_pages):
            counts = [kind[page] for kind in self._counts]
            assert min(counts) >= 0
            assert sum(counts) == self._totals[page]
            assert (page in free) == (self._totals[page] == 0)
            assert counts[HoldKind.CACHE] <= 1
            only_cache = self._totals[page] == counts[HoldKind.CACHE] == 1
            assert (page in self._idle) == only_cache
