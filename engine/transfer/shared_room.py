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

from engine.store.page_codec import copy_bytes
from engine.transfer.messages import NONCE_BYTES, SharedRoom

KEPT = 4  # of each side, when no transfer uses them


class SharedRooms:
    """An engine's own, and those of peers that it has open. One thread's."""

    def __init__(self) -> None:
        self._idle: list[OwnSharedRoom] = []
        self._peers: OrderedDict[SharedRoom, PeerSharedRoom] = OrderedDict()

    def make(self, *, places: int, place_bytes: int) -> OwnSharedRoom:
        """Raises OSError where the machine has no memory for it."""
        for room in self._idle:
            if (room.told.places, room.told.place_bytes) == (places, place_bytes):
                self._idle.remove(room)
                return room
        return OwnSharedRoom(self, places=places, place_bytes=place_bytes)

    def reach(self, told: SharedRoom, place_bytes: int) -> PeerSharedRoom:
        """Raises OSError where it is not to be found, or is another."""
        room = self._peers.get(told) or PeerSharedRoom(told, place_bytes)
        self._peers[told] = room
        self._peers.move_to_end(told)
        if len(self._peers) > KEPT:
            self._peers.popitem(last=False)
        return room

    def take_back(self, room: OwnSharedRoom) -> None:
        self._idle.append(room)
        if len(self._idle) > KEPT:
            self._idle.pop(0).drop()

    def close(self) -> None:
        for room in self._idle:
            room.drop()
        self._idle.clear()
        self._peers.clear()


class OwnSharedRoom:
    """The receiver's."""

    is_private = True

    def __init__(self, rooms: SharedRooms, *, places: int, place_bytes: int) -> None:
        self._rooms = rooms
        nonce = os.urandom(NONCE_BYTES)
        name = f"kagari-{os.urandom(8).hex()}"
        num_bytes = places * place_bytes + NONCE_BYTES
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)  # else a full machine kills a writer
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._view = memoryview(mmap.mmap(self._fd, num_bytes))
        except OSError:
            os.close(self._fd)
            raise
        self._view[-NONCE_BYTES:] = nonce
        self.told = SharedRoom(os.getpid(), self._fd, name, nonce, places, place_bytes)

    def place(self, at: int) -> memoryview:
        return self._view[at * self.told.place_bytes : (at + 1) * self.told.place_bytes]

    def close(self, *, is_drained: bool) -> None:
        if is_drained:
            self._rooms.take_back(self)
        else:  # its sender may be stopped in the middle of a page
            self.drop()

    def drop(self) -> None:
        """The memory goes with the last view of it."""
        os.close(self._fd)


class PeerSharedRoom:
    """The sender's view of it. Raises OSError where it is not to be found, or is another."""

    is_private = True

    def __init__(self, told: SharedRoom, place_bytes: int) -> None:
        path = f"/proc/{told.pid}/fd/{told.fd}"
        if os.readlink(path) != f"/memfd:{told.name} (deleted)":
            raise FileNotFoundError(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            num_bytes = told.places * told.place_bytes + NONCE_BYTES
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_sealed or (os.fstat(fd).st_size, told.place_bytes) != (
                num_bytes,
                place_bytes,
            ):
                raise FileNotFoundError(path)
            self._view = memoryview(mmap.mmap(fd, num_bytes))
        finally:
            os.close(fd)
        if self._view[-NONCE_BYTES:] != told.nonce:
            raise FileNotFoundError(path)
        self.places = told.places
        self._place_bytes = place_bytes

    def put(
        self, places: Sequence[int], pages: Sequence[memoryview], then: Callable[[bool], None]
    ) -> None:
        for place, page in zip(places, pages, strict=True):
            at = place * self._place_bytes
            copy_bytes(page, self._view[at : at + self._place_bytes])
        then(True)

    def close(self) -> None:
        """It is kept for the next transfer."""
