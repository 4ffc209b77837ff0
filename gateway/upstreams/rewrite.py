"""An upstream's answer on its way to a client: its bytes, but for id, model and usage.

Those three are ours: the id is the row's, the model is what was asked for, the usage is the bill.
In an event the first two are exchanged where they stand; it is written anew only to take a usage
out of it, or where it spells them in a way of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw

from gateway.upstreams.events import Event, Garbled, data_of
from gateway.upstreams.usage import Told, read_usage

Members = dict[str, Raw]
# Where an upstream's servers are is nobody's business.
INTERNAL = ("kv_transfer_params", "ec_transfer_params")
_encode = msgspec.json.Encoder().encode
_decode_members = msgspec.json.Decoder(Members).decode
_NULLS = (b',"usage":null', b', "usage": null', b',"usage": null')


def decode_members(data: bytes) -> Members:
    """A JSON object whose members stay as they are written. Raises Garbled."""
    try:
        return _decode_members(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled(f"no JSON object: {str(error)[:200]}") from None


class StreamRewriter:
    """wants_usage: the client asked for it; then each event has the member, as OpenAI's do."""

    def __init__(self, *, answer_id: str, model: str, wants_usage: bool) -> None:
        self._ours = {"id": answer_id, "model": model}
        self._wants_usage = wants_usage
        self._swaps: dict[str, tuple[str, bytes, bytes]] = {}  # member → its value, old, new bytes
        self._first: Members = {}
        self.told: Told | None = None
        self.num_events = 0  # about as many as tokens
        self.finish_by_choice: dict[int, str] = {}

    def event(self, event: Event) -> bytes:
        """What the client gets of it, which may be nothing. Raises Garbled."""
        data, chunk = event.data, event.chunk
        if not self._first:
            self._first = decode_members(data_of(data) or b"")
        for choice in chunk.choices or ():
            if choice.finish_reason is not None:
                self.finish_by_choice[choice.index] = choice.finish_reason
        if chunk.choices:
            self.num_events += 1
        if chunk.usage is not UNSET and chunk.usage is not None:
            self.told = read_usage(chunk.usage)
            if not chunk.choices:
                return b""  # told at the end, by us
            return self._anew(data)
        for member, value in (("id", chunk.id), ("model", chunk.model)):
            old, new = self._swap(member, value, data)
            if not old:
                return self._anew(data)
            data = data.replace(old, new, 1)
        if chunk.usage is None:
            if not self._wants_usage:
                return _without_null(data) or self._anew(data)
        elif self._wants_usage:
            return data[:-3] + b',"usage":null}\n\n' if data[-3:] == b"}\n\n" else self._anew(data)
        return data

    def _swap(self, member: str, value: str | None, data: bytes) -> tuple[bytes, bytes]:
        """The bytes of a member and ours for them; none if it is not spelt as is usual.

        In a string quotes are escaped, so these bytes are no text, whatever a model says.
        """
        known = self._swaps.get(member)
        if known is not None and known[0] == value:
            return known[1:] if known[1] in data else (b"", b"")
        for colon in (b":", b": "):
            old = b'"' + member.encode() + b'"' + colon + _encode(value)
            if value is not None and old in data:
                new = old.partition(b":")[0] + colon + _encode(self._ours[member])
                self._swaps[member] = (value, old, new)
                return old, new
        return b"", b""

    def _anew(self, data: bytes) -> bytes:
        members = decode_members(data_of(data) or b"")
        members |= self._named()
        members.pop("usage", None)
        if self._wants_usage:
            members["usage"] = Raw(b"null")
        return _written(members)

    def usage_event(self, usage: dict[str, object], object_name: str) -> bytes:
        """The event that tells it, in the form of the stream's own."""
        head = {"object": Raw(_encode(object_name))} | {
            name: value for name, value in self._first.items() if name in ("object", "created")
        }
        body = Raw(_encode(usage))
        return _written({**self._named(), **head, "choices": Raw(b"[]"), "usage": body})

    def _named(self) -> Members:
        return {name: Raw(_encode(value)) for name, value in self._ours.items()}


def whole(members: Members, *, answer_id: str, model: str, usage: dict[str, object]) -> bytes:
    """An answer that was not streamed; its other members stay in their bytes and their order."""
    ours: dict[str, Any] = {"id": answer_id, "model": model, "usage": usage}
    kept = {name: value for name, value in members.items() if name not in INTERNAL}
    return _encode(kept | {name: Raw(_encode(value)) for name, value in ours.items()})


def _without_null(data: bytes) -> bytes:
    return next((data.replace(null, b"", 1) for null in _NULLS if null in data), b"")


def _written(members: Members) -> bytes:
    return b"data: " + _encode({k: v for k, v in members.items() if k not in INTERNAL}) + b"\n\n"
