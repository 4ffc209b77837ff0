"""The host tier that engines of one machine share: one memory file with a table of its pages.

Reads take no lock: they copy, then prove header and payload by their checksums, so that whatever a
writer does meanwhile is a miss. Writers hold a lock of the kernel, which lets go of it when a
process is killed, and mark the table as in change; who finds that mark without its writer rebuilds
the index from the slots. So a kill at any moment loses the page that was being written, no more.

The arena outlives a killed engine, whose successor finds its pages; the last to close removes it.
Where all were killed, the next one of whatever home that makes an arena removes what they left.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ConfigError
from engine.store.arena_table import KEY_AT, Table, part_offsets
from engine.store.page_codec import (
    Header,
    PageFault,
    PageLayout,
    check_page,
    copy_bytes,
    decode_header,
    encode_header,
    layout_digest,
)
from engine.store.tier import COUNTED_AS, PageRecord, Status, TierStats
from policies.contract.page_keys import KEY_BYTES
from policies.contract.wire import Tier as TierName

FIELD = "--kv-host-mb"
FOLDER = Path("/dev/shm")
MAGIC = b"KGSA"
VERSION = 2
# magic, version, capacity, page bytes, index size, layout, id: drawn when it is made
_HEAD = struct.Struct("<4sIQQQ32s16s")
LOCK_POLL_S = 0.0005
START_S = 10.0
CLOSE_S = 2.0
WIPE_SLOTS = 64  # a purge lets others in after so many


class SharedArenaTier:
    """capacity_pages is what the arena was made with, which may be another engine's number."""

    name: TierName = "host"

    def __init__(
        self, home: Path, layout: PageLayout, capacity_pages: int, *, folder: Path = FOLDER
    ) -> None:
        """Engines of one home and layout meet in one arena. Raises ConfigError where the machine
        refuses its memory, or the file is somebody else's."""
        digest = sha256(str(home.resolve()).encode() + layout_digest(layout)).hexdigest()
        self.path = folder / f"kagari-{digest[:32]}"
        self._layout = layout
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._writing = threading.Lock()  # among our threads; the file's among processes
        self._closed = False
        self._lock_fd = _lock_to_start(self.path)
        self._table: Table | None = None
        try:
            self._fd, self._table = _attach(self.path, layout, capacity_pages)
            self._table.mend()
        except BaseException:
            os.close(self._lock_fd)
            raise
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        # Not closed by close(): one of our threads may still wait for it.
        weakref.finalize(self, os.close, self._lock_fd)
        self.capacity_pages = self._table.capacity
        # Engines with the same one meet here; on another machine the same path is another arena.
        self.arena_id = _read_head(self._fd)[-1].hex()

    def records(self) -> list[PageRecord]:
        return [record for _, record in self._held()]

    def oldest(self, count: int) -> list[PageRecord]:
        """Whom to evict, whichever engine put them: least recently used first, and of one use the
        deepest first."""
        table = self._table
        if table is None:
            return []
        held = self._held()
        held.sort(key=lambda page: (int(table.uses[page[0]]), -page[1].depth))
        return [record for _, record in held[:count]]

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        table = self._table
        if table is None:
            return 0
        return next((at for at, key in enumerate(keys) if table.find(key) is None), len(keys))

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        for view in into:
            if len(view) != self._layout.page_bytes:
                raise ValueError(f"view has {len(view)} bytes, want {self._layout.page_bytes}")
        now = time.monotonic_ns()  # one for all: a chain's pages are of one age
        statuses = [
            self._read(key, view, deadline, now) for key, view in zip(keys, into, strict=True)
        ]
        self._count(statuses, ok="hits")
        return statuses

    def put(
        self, records: Sequence[PageRecord], payloads: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        now = time.monotonic_ns()
        statuses = [
            self._write(record, payload, deadline, now)
            for record, payload in zip(records, payloads, strict=True)
        ]
        self._count([status for status in statuses if status is not None], ok="stored")
        return [status or Status.OK for status in statuses]

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        with self._change(deadline) as table:
            if isinstance(table, Status):
                statuses = [table] * len(keys)
            else:
                statuses = [Status.OK if table.drop(key) else Status.MISS for key in keys]
        self._count([status for status in statuses if status is not Status.MISS], ok="removed")
        return statuses

    def purge(self, owner: bytes, deadline: float) -> Status:
        """Also over what was removed and still lies there."""
        while True:
            with self._change(deadline) as table:
                if isinstance(table, Status):
                    return table
                slots = table.owned(owner)
                for slot in slots[:WIPE_SLOTS]:
                    table.wipe(slot)
            if len(slots) <= WIPE_SLOTS:
                return Status.OK

    def flush(self, deadline: float) -> Status:
        """Nothing here outlives the machine."""
        return Status.UNAVAILABLE if self._table is None else Status.OK

    def stats(self) -> TierStats:
        table = self._table
        used = 0 if table is None else int(np.count_nonzero(table.states))
        with self._counting:
            return TierStats(self.capacity_pages, used, **self._counts)

    def close(self) -> None:
        """The last to close removes the arena. A writer that is stopped is not waited for."""
        with self._counting:
            if self._closed:
                return
            self._closed = True
        with self._locked(time.monotonic() + CLOSE_S) as status:
            self._table = None  # its memory goes with the last copy that still runs
            if status is None and _try_flock(self._fd):
                _remove(self.path)
            # Not by closing, which copies of the descriptor outlive: of two that leave at once the
            # second must see that it is the last.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

    # --- inside ---------------------------------------------------------------------------------

    def _held(self) -> list[tuple[int, PageRecord]]:
        """Slot and record of every page, parents first."""
        table = self._table
        if table is None:
            return []
        headers = (
            (int(slot), decode_header(table.headers[slot].tobytes(), layout=self._layout))
            for slot in np.flatnonzero(table.states)
        )
        held = [(slot, header.record) for slot, header in headers if isinstance(header, Header)]
        held.sort(key=lambda page: page[1].depth)
        return held

    def _read(self, key: bytes, view: memoryview, deadline: float, now: int) -> Status:
        table = self._table
        if table is None:
            return Status.UNAVAILABLE
        if time.monotonic() >= deadline:
            return Status.TIMEOUT
        slot = table.find(key)
        if slot is None:
            return Status.MISS
        sequence = int(table.sequences[slot])
        header = table.headers[slot].tobytes()
        if header[KEY_AT : KEY_AT + KEY_BYTES] != key:
            return Status.MISS  # changed hands since it was found
        copy_bytes(table.payload(slot), view)
        # By what was delivered. The sequence only tells a page that changed hands beneath from one
        # that is broken; that the bytes are right rests on their checksum alone.
        found = check_page(header, view, page_key=key, layout=self._layout)
        if not isinstance(found, PageFault):
            table.uses[slot] = now
            return Status.OK
        if sequence % 2 or int(table.sequences[slot]) != sequence:
            return Status.MISS
        with self._change(deadline) as changing:
            if not isinstance(changing, Status) and int(table.sequences[slot]) == sequence:
                changing.drop(key)
        return Status.CORRUPT

    def _write(
        self, record: PageRecord, payload: memoryview, deadline: float, now: int
    ) -> Status | None:
        """None: it is held already."""
        table = self._table
        if table is not None and table.find(record.key) is not None and time.monotonic() < deadline:
            return None  # without a checksum and without the lock
        header = encode_header(record, payload, layout=self._layout)
        with self._change(deadline) as changing:
            if isinstance(changing, Status):
                return changing
            if changing.find(record.key) is not None:
                return None
            is_kept = changing.fill(record.key, header, payload, now)
            return Status.OK if is_kept else Status.NOSPACE

    @contextmanager
    def _change(self, deadline: float) -> Iterator[Table | Status]:
        """The table, ours alone to change, or why not."""
        if self._table is None:
            yield Status.UNAVAILABLE
            return
        with self._locked(deadline) as status:
            table = self._table
            if status is not None or table is None:
                yield status or Status.UNAVAILABLE
                return
            table.mend()
            table.mark[0] = 1
            yield table
            table.mark[0] = 0  # not after an error: the next one mends

    @contextmanager
    def _locked(self, deadline: float) -> Iterator[Status | None]:
        """Among our threads and among processes; TIMEOUT where that takes too long."""
        left = min(threading.TIMEOUT_MAX, max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline or not self._writing.acquire(timeout=left):
            yield Status.TIMEOUT
            return
        try:
            while not _try_flock(self._lock_fd):
                if time.monotonic() >= deadline:
                    yield Status.TIMEOUT
                    return
                time.sleep(LOCK_POLL_S)
            try:
                yield None
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._writing.release()

    def _count(self, statuses: list[Status], *, ok: str) -> None:
        fields = {**COUNTED_AS, Status.OK: ok}
        with self._counting:
            self._counts.update(fields[status] for status in statuses)


def _attach(path: Path, layout: PageLayout, capacity: int) -> tuple[int, Table]:
    """An arena that is whole, or that others are in, is taken as it is; any other one is made
    anew. Under the lock."""
    fd = _open_private(path)
    magic, version, found, page_bytes, index_size, digest, _ = _read_head(fd)
    same = (magic, version, page_bytes, digest) == (
        MAGIC,
        VERSION,
        layout.page_bytes,
        layout_digest(layout),
    )
    whole = same and os.fstat(fd).st_size == part_offsets(found, page_bytes, index_size)["end"]
    if whole and (found == capacity or not _try_flock(fd)):
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd, Table(_map(fd), found, page_bytes, index_size)
    os.close(fd)
    path.unlink(missing_ok=True)
    _remove_abandoned(path)
    fd = _open_private(path)
    index_size = max(8, 2 * capacity)
    size = part_offsets(capacity, layout.page_bytes, index_size)["end"]
    try:
        os.posix_fallocate(fd, 0, size)  # else a full /dev/shm kills whoever writes a page
    except OSError as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise ConfigError(
            FIELD,
            found=f"{size >> 20} MB, and {path.parent} refuses them ({error.strerror})",
            allowed=f"what {path.parent} has room for",
            remedy=f"lower {FIELD}, or enlarge {path.parent} (a container's: --shm-size)",
        ) from error
    fcntl.flock(fd, fcntl.LOCK_SH)
    table = Table(_map(fd), capacity, layout.page_bytes, index_size)
    os.pwrite(  # last: a file without it is made anew
        fd,
        _HEAD.pack(
            *(MAGIC, VERSION, capacity, layout.page_bytes, index_size),
            *(layout_digest(layout), os.urandom(16)),
        ),
        0,
    )
    return fd, table


def _remove_abandoned(own: Path) -> None:
    """Arenas of ours beside this one that no engine is in: their memory would be lost for good."""
    for lock in own.parent.glob("kagari-" + 32 * "[0-9a-f]" + ".lock"):
        arena = lock.with_suffix("")
        if arena == own:
            continue
        with suppress(ConfigError, OSError):
            lock_fd = _open_private(lock)
            try:
                if not (_try_flock(lock_fd) and _is_at(lock_fd, lock)):
                    continue  # one is about to be in it
                fd = _open_private(arena)
                try:
                    if _try_flock(fd):
                        _remove(arena)
                finally:
                    os.close(fd)
            finally:
                os.close(lock_fd)


def _remove(arena: Path) -> None:
    """Under its lock, which goes with it: who waits for that one finds it gone and takes the new
    one's."""
    arena.unlink(missing_ok=True)
    arena.with_suffix(".lock").unlink(missing_ok=True)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _read_head(fd: int) -> tuple[Any, ...]:
    return _HEAD.unpack(os.pread(fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))


def _map(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, os.fstat(fd).st_size)


def _open_private(path: Path) -> int:
    """Ours and nobody else's to read. Raises ConfigError where it is somebody else's."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_ours(path, error.strerror) from error
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise _not_ours(path, f"owner {status.st_uid}, mode {status.st_mode & 0o777:o}")
    return fd


def _not_ours(path: Path, found: object) -> ConfigError:
    return ConfigError(
        FIELD,
        found=f"{path} ({found})",
        allowed="a file of this user, mode 600",
        remedy=f"remove {path}, or run the engines as one user",
    )


def _lock_to_start(path: Path) -> int:
    """The arena's lock, held. Raises ConfigError where another holds it for too long."""
    lock = path.with_suffix(".lock")
    deadline = time.monotonic() + START_S
    while True:
        fd = _open_private(lock)
        if _try_flock(fd) and _is_at(fd, lock):
            return fd
        os.close(fd)
        if time.monotonic() >= deadline:
            raise ConfigError(
                FIELD,
                found=f"{path}, whose lock another engine has held for {START_S:g} s",
                allowed="engines that run",
                remedy=f"continue or end the stopped engine (fuser {path})",
            )
        time.sleep(LOCK_POLL_S)


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
