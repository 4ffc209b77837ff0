"""Memory that pages pass through beside the connection: which kind, and how much of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, assert_never

from engine.transfer.messages import MAX_RUN, Room, SharedRoom, Staging
from engine.transfer.shared_room import SharedRooms
from engine.transfer.staging import OwnStaging, PeerStaging, TransferEngine

Way = Literal["shm", "mooncake"]
WAYS: dict[str, tuple[Way, ...]] = {  # --transfer → in this order, and the connection if all fail
    "auto": ("shm",),
    "tcp": (),
    "mooncake": ("mooncake",),
}
ROOM_BYTES = 8 << 20  # but two pages at least: one is read while the next is written
LEAST_PLACES = 2


class OwnRoom(Protocol):
    """The receiver's. is_private: nobody else can write there, and a checksum will do."""

    is_private: bool

    @property
    def told(self) -> Room: ...

    def place(self, at: int) -> memoryview: ...

    def close(self, *, is_drained: bool) -> None:
        """is_drained: nobody will write to it any more."""


class PeerRoom(Protocol):
    """The sender's way into the receiver's."""

    places: int
    is_private: bool

    def put(
        self, places: Sequence[int], pages: Sequence[memoryview], then: Callable[[bool], None]
    ) -> None:
        """Pages are not read after the return. then: on the mover's thread, whether they are
        there."""

    def close(self) -> None: ...


def make_room(
    ways: Sequence[str],
    shared_rooms: SharedRooms,
    engine: TransferEngine | None,
    *,
    num_pages: int,
    place_bytes: int,
    is_local: bool,
) -> OwnRoom | None:
    """By the first of the ways that both can go; None: pages follow their messages."""
    places = places_of(place_bytes)
    for way in ways if num_pages else ():
        if way == "shm" and is_local:
            try:
                return shared_rooms.make(places=places, place_bytes=place_bytes)
            except OSError:  # no memory to spare
                continue
        if way == "mooncake" and engine is not None:
            buffer = engine.borrow(places * place_bytes)
            if buffer is not None:
                return OwnStaging(engine, buffer, places=places, place_bytes=place_bytes)
    return None


def reach_room(
    room: Room | None,
    shared_rooms: SharedRooms,
    engine: TransferEngine | None,
    *,
    place_bytes: int,
    call: Callable[[Callable[[], None]], None],
) -> PeerRoom | None:
    """The room that the peer made, if it is within reach."""
    match room:
        case None:
            return None
        case SharedRoom():
            try:
                return shared_rooms.reach(room, place_bytes)
            except OSError:  # another machine, user or namespace
                return None
        case Staging():
            ours = places_of(place_bytes), place_bytes
            if engine is None or (room.places, room.place_bytes) != ours:
                return None
            buffer = engine.borrow(room.places * place_bytes)
            return None if buffer is None else PeerStaging(engine, buffer, room, call)
        case _:
            assert_never(room)


def places_of(place_bytes: int) -> int:
    return min(MAX_RUN, max(LEAST_PLACES, ROOM_BYTES // place_bytes))
