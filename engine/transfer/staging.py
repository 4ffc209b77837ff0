"""Pages between machines by Mooncake's Transfer Engine (RDMA, NVLink, TCP), an extra.

The sender copies pages into memory of its own and has the engine write them into the receiver's;
neither side's pages are registered with it. Its ports have no authentication and are open on every
address: whoever reaches them can read and write staging memory. So pages are believed by the
SHA-256 in their message alone, and a network where others could read them is no place for this.

A write may last for seconds after its peer was stopped or its transfer ended. Therefore memory is
never given back to the system, and that of a peer which has not said that it is done rests for
REST_S before it serves another.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.store.mooncake import HANG_S, library
from engine.store.page_codec import copy_bytes
from engine.transfer.messages import Staging

FIELD = "--transfer"
BUFFER_BYTES = 8 << 20  # and more where two pages are
MAX_BUFFERS = 16  # each of one transfer
REST_S = 12.0 * HANG_S


@dataclass(eq=False, slots=True)
class Buffer:
    """Registered memory. rests_until: a late write may still come before."""

    memory: mmap.mmap
    address: int
    rests_until: float = 0.0

    def place(self, at: int, place_bytes: int) -> memoryview:
        return memoryview(self.memory)[at * place_bytes : (at + 1) * place_bytes]


class TransferEngine:
    """Mooncake's, one a process, and the memory that is registered with it."""

    def __init__(self, host: str) -> None:
        """host: where peers reach this machine. Raises ConfigError where Mooncake is not installed,
        OSError where it does not start."""
        self._engine: Any = library("mooncake.engine", FIELD).TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if code:
            raise OSError(f"Mooncake's Transfer Engine does not start: {code}")
        self.name = f"{host}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._num_buffers = 0
        self._idle: list[Buffer] = []

    def borrow(self, num_bytes: int) -> Buffer | None:
        """None: all are in use, or rest."""
        now = time.monotonic()
        with self._lock:
            for buffer in self._idle:
                if len(buffer.memory) >= num_bytes and buffer.rests_until <= now:
                    self._idle.remove(buffer)
                    return buffer
            if self._num_buffers == MAX_BUFFERS:
                return None
            memory = mmap.mmap(-1, max(num_bytes, BUFFER_BYTES))
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            if self._engine.register_memory(address, len(memory)):
                return None
            self._num_buffers += 1
            return Buffer(memory, address)

    def give_back(self, buffer: Buffer, *, rest_s: float = 0.0) -> None:
        buffer.rests_until = time.monotonic() + rest_s
        with self._lock:
            self._idle.append(buffer)

    def write(
        self, peer: str, sources: Sequence[int], targets: Sequence[int], num_bytes: int
    ) -> bool:
        """Blocks; whether num_bytes from each source are at its target."""
        sizes = [num_bytes] * len(sources)
        code = self._engine.batch_transfer_sync_write(peer, list(sources), list(targets), sizes)
        return bool(code == 0)


class OwnStaging:
    """The receiver's."""

    is_private = False

    def __init__(
        self, engine: TransferEngine, buffer: Buffer, *, places: int, place_bytes: int
    ) -> None:
        self._engine = engine
        self._buffer = buffer
        self.told = Staging(engine.name, buffer.address, places, place_bytes)

    def place(self, at: int) -> memoryview:
        return self._buffer.place(at, self.told.place_bytes)

    def close(self, *, is_drained: bool) -> None:
        self._engine.give_back(self._buffer, rest_s=0.0 if is_drained else REST_S)


class PeerStaging:
    """The sender's: each place of its own memory goes to the peer's of that number."""

    is_private = False

    def __init__(
        self,
        engine: TransferEngine,
        buffer: Buffer,
        told: Staging,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        """call: have something done on the mover's thread."""
        self.places = told.places
        self._engine = engine
        self._buffer = buffer
        self._told = told
        self._call = call
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="transfer-writer", daemon=True).start()

    def put(
        self, places: Sequence[int], pages: Sequence[memoryview], then: Callable[[bool], None]
    ) -> None:
        size = self._told.place_bytes
        for place, page in zip(places, pages, strict=True):
            copy_bytes(page, self._buffer.place(place, size))
        sources = [self._buffer.address + place * size for place in places]
        targets = [self._told.address + place * size for place in places]

        def write() -> None:
            is_there = self._engine.write(self._told.engine, sources, targets, size)
            self._call(lambda: then(is_there))

        self._writes.put(write)

    def close(self) -> None:
        """The memory is free once the last write has returned."""
        self._writes.put(None)

    def _work(self) -> None:
        while (write := self._writes.get()) is not None:
            write()
        self._engine.give_back(self._buffer)
