"""Pieces of a choice's output: any chunking of its tokens gives the same whole."""

from __future__ import annotations

from msgspec import Struct


class Text(Struct, frozen=True, gc=False):
    """More of the content."""

    text: str


Delta = Text
