"""What the books of a split ask to be moved between engines, and what they are told, as values.

    prefill: Export ─▶ Accepted, Send ─▶ Acked …, HandOver ─▶ HandedOver, then TransferQuiet
    decode:  Expect, Import once there is room ─▶ Arrived …, Received, then TransferQuiet
    return:  prefill: Expect ─▶ Offered, Import …; decode: Export …, with nothing to hand over

Every transfer ends in exactly one TransferQuiet, whatever happened: from then on nobody reads or
writes its pages, and only then are their transfer holds released (trap 17: a timeout ends none).
TransferFailed may come once before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from policies.contract.wire import TokenLogprob


class Handover(Struct, frozen=True, array_like=True):
    """What decode needs beside the pages. The noise of sampling depends on seed and position alone,
    so a sampler has no other state."""

    token: int  # the first of the completion
    cached_tokens: int = 0  # of the prompt, found by prefill; then as in wire.Usage
    host_tokens: int = 0
    disk_tokens: int = 0
    cluster_tokens: int = 0
    queue_s: float = 0.0
    logprob: TokenLogprob | None = None
    grammar: bytes = b""


@dataclass(frozen=True, slots=True)
class Export:
    """Offer a chain of pages to a peer: keys of all full pages, root first. num_tokens: of the
    sequence; where nothing is handed over it is len(keys) × page_size."""

    transfer_id: bytes
    secret: bytes
    peer: str
    keys: tuple[bytes, ...]
    num_tokens: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Send:
    """Sealed pages first, first + 1, … of the chain, each with a transfer hold; in order, from what
    Accepted said on."""

    transfer_id: bytes
    first: int
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandOver:
    """The last of a transfer: the page of the tokens behind the last full page, if there are any,
    with a transfer hold, and the rest. handover None: a return, which has neither."""

    transfer_id: bytes
    page_ids: tuple[int, ...]  # none or one
    generations: tuple[int, ...]
    handover: Handover | None


@dataclass(frozen=True, slots=True)
class Expect:
    """A peer may offer pages under this id until the deadline. is_asked: it was told to, just now,
    and is given up if it does not connect soon (transfer/channel.py: CONNECT_S)."""

    transfer_id: bytes
    secret: bytes
    deadline: float
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class Import:
    """Take pages first, first + 1, … of the chain (the last may be the one behind the last full
    page) into these device pages, which have a transfer hold; their tags become the generations."""

    transfer_id: bytes
    secret: bytes
    keys: tuple[bytes, ...]
    num_tokens: int
    first: int
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Stop: the sequence is over, or an offer is not wanted. Known or not, ended or not."""

    transfer_id: bytes
    code: str = "aborted"
    message: str = ""


TransferOrder = Export | Send | HandOver | Expect | Import | Withdraw


@dataclass(frozen=True, slots=True)
class Accepted:
    """The peer lacks the pages from `first` on."""

    transfer_id: bytes
    first: int


@dataclass(frozen=True, slots=True)
class Acked:
    """The peer has verified these pages and keeps them: they may be let go of."""

    transfer_id: bytes
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The peer has all and goes on."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Offered:
    """A peer offers this chain under an expected id; answer with Import or Withdraw."""

    transfer_id: bytes
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """These pages are verified and in place, their tags written; in order, without gaps."""

    transfer_id: bytes
    first: int
    count: int
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Received:
    """All pages are there. handover None: of a return."""

    transfer_id: bytes
    handover: Handover | None


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """code is a name from docs/errors.md: transfer_refused, transfer_lost, transfer_timeout,
    transfer_corrupt, transfer_layout or what the peer withdrew with."""

    transfer_id: bytes
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class TransferQuiet:
    transfer_id: bytes


TransferNews = (
    Accepted | Acked | HandedOver | Offered | Arrived | Received | TransferFailed | TransferQuiet
)


class Mover(Protocol):
    """Who carries orders out (transfer/mover.py). All of it is for the engine's loop."""

    def give(self, orders: Iterable[TransferOrder]) -> None: ...

    def take(self) -> list[TransferNews]:
        """What happened since the last call; the tags of pages that arrived are written by now."""

    def close(self, within_s: float) -> None: ...
