"""The numbered log of what became resident where, and what left: what routing is told."""

from __future__ import annotations

from collections.abc import Iterable

from policies.contract.page_keys import EVENT_KEY_BYTES
from policies.contract.wire import CacheCleared, PageEvent, PageRemoved, PageStored, Tier


class PageEventLog:
    """Begins with Cleared for each tier: whatever an engine before this one published is gone."""

    def __init__(self, tiers: Iterable[Tier] = ("device",)) -> None:
        self._events: list[PageEvent] = [CacheCleared(tier) for tier in tiers]
        self._first = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def stored(self, key: bytes, tier: Tier = "device") -> None:
        self._events.append(PageStored(key[:EVENT_KEY_BYTES], tier))

    def removed(self, key: bytes, tier: Tier = "device") -> None:
        self._events.append(PageRemoved(key[:EVENT_KEY_BYTES], tier))

    def take(self) -> tuple[int, list[PageEvent]]:
        """(sequence number of the first, the events since the last call)."""
        first, events = self._first, self._events
        self._first += len(events)
        self._events = []
        return first, events
