"""Pieces of a choice's output: any chunking of its tokens gives the same whole."""

from __future__ import annotations

from msgspec import Struct


class Text(Struct, frozen=True, gc=False):
    """More of the content."""

    text: str


class CallStart(Struct, frozen=True, gc=False):
    """A tool call begins; index is its ordinal in its choice."""

    index: int
    call_id: str
    name: str


class CallArguments(Struct, frozen=True, gc=False):
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Delta = Text | CallStart | CallArguments
