"""Pages between engines of one machine and user: memory that the receiver makes, both have open.

The memory has no name in any folder (memfd), so nothing is left of it when both are gone, however
they went, and a container's small /dev/shm does not matter. The sender finds it as a descriptor of
the receiver's process. That both are on one machine is proven and not assumed: the descriptor must
have the name that was drawn for it, be sealed against shrinking, and end in the receiver's nonce.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from engine.store.page_codec import Bytes, payload_checksum
from engine.transfer.messages import MAX_RUN, NONCE_BYTES, Segment

SEGMENT_BYTES = 8 << 20
LEAST_SLOTS = 2


class OwnSegment:
    """The receiver's. Raises OSError where the machine has no memory for it."""

    def __init__(self, slot_bytes: int, num_pages: int) -> None:
        slots = min(MAX_RUN, max(1, num_pages), max(LEAST_SLOTS, SEGMENT_BYTES // slot_bytes))
        nonce = os.urandom(NONCE_BYTES)
        name = f"kagari-{os.urandom(8).hex()}"
        self.num_bytes = slots * slot_bytes + NONCE_BYTES
        self._slot_bytes = slot_bytes
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, self.num_bytes)  # else a full machine kills a writer
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._view = memoryview(mmap.mmap(self._fd, self.num_bytes))
        except OSError:
            os.close(self._fd)
            raise
        self._view[-NONCE_BYTES:] = nonce
        self.told = Segment(os.getpid(), self._fd, name, nonce, slots, slot_bytes)

    def slot(self, at: int) -> memoryview:
        """Raises IndexError on one that there is not."""
        if at >= self.told.slots:
            raise IndexError(f"slot: found {at}, allowed 0 to {self.told.slots - 1}")
        return self._view[at * self._slot_bytes : (at + 1) * self._slot_bytes]

    def digest(self, page: Bytes) -> bytes:
        return payload_checksum(page)

    def close(self) -> None:
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

    def slot(self, at: int) -> memoryview:
        return self._view[at * self._slot_bytes : (at + 1) * self._slot_bytes]

    def digest(self, page: Bytes) -> bytes:
        return payload_checksum(page)
