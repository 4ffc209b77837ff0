"""What two engines say to each other about one transfer, over a connection of its own.

    dialler, the sender ── Hello ─────────────────────────────────▶ listener, the receiver
                        ◀───────────────────── Challenge | Unknown   (from here on sealed)
                        ── Offer ─────────────────────────────────▶
                        ◀────────────────────────────────── Accept
                        ── Pages … ───────────────────────────────▶
                        ◀─────────────────────────────────── Ack …
                        ── HandOver ──────────────────────────────▶
                        ◀──────────────────────────────────── Done
    either              ── Withdraw ─▶ the other ── Drained ─▶; Ping when it has nothing to say

Structs are array-like: a field may only be appended, with a default. Pages are named by their
positions in the chain, and never only counted (trap 24). Bounds are part of the types.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from engine.schedule.transfer_orders import Handover
from engine.store.page_codec import PageLayout
from engine.transfer.shards import Shard
from policies.contract.page_keys import KEY_BYTES

VERSION = 1
ID_BYTES = 16
SECRET_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_GREETING_BYTES = 256  # of a peer that has proven nothing
MAX_MESSAGE_BYTES = 4 << 20
MAX_RUN = 1024  # pages of one Pages
CODE_CHARS, MESSAGE_CHARS = 64, 1000

_Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Mac = Annotated[bytes, Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Digest = Annotated[bytes, Meta(max_length=32)]
_Name = Annotated[str, Meta(max_length=32)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 48)]


# --- before anything is proven ------------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    version: int
    transfer_id: _Id
    nonce: _Nonce


class Challenge(Struct, frozen=True, array_like=True, tag="challenge"):
    """proof: that the listener knows the secret. The dialler's is its first sealed message."""

    version: int
    nonce: _Nonce
    proof: _Mac


class Unknown(Struct, frozen=True, array_like=True, tag="unknown"):
    """No transfer of this id is expected: not yet, or no more."""

    version: int


# --- sealed -------------------------------------------------------------------------------------


class PageForm(Struct, frozen=True, array_like=True):
    """What the sender's pages are: layout_id is that of layout where both sides are of one version,
    and shard says which part of all layers and heads its pages hold."""

    layout: PageLayout
    layout_id: str
    shard: Shard


class SharedRoom(Struct, frozen=True, array_like=True, tag="shared"):
    """Memory of the receiver, for who runs on the same machine as the same user: places of
    place_bytes, then nonce, which proves to the sender that it opened the right one."""

    pid: _Number
    fd: _Number
    name: Annotated[str, Meta(max_length=64)]
    nonce: _Nonce
    places: Annotated[int, Meta(ge=1, le=MAX_RUN)]
    place_bytes: _Number


class Staging(Struct, frozen=True, array_like=True, tag="staging"):
    """Memory of the receiver that is registered with Mooncake's Transfer Engine at `engine`, a
    host:port: places of place_bytes from address on."""

    engine: Annotated[str, Meta(max_length=256)]
    address: int
    places: Annotated[int, Meta(ge=1, le=MAX_RUN)]
    place_bytes: _Number


Room = SharedRoom | Staging


class Offer(Struct, frozen=True, array_like=True, tag="offer"):
    """keys: of all full pages, root first. ways: what the sender can do beside the connection
    itself, the best first. digests: by which it can prove pages, beside SHA-256."""

    keys: Annotated[tuple[_Key, ...], Meta(max_length=1 << 16)]
    num_tokens: _Number
    form: PageForm
    ways: tuple[_Name, ...] = ()
    digests: tuple[_Name, ...] = ()


class Accept(Struct, frozen=True, array_like=True, tag="accept"):
    """The receiver lacks pages first … stop - 1, in form; room: where to put them instead of
    sending them behind Pages, if the sender can. digest: by which they are to be proven, except in
    memory that nobody else can write to."""

    first: _Number
    stop: _Number
    form: PageForm
    room: Room | None = None
    digest: _Name = "sha256"


class Pages(Struct, frozen=True, array_like=True, tag="pages"):
    """Pages first, first + 1, … and their digests; they lie in these places of the room, or, where
    none are named, their bytes follow this message."""

    first: _Number
    digests: Annotated[tuple[_Digest, ...], Meta(min_length=1, max_length=MAX_RUN)]
    places: Annotated[tuple[_Number, ...], Meta(max_length=MAX_RUN)] = ()


class Ack(Struct, frozen=True, array_like=True, tag="ack"):
    """These pages are right and in place; their places are free again."""

    first: _Number
    count: _Number


class HandOver(Struct, frozen=True, array_like=True, tag="hand_over"):
    """All pages were said. handover None: of a return."""

    handover: Handover | None


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """The receiver has all, and goes on."""


class Withdraw(Struct, frozen=True, array_like=True, tag="withdraw"):
    """Whoever says it touches no page any more, and asks the other for the same."""

    code: Annotated[str, Meta(max_length=CODE_CHARS)]
    message: Annotated[str, Meta(max_length=MESSAGE_CHARS)] = ""


class Drained(Struct, frozen=True, array_like=True, tag="drained"):
    """The answer to Withdraw: nothing of this transfer is read or written here any more."""


class Ping(Struct, frozen=True, array_like=True, tag="ping"):
    pass


Greeting = Hello | Challenge | Unknown
Message = Offer | Accept | Pages | Ack | HandOver | Done | Withdraw | Drained | Ping

encode = msgspec.msgpack.Encoder().encode
decode_greeting = msgspec.msgpack.Decoder(Greeting).decode
decode_message = msgspec.msgpack.Decoder(Message).decode
