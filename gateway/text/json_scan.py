"""Finds where a JSON value ends in text that comes in pieces, and passes the value on as it comes.

Pushed down by hand, a stretch at a time: a string's characters are skipped by one pattern. Control
characters inside strings, which JSON forbids and models write, are passed on as their escapes.
"""

from __future__ import annotations

import re
from typing import Final, Literal

MAX_DEPTH = 60  # the guard takes 64, with what stands around arguments
MAX_SCALAR_CHARS = 1_000

Status = Literal["more", "done", "bad"]
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_PLAIN: Final = re.compile(r'[^"\\]*')
_ESCAPE: Final = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]*")
_WHOLE_SCALAR: Final = re.compile(
    r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
)
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_CLOSER: Final = {"{": "}", "[": "]"}


class ValueScan:
    """One value. What is passed on is valid JSON once the status is "done"."""

    def __init__(self) -> None:
        self.passed = ""  # of the last feed
        self._open: list[str] = []
        self._wanted: Literal["value", "value or end", "key", "key or end", "colon", "next"]
        self._wanted = "value"
        self._in: Literal["string", "key", "scalar"] | None = None
        self._scalar = ""
        self._escape = ""  # the beginning of one

    def feed(self, text: str, at: int) -> tuple[int, Status]:
        """Where in text it stopped: at its end, behind the value, or at what is no JSON.

        A number or a word is done at the character behind it.
        """
        pieces: list[str] = []
        status: Status = "more"
        while at < len(text) and status == "more":
            if self._in in ("string", "key"):
                at, status = self._string(text, at, pieces)
            elif self._in == "scalar":
                at, status = self._word(text, at, pieces)
            else:
                at, status = self._between(text, at, pieces)
        self.passed = "".join(pieces)
        return at, status

    def rest(self) -> str:
        """At the end of the text: what was held back."""
        held, self._escape = self._escape, ""
        return held

    def _string(self, text: str, at: int, pieces: list[str]) -> tuple[int, Status]:
        if self._escape:
            return self._escaped(text, at, pieces)
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        pieces.append(_CONTROL.sub(_escape_of, text[at:end]))
        if end == len(text):
            return end, "more"
        if text[end] == "\\":
            self._escape = "\\"
            return end + 1, "more"
        pieces.append('"')
        is_key, self._in = self._in == "key", None
        if is_key:
            self._wanted = "colon"
            return end + 1, "more"
        return end + 1, self._ended()

    def _escaped(self, text: str, at: int, pieces: list[str]) -> tuple[int, Status]:
        self._escape += text[at]
        if _ESCAPE.fullmatch(self._escape):
            pieces.append(self.rest())
        elif not _ESCAPE_BEGUN.fullmatch(self._escape):
            # At what is no JSON: the held beginning is passed on, this character is not.
            pieces.append(self.rest()[:-1])
            return at, "bad"
        return at + 1, "more"

    def _word(self, text: str, at: int, pieces: list[str]) -> tuple[int, Status]:
        end = _SCALAR.match(text, at).end()  # type: ignore[union-attr]
        end = min(end, at + MAX_SCALAR_CHARS + 1 - len(self._scalar))
        self._scalar += text[at:end]
        pieces.append(text[at:end])
        if len(self._scalar) > MAX_SCALAR_CHARS:
            return end, "bad"
        if end == len(text):
            return end, "more"
        self._in = None
        return end, self._ended() if _WHOLE_SCALAR.fullmatch(self._scalar) else "bad"

    def _between(self, text: str, at: int, pieces: list[str]) -> tuple[int, Status]:
        end = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        pieces.append(text[at:end])
        if end == len(text):
            return end, "more"
        char, wanted = text[end], self._wanted
        status: Status = "more"
        if wanted in ("key", "key or end") and char == '"':
            self._in = "key"
        elif wanted == "colon" and char == ":":
            self._wanted = "value"
        elif wanted == "next" and char == ",":
            self._wanted = "key" if self._open[-1] == "}" else "value"
        elif wanted in ("next", "key or end", "value or end") and char == self._open[-1]:
            self._open.pop()
            status = self._ended()
        elif wanted in ("value", "value or end") and char in '"{[-0123456789tfn':
            if char == '"':
                self._in = "string"
            elif char in _CLOSER:
                if len(self._open) == MAX_DEPTH:
                    return end, "bad"
                self._open.append(_CLOSER[char])
                self._wanted = "key or end" if char == "{" else "value or end"
            else:
                self._in, self._scalar = "scalar", ""
                return end, "more"
        else:
            return end, "bad"
        pieces.append(char)
        return end + 1, status

    def _ended(self) -> Status:
        self._wanted = "next"
        return "more" if self._open else "done"


def _escape_of(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
