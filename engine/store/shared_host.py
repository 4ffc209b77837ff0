"""The shared arena as one engine's host tier: when it is full, whatever is oldest there goes.

Each engine's books know only what it put there itself, so none of them can say whom to evict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.store.shared_arena import SharedArenaTier
from engine.store.tier import PageRecord, Status, TierStats
from policies.contract.page_keys import resident_pages
from policies.contract.wire import Tier as TierName

_SPARE_SHARE = 64  # of the arena are evicted at once, at least: looking for the oldest walks it all


class SharedHostTier:
    name: TierName = "host"

    def __init__(self, arena: SharedArenaTier) -> None:
        self._arena = arena

    @property
    def capacity_pages(self) -> int:
        return self._arena.capacity_pages

    @property
    def arena_id(self) -> str:
        return self._arena.arena_id

    def peek(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are there; where a chain has a hole after all, get tells."""
        return resident_pages(keys, lambda key: self.lookup([key], 0.0) > 0)

    def records(self) -> Iterable[PageRecord]:
        return self._arena.records()

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        return self._arena.lookup(keys, deadline)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        return self._arena.get(keys, into, deadline)

    def put(
        self, records: Sequence[PageRecord], payloads: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        statuses = self._arena.put(records, payloads, deadline)
        full = [at for at, status in enumerate(statuses) if status is Status.NOSPACE]
        if full:
            mine = {record.key for record in records}  # never one for the other
            count = max(len(full), self.capacity_pages // _SPARE_SHARE)
            oldest = [at.key for at in self._arena.oldest(count + len(mine)) if at.key not in mine]
            self._arena.remove(oldest[:count], deadline)
            again = self._arena.put(
                [records[at] for at in full], [payloads[at] for at in full], deadline
            )
            for at, status in zip(full, again, strict=True):
                statuses[at] = status
        return statuses

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        return self._arena.remove(keys, deadline)

    def purge(self, owner: bytes, deadline: float) -> Status:
        return self._arena.purge(owner, deadline)

    def flush(self, deadline: float) -> Status:
        return self._arena.flush(deadline)

    def stats(self) -> TierStats:
        return self._arena.stats()

    def close(self) -> None:
        self._arena.close()
