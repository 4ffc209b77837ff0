"""Server-sent events of an upstream as they come over the wire: whole, with their very bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"

_END = re.compile(rb"\r?\n\r?\n|\r\r")


class Garbled(ValueError):
    """What came is no event stream of a completion."""


class EventSplitter:
    """Bytes in, events out, each with the blank line that ends it."""

    def __init__(self) -> None:
        self._rest = b""
        self._searched = 0  # no end begins before this place

    def feed(self, data: bytes) -> list[bytes]:
        """Those that are complete now. Raises Garbled."""
        rest = self._rest + data if self._rest else data
        events: list[bytes] = []
        start = 0
        for end in _END.finditer(rest, self._searched):
            events.append(rest[start : end.end()])
            start = end.end()
        self._rest = rest[start:]
        self._searched = max(0, len(self._rest) - 3)  # an end may be half here
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Garbled(f"more than {MAX_EVENT_BYTES} bytes without a blank line")
        return events

    def rest(self) -> list[bytes]:
        """At the end of the bytes: an event that lacks its blank line counts all the same."""
        rest, self._rest = self._rest.strip(b"\r\n"), b""
        return [rest + b"\n\n"] if rest else []


def data_of(event: bytes) -> bytes | None:
    """The event's data; None where it has none, as a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]  # as nearly all are
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None


class ChoiceHead(Struct, frozen=True, gc=False):
    index: int = 0
    finish_reason: str | None = None


class Chunk(Struct, frozen=True):
    """What the relay must know of an event's data; the rest stays in its bytes."""

    id: str | None = None
    model: str | None = None
    choices: list[ChoiceHead] | None = None
    usage: dict[str, object] | UnsetType | None = UNSET
    error: object = None
    # Of older vLLM servers "error", with message and code beside it.
    kind: str | None = field(default=None, name="object")


@dataclass(frozen=True, slots=True)
class Event:
    data: bytes  # as it came, blank line included
    chunk: Chunk


_decode = msgspec.json.Decoder(Chunk).decode


def read_chunk(data: bytes) -> Chunk:
    """Raises Garbled."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled(f"an event that is no chunk: {str(error)[:200]}") from None
