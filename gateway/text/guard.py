"""Keeps untrusted text from becoming control tokens once a template has mixed it with its own.

After rendering nobody can tell the template's `<|im_end|>` from a message's. So before rendering a
mark goes into every control text inside untrusted strings, after its first character; what the
rendered prompt still holds unmarked is the template's. Marks vanish before segments are encoded.
The mark sits inside, so `trim` and `strip` in templates act as before. A control text that a
template joins from pieces (`<|im_` + `end|>`) is broken as well, by a mark in every trailing proper
prefix. Not covered: a template that itself writes the beginning of a control text (`'<' + name`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gateway.text.errors import TextError
from gateway.text.specials import HIDDEN, any_of

MARK = "\ufdd0"  # a noncharacter (Unicode 23.7): never part of interchanged text
MAX_DEPTH = 64


class Guard:
    """Marks the given control texts in untrusted values."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        texts = set(control_texts)
        self._firsts = tuple(sorted({text[0] for text in texts}))
        self._prefixes = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest_prefix = max(map(len, self._prefixes), default=0)
        self._inside = re.compile(any_of(texts, rest="?="))

    def text(self, text: str, field: str) -> str:
        """text with marks. Raises TextError when it holds the mark itself."""
        if MARK in text or HIDDEN in text:
            raise TextError(
                field,
                found="the noncharacter U+FDD0 or U+FDD1",
                allowed="any other text",
                remedy="remove that character",
            )
        for first in self._firsts:
            if first in text:
                return self._inside.sub(rf"\g<0>{MARK}", self._mark_tail(text))
        return text

    def _mark_tail(self, text: str) -> str:
        marked = text
        for start in range(len(text) - 1, max(0, len(text) - self._longest_prefix) - 1, -1):
            if text[start:] in self._prefixes:
                marked = marked[: start + 1] + MARK + marked[start + 1 :]
        return marked

    def value(self, value: object, field: str, depth: int = 0) -> object:
        """A JSON value with every string in it guarded, keys included."""
        if isinstance(value, str):
            return self.text(value, field)
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth == MAX_DEPTH:
            raise TextError(
                field,
                found=f"more than {MAX_DEPTH} levels",
                allowed=f"at most {MAX_DEPTH} levels of nesting",
                remedy="flatten the value",
            )
        if isinstance(value, dict):
            return {
                self.text(str(key), field): self.value(item, f"{field}.{key}", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                self.value(item, f"{field}[{index}]", depth + 1) for index, item in enumerate(value)
            ]
        raise TextError(
            field,
            found=type(value).__name__,
            allowed="a JSON value",
            remedy="send text, numbers, lists or objects",
        )
