"""Pages between engines of one machine and user: memory that the receiver makes, both have open.

The memory has no name in any folder (memfd), so nothing is left of it when both are gone, however
they went, and a container's small /dev/shm does not matter. The sender finds it as a descriptor of
the receiver's process. That both are on one machine is proven and not assumed: the descriptor must
have the name that was drawn for it, be sealed against shrinking, and end in the receiver's nonce.

Both keep what they have open for the next transfer: to touch new memory for the first time takes
several times as long as to copy pages into it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.store.page_codec import Bytes, copy_bytes, payload_checksum
from engine.transfer.messages import NONCE_BYTES, Segment

KEPT = 4  # of each side, when no transfer uses them


class Segments:
    """An engine's own segments, and those of peers that it has open. One thread's."""

    def __init__(self) -> None:
        self._idle: list[OwnSegment] = []
        self._peers: OrderedDict[Segment, PeerSegment] = OrderedDict()

    def make(self, *, slots: int, slot_bytes: int) -> OwnSegment:
        """Raises OSError where the machine has no memory for it."""
        for segment in self._idle:
            if (segment.told.slots, segment.told.slot_bytes) == (slots, slot_bytes):
                self._idle.remove(segment)
                return segment
        return OwnSegment(self, slots=slots, slot_bytes=slot_bytes)

    def reach(self, told: Segment, slot_bytes: int) -> PeerSegment:
        """Raises OSError where it is not to be found, or is another."""
        segment = self._peers.get(told) or PeerSegment(told, slot_bytes)
        self._peers[told] = segment
        self._peers.move_to_end(told)
        if len(self._peers) > KEPT:
            self._peers.popitem(last=False)
        return segment

    def take_back(self, segment: OwnSegment) -> None:
        self._idle.append(segment)
        if len(self._idle) > KEPT:
            self._idle.pop(0).drop()

    def close(self) -> None:
        for segment in self._idle:
            segment.drop()
        self._idle.clear()
        self._peers.clear()


class OwnSegment:
    """The receiver's."""

    def __init__(self, segments: Segments, *, slots: int, slot_bytes: int) -> None:
        self._segments = segments
        nonce = os.urandom(NONCE_BYTES)
        name = f"kagari-{os.urandom(8).hex()}"
        num_bytes = slots * slot_bytes + NONCE_BYTES
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)  # else a full machine kills a writer
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._view = memoryview(mmap.mmap(self._fd, num_bytes))
        except OSError:
            os.close(self._fd)
            raise
        self._view[-NONCE_BYTES:] = nonce
        self.told = Segment(os.getpid(), self._fd, name, nonce, slots, slot_bytes)

    def slot(self, at: int) -> memoryview:
        return self._view[at * self.told.slot_bytes : (at + 1) * self.told.slot_bytes]

    def digest(self, page: Bytes) -> bytes:
        return payload_checksum(page)

    def close(self, *, is_drained: bool) -> None:
        if is_drained:
            self._segments.take_back(self)
        else:  # its sender may be stopped in the middle of a page
            self.drop()

    def drop(self) -> None:
        """The memory goes with the last view of it."""
        os.close(self._fd)


class PeerSegment:
    """The sender's view of it. Raises OSError where it is not to be found, or is another."""

    def __init__(self, told: Segment, slot_bytes: int) -> None:
        path = f"/proc/{told.pid}/fd/{told.fd}"
        if os.readlink(path) != f"/memfd:{told.name} (deleted)":
            raise FileNotFoundError(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            num_bytes = told.slots * told.slot_bytes + NONCE_BYTES
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_sealed or (os.fstat(fd).st_size, told.slot_bytes) != (num_bytes, slot_bytes):
                raise FileNotFoundError(path)
            self._view = memoryview(mmap.mmap(fd, num_bytes))
        finally:
            os.close(fd)
        if self._view[-NONCE_BYTES:] != told.nonce:
            raise FileNotFoundError(path)
        self.slots = told.slots
        self._slot_bytes = slot_bytes

    def digest(self, page: Bytes) -> bytes:
        return payload_checksum(page)

    def put(
        self, slots: Sequence[int], pages: Sequence[memoryview], then: Callable[[bool], None]
    ) -> None:
        for slot, page in zip(slots, pages, strict=True):
            at = slot * self._slot_bytes
            copy_bytes(page, self._view[at : at + self._slot_bytes])
        then(True)

    def close(self) -> None:
        """It is kept for the next transfer."""
