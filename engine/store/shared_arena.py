"""The host tier that engines of one machine share: one memory file with a table of its pages.

Reads take no lock: they copy, then prove header and payload by their checksums, so that whatever a
writer does meanwhile is a miss. Writers hold a lock of the kernel, which lets go of it when a
process is killed, and mark the table as in change; who finds that mark without its writer rebuilds
the index from the slots. So a kill at any moment loses the page that was being written, no more.

file:   header (one block) · states u8 · sequences u64 · last uses u64 · index u32 · page headers ·
        payloads, each part beginning on a block
state:  1: holds a page. sequence: odd while its slot is written
index:  open addressing by the key's first bytes; 0: empty, else slot + 1

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
import numpy.typing as npt

from engine.config import ConfigError
from engine.store.page_codec import (
    HEADER_BYTES,
    Header,
    PageFault,
    PageLayout,
    check_page,
    copy_bytes,
    decode_header,
    encode_header,
    layout_digest,
)
from engine.store.tier import PageRecord, Status, TierStats
from policies.contract.page_keys import KEY_BYTES, OWNER_BYTES
from policies.contract.wire import Tier as TierName

FIELD = "--kv-host-mb"
FOLDER = Path("/dev/shm")
BLOCK = 4096
MAGIC = b"KGSA"
VERSION = 2
# magic, version, capacity, page bytes, index size, layout, id: drawn when it is made
_HEAD = struct.Struct("<4sIQQQ32s16s")
_MARK = 256  # in the header, u64: 1 while a writer changes the table
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
        fields = {
            Status.OK: ok,
            Status.MISS: "misses",
            Status.STALE: "corrupt",
            Status.CORRUPT: "corrupt",
            Status.TIMEOUT: "timeouts",
            Status.NOSPACE: "refused",
            Status.UNAVAILABLE: "unavailable",
        }
        with self._counting:
            self._counts.update(fields[status] for status in statuses)


class Table:
    """The arena's parts, as arrays over its memory. Changes under the lock only."""

    def __init__(self, memory: mmap.mmap, capacity: int, page_bytes: int, index_size: int) -> None:
        self.capacity = capacity
        self._page_bytes = page_bytes
        places = _places(capacity, page_bytes, index_size)
        whole = memoryview(memory)

        def part(name: str, dtype: type, count: int) -> npt.NDArray[np.generic]:
            return np.frombuffer(whole, dtype, count, places[name])

        self.mark = np.frombuffer(whole, np.uint64, 1, _MARK)
        self.states = part("states", np.uint8, capacity)
        self.sequences = part("sequences", np.uint64, capacity)
        self.uses = part("uses", np.uint64, capacity)
        self.index = part("index", np.uint32, index_size)
        self.headers = part("headers", np.uint8, capacity * HEADER_BYTES).reshape(capacity, -1)
        self._payloads = whole[places["payloads"] :]

    def payload(self, slot: int) -> memoryview:
        return self._payloads[slot * self._page_bytes : (slot + 1) * self._page_bytes]

    def find(self, key: bytes) -> int | None:
        """The slot that holds this key, as far as its header says."""
        found = self._entry(key)
        return None if found is None else found[1]

    def fill(self, key: bytes, header: bytes, payload: memoryview, now: int) -> bool:
        """A page into a free slot; False: there is none."""
        slot = int(np.argmin(self.states)) if self.capacity else 0
        if not self.capacity or self.states[slot]:
            return False
        sequence = int(self.sequences[slot]) | 1
        self.sequences[slot] = sequence
        self.headers[slot] = np.frombuffer(header, np.uint8)  # first: a purge goes by its owner
        copy_bytes(payload, self.payload(slot))
        self.uses[slot] = now
        self.sequences[slot] = sequence + 1
        self.states[slot] = 1
        self._enter(key, slot)
        return True

    def drop(self, key: bytes) -> bool:
        found = self._entry(key)
        if found is None:
            return False
        entry, slot = found
        self._leave(entry)
        self.states[slot] = 0
        self.sequences[slot] = (int(self.sequences[slot]) | 1) + 1
        return True

    def owned(self, owner: bytes) -> list[int]:
        """Slots whose header names this owner, free ones included."""
        owners = self.headers[:, OWNER_AT : OWNER_AT + OWNER_BYTES]
        same = (owners == np.frombuffer(owner, np.uint8)).all(axis=1) & (self.headers[:, 0] != 0)
        return [int(slot) for slot in np.flatnonzero(same)]

    def wipe(self, slot: int) -> None:
        if self.states[slot]:
            self.drop(self._key(slot))
        sequence = int(self.sequences[slot]) | 1
        self.sequences[slot] = sequence
        copy_bytes(bytes(self._page_bytes), self.payload(slot))
        self.headers[slot] = 0  # last: killed before, the next purge finds it
        self.sequences[slot] = sequence + 1

    def mend(self) -> None:
        """After a writer that was killed within its change."""
        if self.mark[0]:
            self._rebuild()
            self.mark[0] = 0

    def _rebuild(self) -> None:
        """The index from the slots. What was half written was never in a state to be found."""
        self.index[:] = 0
        for slot in np.flatnonzero(self.states):
            if self._entry(self._key(int(slot))) is None:
                self._enter(self._key(int(slot)), int(slot))
            else:
                self.states[slot] = 0

    def _key(self, slot: int) -> bytes:
        return self.headers[slot, KEY_AT : KEY_AT + KEY_BYTES].tobytes()

    def _home(self, key: bytes) -> int:
        return int.from_bytes(key[:8], "little") % len(self.index)

    def _probe(self, key: bytes) -> Iterator[int]:
        home, size = self._home(key), len(self.index)
        return ((home + step) % size for step in range(size))

    def _entry(self, key: bytes) -> tuple[int, int] | None:
        """Entry and slot, read at once: another process may change the entry meanwhile."""
        for entry in self._probe(key):
            value = int(self.index[entry])
            if not value:
                return None
            if value <= self.capacity and self._key(value - 1) == key:
                return entry, value - 1
        return None

    def _enter(self, key: bytes, slot: int) -> None:
        entry = next(entry for entry in self._probe(key) if not self.index[entry])
        self.index[entry] = slot + 1

    def _leave(self, gap: int) -> None:
        """What was entered past this entry because of it moves up, so that no entry is ever left
        to be stepped over. A reader may miss a page meanwhile."""
        size = len(self.index)
        at = (gap + 1) % size
        while value := int(self.index[at]):
            passed = (at - self._home(self._key(value - 1))) % size
            if passed >= (at - gap) % size:
                self.index[gap] = value
                gap = at
            at = (at + 1) % size
        self.index[gap] = 0


# Where page_codec's header has key and owner; a test holds these to it.
KEY_AT = struct.calcsize("<4sIQQQ")
OWNER_AT = KEY_AT + 2 * KEY_BYTES


def _places(capacity: int, page_bytes: int, index_size: int) -> dict[str, int]:
    """Offset of each part, and of the end."""
    places: dict[str, int] = {}
    at = BLOCK
    for name, size in (
        ("states", capacity),
        ("sequences", 8 * capacity),
        ("uses", 8 * capacity),
        ("index", 4 * index_size),
        ("headers", HEADER_BYTES * capacity),
        ("payloads", page_bytes * capacity),
    ):
        places[name] = at
        at += -(-size // BLOCK) * BLOCK
    return places | {"end": at}


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
    whole = same and os.fstat(fd).st_size == _places(found, page_bytes, index_size)["end"]
    if whole and (found == capacity or not _try_flock(fd)):
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd, Table(_map(fd), found, page_bytes, index_size)
    os.close(fd)
    path.unlink(missing_ok=True)
    _remove_abandoned(path)
    fd = _open_private(path)
    index_size = max(8, 2 * capacity)
    size = _places(capacity, layout.page_bytes, index_size)["end"]
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
