"""The host tier: pages in one arena of this machine's memory, each with its checksum beside it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from contextlib import suppress

from engine.config import ConfigError
from engine.store.page_codec import PageLayout, copy_bytes, payload_checksum
from engine.store.places import Held, Places
from engine.store.tier import PageRecord, Status, TierStats
from policies.contract.wire import Tier as TierName

CLOSE_S = 5.0  # the most that close waits for copies


class HostTier:
    """Place n is bytes n × page_bytes onward of the arena. Copies and checksums run beside other
    threads, the interpreter's lock let go."""

    name: TierName = "host"

    def __init__(
        self, layout: PageLayout, capacity_pages: int, *, arena: memoryview | None = None
    ) -> None:
        """arena: writable bytes to use in place of memory of its own, capacity_pages × page_bytes
        or more. Raises ConfigError where the machine has not that much to give."""
        self._page_bytes = layout.page_bytes
        self._places = Places(capacity_pages)
        size = capacity_pages * layout.page_bytes
        self._arena: memoryview | None = _memory(size) if arena is None else arena.cast("B")
        if len(self._arena) < size:
            raise ValueError(f"arena has {len(self._arena)} bytes, want {size}")

    @property
    def capacity_pages(self) -> int:
        return self._places.capacity

    def records(self) -> list[PageRecord]:
        return self._places.records()

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        return self._places.depth(keys)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        with self._places.call() as is_open:
            statuses = [
                self._read(key, view, deadline) if is_open else Status.UNAVAILABLE
                for key, view in zip(keys, into, strict=True)
            ]
        self._places.count(statuses, ok="hits")
        return statuses

    def put(
        self, records: Sequence[PageRecord], payloads: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        with self._places.call() as is_open:
            statuses = [
                self._write(record, payload, deadline) if is_open else Status.UNAVAILABLE
                for record, payload in zip(records, payloads, strict=True)
            ]
        self._places.count(statuses)
        return statuses

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        return self._places.remove(keys)

    def purge(self, owner: bytes, deadline: float) -> Status:
        with self._places.call() as is_open:
            if not is_open:
                return Status.UNAVAILABLE
            return self._places.purge(owner, self._wipe, deadline)

    def flush(self, deadline: float) -> Status:
        """Nothing here outlives the process."""
        with self._places.call() as is_open:
            return Status.OK if is_open else Status.UNAVAILABLE

    def stats(self) -> TierStats:
        return self._places.stats()

    def close(self) -> None:
        """The memory goes with the last copy that still uses it."""
        self._places.close(time.monotonic() + CLOSE_S)
        self._arena = None

    def _read(self, key: bytes, view: memoryview, deadline: float) -> Status:
        if len(view) != self._page_bytes:
            raise ValueError(f"view has {len(view)} bytes, want {self._page_bytes}")
        if time.monotonic() >= deadline:
            return Status.TIMEOUT
        held = self._places.hold(key)
        if held is None:
            return Status.MISS
        try:
            copy_bytes(self._place(held.place), view)
            return self._judge(held, view)
        finally:
            self._places.release(held)

    def _judge(self, held: Held, view: memoryview) -> Status:
        """By what was delivered, so that a fault of the copy counts too."""
        if payload_checksum(view) == held.checksum:
            return Status.OK
        self._places.distrust(held)
        return Status.CORRUPT

    def _write(self, record: PageRecord, payload: memoryview, deadline: float) -> Status:
        if len(payload) != self._page_bytes:
            raise ValueError(f"payload has {len(payload)} bytes, want {self._page_bytes}")
        if time.monotonic() >= deadline:
            return Status.TIMEOUT
        place = self._places.claim(record)
        if isinstance(place, Status):
            return place
        checksum = payload_checksum(payload)
        copy_bytes(payload, self._place(place))
        self._places.publish(record, place, checksum)
        return Status.OK

    def _wipe(self, place: int) -> Status:
        copy_bytes(bytes(self._page_bytes), self._place(place))
        return Status.OK

    def _place(self, place: int) -> memoryview:
        assert self._arena is not None, "closed"
        return self._arena[place * self._page_bytes : (place + 1) * self._page_bytes]


def _memory(size: int) -> memoryview:
    """Zeroed, taken from the machine as it is first written, in large pages where it has them."""
    try:
        memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            "--kv-host-mb",
            found=f"{size >> 20} MB, and the machine refuses them ({error})",
            allowed="what its memory has room for",
            remedy="lower --kv-host-mb",
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
