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
from collections.abc import Callable, Sequence

from engine.store.page_codec import Bytes, copy_bytes, payload_checksum
from engine.transfer.messages import NONCE_BYTES, Segment


class OwnSegment:
    """The receiver's. Raises OSError where the machine has no memory for it."""

    def __init__(self, *, slots: int, slot_bytes: int) -> None:
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
        return self._view[at * self._slot_bytes : (at + 1) * self._slot_bytes]

    def digest(self, page: Bytes) -> bytes:
        return payload_checksum(page)

    def close(self, *, is_drained: bool) -> None:
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
        """The memory goes with the last view of it."""
