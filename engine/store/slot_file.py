"""The disk tier: one preallocated file of equal slots that finds its pages again after any end.

file: a block that tells what it is, then slots. slot: the page's header in a block of its own, then
the payload in whole blocks, written by one pwritev. There is no other index: a start reads the
headers, and a get checks the payload against them. So a torn or damaged slot is a miss, and nothing
need be synced for a page to be right; syncing only lets more of them survive a power cut.

slot: free → (forgotten in memory) → written → listed → forgotten, bytes still there → free
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import xxhash

from engine.store.block_file import BLOCK, FULL, BlockFile, aligned, unusable, whole_blocks
from engine.store.page_codec import (
    HEADER_BYTES,
    PageFault,
    PageLayout,
    check_page,
    copy_bytes,
    decode_header,
    encode_header,
    layout_digest,
)
from engine.store.places import UNKNOWN, Held, Places, seconds_left
from engine.store.tier import PageRecord, Status, TierStats
from policies.contract.wire import Tier as TierName

FILE_NAME = "pages.slots"
MAGIC = b"KGSF"
VERSION = 1
DEPTH = 4  # threads that read, and as many that write: what a disk does at once
SYNC_EVERY_S = 30.0
CLOSE_S = 5.0  # the most that close waits for reads and writes
_LABEL = struct.Struct("<4sIQQ32s?")  # magic, version, slot bytes, slots, layout, closed in order


class SlotFileTier:
    """folder: this engine's own; the tier's file in it is remade for another layout or capacity,
    as far as its slots no longer check. notes: what an operator should be told of the start."""

    name: TierName = "disk"

    def __init__(
        self,
        folder: Path,
        layout: PageLayout,
        capacity_pages: int,
        on_scan: Callable[[float], None] | None = None,
        *,
        direct: bool = True,
    ) -> None:
        """on_scan: told the share of slots that were scanned. direct: around the page cache where
        the file system can. Raises ConfigError as BlockFile does."""
        self._layout = layout
        self._slot_bytes = BLOCK + whole_blocks(layout.page_bytes)
        self._places = Places(capacity_pages)
        self._idle_buffers: list[memoryview] = []
        self._zeros = aligned(self._slot_bytes)
        self._next_sync = time.monotonic() + SYNC_EVERY_S
        self._is_closed = False
        size = BLOCK + capacity_pages * self._slot_bytes
        self._file = BlockFile(folder / FILE_NAME, size, direct=direct)
        self._readers = ThreadPoolExecutor(DEPTH, "slot-file-read")
        self._writers = ThreadPoolExecutor(DEPTH, "slot-file-write")
        try:
            self.notes = self._start(on_scan or (lambda share: None))
        except BaseException as error:
            self._end_threads()
            self._file.close()
            if isinstance(error, OSError):
                raise unusable(self._file.path, error) from error
            raise

    @property
    def is_direct(self) -> bool:
        return self._file.is_direct

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
        jobs = [
            partial(self._read, key, view, deadline) for key, view in zip(keys, into, strict=True)
        ]
        with self._places.call() as is_open:
            statuses = _each(self._readers, jobs) if is_open else [Status.UNAVAILABLE] * len(jobs)
        self._places.count(statuses, ok="hits")
        return statuses

    def put(
        self, records: Sequence[PageRecord], payloads: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        jobs = [
            partial(self._write, record, payload, deadline)
            for record, payload in zip(records, payloads, strict=True)
        ]
        with self._places.call() as is_open:
            statuses = _each(self._writers, jobs) if is_open else [Status.UNAVAILABLE] * len(jobs)
            if is_open and (now := time.monotonic()) >= self._next_sync:
                self._next_sync = now + SYNC_EVERY_S
                self._writers.submit(self._sync)
        self._places.count(statuses)
        return statuses

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """In memory alone: after a restart a page may be there again, as right as it was."""
        return self._places.remove(keys)

    def purge(self, owner: bytes, deadline: float) -> Status:
        """Zeros on the disk over every slot that an owner's bytes may lie in, torn ones included:
        after an end out of order every page is read once first, to know that it is only its own."""
        with self._places.call() as is_open:
            if not is_open:
                return Status.UNAVAILABLE
            for record in self._places.records():
                if record.owner == owner:
                    self._places.forget(record.key)
            jobs = [partial(self._prove, key, deadline) for key in self._places.unproven()]
            if Status.TIMEOUT in _each(self._readers, jobs):
                return Status.TIMEOUT
            status = self._places.purge(owner, self._wipe, deadline)
            self._idle_buffers.clear()  # pages went through them
            return self._sync_until(deadline) if status is Status.OK else status

    def flush(self, deadline: float) -> Status:
        with self._places.call() as is_open:
            return self._sync_until(deadline) if is_open else Status.UNAVAILABLE

    def stats(self) -> TierStats:
        return self._places.stats()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        is_idle = self._places.close(time.monotonic() + CLOSE_S)
        if not is_idle:  # a disk that hangs: threads are still within the file
            return
        self._end_threads()
        try:
            self._file.sync()
            if not self._places.doubts():
                self._label(is_clean=True)
                self._file.sync()
        except OSError:
            pass  # not said to be in order, then
        finally:
            self._file.close()

    # --- one slot --------------------------------------------------------------------------------

    def _read(self, key: bytes, view: memoryview, deadline: float) -> Status:
        if len(view) != self._layout.page_bytes:
            raise ValueError(f"view has {len(view)} bytes, want {self._layout.page_bytes}")
        if time.monotonic() >= deadline:
            return Status.TIMEOUT
        held = self._places.hold(key)
        if held is None:
            return Status.MISS
        try:
            with self._buffer() as buffer:
                return self._fetch(held, buffer, view)
        finally:
            self._places.release(held)

    def _fetch(self, held: Held, buffer: memoryview, view: memoryview) -> Status:
        """Through the buffer only where the view cannot be read into."""
        is_straight = self._file.takes(view)
        head, body, rest = self._parts(buffer)
        try:
            got = self._file.read(
                self._offset(held.place), [head, view, rest] if is_straight else [buffer]
            )
        except OSError:
            return Status.UNAVAILABLE
        if not is_straight:
            copy_bytes(body, view)
        found = check_page(head[:HEADER_BYTES], view, page_key=held.record.key, layout=self._layout)
        if got != self._slot_bytes or _holds_any(head[HEADER_BYTES:], rest):
            found = PageFault("torn")  # what is left is of before, in the file or in memory
        if not isinstance(found, PageFault):
            self._places.prove(held)
            return Status.OK
        self._places.distrust(held)
        return Status.STALE if found.reason == "foreign" else Status.CORRUPT

    def _write(self, record: PageRecord, payload: memoryview, deadline: float) -> Status:
        if time.monotonic() >= deadline:
            return Status.TIMEOUT
        place = self._places.claim(record)
        if isinstance(place, Status):
            return place
        status = Status.UNAVAILABLE
        try:
            with self._buffer() as buffer:
                status = self._store(record, payload, place, buffer)
        finally:
            if status is Status.OK:
                self._places.publish(record, place, b"")
            else:
                self._places.abandon(place)
        return status

    def _store(
        self, record: PageRecord, payload: memoryview, place: int, buffer: memoryview
    ) -> Status:
        head, body, rest = self._parts(buffer)
        head[:] = encode_header(record, payload, layout=self._layout).ljust(BLOCK, b"\0")
        rest[:] = bytes(len(rest))
        if self._file.takes(payload):
            return self._write_out(place, [head, payload, rest])
        copy_bytes(payload, body)
        return self._write_out(place, [buffer])

    def _write_out(self, place: int, views: list[memoryview]) -> Status:
        try:
            written = self._file.write(self._offset(place), views)
        except OSError as error:
            return Status.NOSPACE if error.errno in FULL else Status.UNAVAILABLE
        return Status.OK if written == sum(map(len, views)) else Status.NOSPACE

    def _wipe(self, place: int) -> Status:
        return self._write_out(place, [self._zeros])

    def _prove(self, key: bytes, deadline: float) -> Status:
        """What cannot be read is given up: its slot is wiped with those that no one knows."""
        held = self._places.hold(key)
        if held is None:
            return Status.MISS
        try:
            if time.monotonic() >= deadline:
                return Status.TIMEOUT
            with self._buffer() as buffer:
                status = self._fetch(held, buffer, self._parts(buffer)[1])
            if status is Status.UNAVAILABLE:
                self._places.distrust(held)
            return status
        finally:
            self._places.release(held)

    def _parts(self, buffer: memoryview) -> tuple[memoryview, memoryview, memoryview]:
        """The header's block, the payload, and what fills its last block: zeros."""
        end = BLOCK + self._layout.page_bytes
        return buffer[:BLOCK], buffer[BLOCK:end], buffer[end:]

    def _offset(self, place: int) -> int:
        return BLOCK + place * self._slot_bytes

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        """A slot's worth of aligned memory; as many exist as were ever in use at once."""
        try:
            buffer = self._idle_buffers.pop()
        except IndexError:
            buffer = aligned(self._slot_bytes)
        try:
            yield buffer
        finally:
            self._idle_buffers.append(buffer)

    # --- the whole file --------------------------------------------------------------------------

    def _start(self, on_scan: Callable[[float], None]) -> tuple[str, ...]:
        was_clean, was_ours = self._read_label()
        self._label(is_clean=False)
        self._file.sync()
        if self._file.was_empty:
            on_scan(1.0)
        else:
            self._scan(on_scan, is_trusted=was_clean)
        notes, path = [], self._file.path
        if not was_ours and not self._file.was_empty:
            notes.append(f"{path}: of another layout, size or version; kept is what still checks")
        if not self._file.is_direct:
            notes.append(f"{path}: through the page cache ({self._file.why_buffered})")
        return tuple(notes)

    def _scan(self, on_scan: Callable[[float], None], *, is_trusted: bool) -> None:
        """is_trusted: every slot is known to be whole, or empty."""
        pages: list[Held] = []
        owners: list[bytes | None] = []
        capacity = self._places.capacity
        stride = max(16, -(-capacity // 200))
        parts = [
            range(start, min(start + stride, capacity)) for start in range(0, capacity, stride)
        ]
        for part, headers in zip(parts, self._readers.map(self._read_headers, parts), strict=True):
            for place, header in zip(part, headers, strict=True):
                if header is None:
                    owners.append(UNKNOWN)
                    continue
                found = decode_header(header, layout=self._layout)
                if isinstance(found, PageFault):
                    is_empty = is_trusted and not any(header)
                    owners.append(None if is_empty else UNKNOWN)
                    continue
                pages.append(Held(found.record, place, found.checksum))
                owners.append(found.record.owner if is_trusted else UNKNOWN)
            on_scan((part.stop) / capacity)
        self._places.adopt(pages, owners)

    def _read_headers(self, part: range) -> list[bytes | None]:
        """None: it cannot be read."""
        headers: list[bytes | None] = []
        with self._buffer() as buffer:
            block = buffer[:BLOCK]
            for place in part:
                try:
                    got = self._file.read(self._offset(place), [block])
                except OSError:
                    got = 0
                headers.append(bytes(block[:HEADER_BYTES]) if got == BLOCK else None)
        return headers

    def _read_label(self) -> tuple[bool, bool]:
        """Whether the file was closed in order, and whether it has this layout and size."""
        with self._buffer() as buffer:
            try:
                self._file.read(0, [buffer[:BLOCK]])
            except OSError:
                return False, False
            label = bytes(buffer[: _LABEL.size + 16])
        clean, unclean = self._label_bytes(is_clean=True), self._label_bytes(is_clean=False)
        return label == clean or self._file.was_empty, label in (clean, unclean)

    def _label(self, *, is_clean: bool) -> None:
        with self._buffer() as buffer:
            buffer[:BLOCK] = self._label_bytes(is_clean=is_clean).ljust(BLOCK, b"\0")
            self._file.write(0, [buffer[:BLOCK]])

    def _label_bytes(self, *, is_clean: bool) -> bytes:
        digest = layout_digest(self._layout)
        fields = _LABEL.pack(
            MAGIC, VERSION, self._slot_bytes, self._places.capacity, digest, is_clean
        )
        return fields + xxhash.xxh3_128_digest(fields)

    def _sync_until(self, deadline: float) -> Status:
        future = self._writers.submit(self._sync)
        try:
            return future.result(seconds_left(deadline))
        except TimeoutError:
            return Status.TIMEOUT

    def _sync(self) -> Status:
        with self._places.call() as is_open:
            if not is_open:
                return Status.UNAVAILABLE
            try:
                self._file.sync()
            except OSError:
                return Status.UNAVAILABLE
            return Status.OK

    def _end_threads(self) -> None:
        for threads in (self._readers, self._writers):
            threads.shutdown(cancel_futures=True)


def _each(threads: ThreadPoolExecutor, jobs: Sequence[Callable[[], Status]]) -> list[Status]:
    """All of them, side by side; none still runs after the return. One alone needs no thread."""
    if len(jobs) == 1:
        return [jobs[0]()]
    futures: list[Future[Status]] = [threads.submit(job) for job in jobs]
    wait(futures)
    return [future.result() for future in futures]


def _holds_any(*fillings: memoryview) -> bool:
    return any(bytes(filling).count(0) != len(filling) for filling in fillings)
