"""Cursors: where a list goes on, opaque to its reader and good for any later call."""

from __future__ import annotations

import binascii
from base64 import b64decode, urlsafe_b64encode
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from gateway.api.typed_input import refuse_field
from gateway.errors import quote

Limit = Annotated[int, Meta(ge=1, le=1000, description="Most rows of one page.")]
After = Annotated[str, Meta(max_length=512, description="`next` of the page before.")]
Position = TypeVar("Position")


def write_cursor(position: object) -> str:
    return urlsafe_b64encode(msgspec.msgpack.encode(position)).decode().rstrip("=")


def read_cursor(text: str, kind: type[Position]) -> Position:
    """Raises GatewayError for what no page gave out."""
    try:
        data = b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(data, type=kind)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise refuse_field(
            "after",
            quote(text),
            "the `next` of a page of this list",
            "leave it out to begin with the first page",
        ) from None
