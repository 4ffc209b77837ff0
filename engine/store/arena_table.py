"""The table of a shared arena: which slot holds which page, as arrays over one memory file.

file:   header (one block) · states u8 · sequences u64 · last uses u64 · index u32 · page headers ·
        payloads, each part beginning on a block
state:  1: holds a page. sequence: odd while its slot is written
index:  open addressing by the key's first bytes; 0: empty, else slot + 1
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from engine.store.block_file import BLOCK, whole_blocks
from engine.store.page_codec import HEADER_BYTES, copy_bytes
from policies.contract.page_keys import KEY_BYTES, OWNER_BYTES

_MARK = 256  # in the file's header, u64: 1 while a writer changes the table
# Where page_codec's header has key and owner; a test holds these to it.
KEY_AT = struct.calcsize("<4sIQQQ")
OWNER_AT = KEY_AT + 2 * KEY_BYTES


class Table:
    """The arena's parts, as arrays over its memory. Changes under the lock only."""

    def __init__(self, memory: mmap.mmap, capacity: int, page_bytes: int, index_size: int) -> None:
        self.capacity = capacity
        self._page_bytes = page_bytes
        places = part_offsets(capacity, page_bytes, index_size)
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


def part_offsets(capacity: int, page_bytes: int, index_size: int) -> dict[str, int]:
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
        at += whole_blocks(size)
    return places | {"end": at}
