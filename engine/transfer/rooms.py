"""Memory that pages pass through beside the connection: which kind, and how much of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, assert_never

from engine.store.page_codec import Bytes
from engine.transfer.messages import MAX_RUN, Room, Segment, Staging
from engine.transfer.segment import Segments
from engine.transfer.staging import OwnStaging, PeerStaging, TransferEngine

Way = Literal["shm", "mooncake"]
WAYS: dict[str, tuple[Way, ...]] = {  # --transfer → in this order, and the connection if all fail
    "auto": ("shm",),
    "tcp": (),
    "mooncake": ("mooncake",),
}
ROOM_BYTES = 8 << 20  # but two pages at least: one is read while the next is written
LEAST_SLOTS = 2


class OwnRoom(Protocol):
    """The receiver's."""

    @property
    def told(self) -> Room: ...

    def slot(self, at: int) -> memoryview: ...

    def digest(self, page: Bytes) -> bytes: ...

    def close(self, *, is_drained: bool) -> None:
        """is_drained: nobody will write to it any more."""


class PeerRoom(Protocol):
    """The sender's way into the receiver's."""

    slots: int

    def digest(self, page: Bytes) -> bytes: ...

    def put(
        self, slots: Sequence[int], pages: Sequence[memoryview], then: Callable[[bool], None]
    ) -> None:
        """Pages are not read after the return. then: on the mover's thread, whether they are
        there."""

    def close(self) -> None: ...


def make_room(
    ways: Sequence[str],
    segments: Segments,
    engine: TransferEngine | None,
    *,
    num_pages: int,
    slot_bytes: int,
    is_local: bool,
) -> OwnRoom | None:
    """By the first of the ways that both can go; None: pages follow their messages."""
    slots = slots_of(slot_bytes)
    for way in ways if num_pages else ():
        if way == "shm" and is_local:
            try:
                return segments.make(slots=slots, slot_bytes=slot_bytes)
            except OSError:  # no memory to spare
                continue
        if way == "mooncake" and engine is not None:
            buffer = engine.borrow(slots * slot_bytes)
            if buffer is not None:
                return OwnStaging(engine, buffer, slots=slots, slot_bytes=slot_bytes)
    return None


def reach_room(
    room: Room | None,
    segments: Segments,
    engine: TransferEngine | None,
    *,
    slot_bytes: int,
    call: Callable[[Callable[[], None]], None],
) -> PeerRoom | None:
    """The room that the peer made, if it is within reach."""
    match room:
        case None:
            return None
        case Segment():
            try:
                return segments.reach(room, slot_bytes)
            except OSError:  # another machine, user or namespace
                return None
        case Staging():
            ours = slots_of(slot_bytes), slot_bytes
            if engine is None or (room.slots, room.slot_bytes) != ours:
                return None
            buffer = engine.borrow(room.slots * slot_bytes)
            return None if buffer is None else PeerStaging(engine, buffer, room, call)
        case _:
            assert_never(room)


def slots_of(slot_bytes: int) -> int:
    return min(MAX_RUN, max(LEAST_SLOTS, ROOM_BYTES // slot_bytes))
