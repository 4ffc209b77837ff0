"""Keeps untrusted text from becoming control tokens once a template has mixed it with its own.

After rendering nobody can tell the template's `<|im_end|>` from a message's. So before rendering a
mark goes into every control text inside untrusted strings, after its first character; what the
rendered prompt still holds unmarked is the template's. Marks vanish before segments are encoded.
Between the first and the second character, so `trim` and `strip` in templates act as before.
A control text that a template joins from pieces is broken as well, whoever wrote which piece: by
a mark in a trailing proper prefix (`<|im_`), in front of a leading proper suffix (`|>`), and in a
text that is an inside (`im_end`). Not covered: a template that cuts texts other than at spaces.
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
        # A set, for a pattern of the suffixes of Gemma's 6,250 texts takes seconds to compile.
        self._suffixes = {text[start:] for text in texts for start in range(1, len(text))}
        self._suffix_firsts = frozenset(text[0] for text in self._suffixes)
        self._suffix_lengths = sorted({len(suffix) for suffix in self._suffixes})
        self._insides = "\n".join(texts)

    def text(self, text: str, field: str) -> str:
        """text with marks. Raises TextError when it holds the mark itself."""
        marked = self.key(text, field)
        body = marked.lstrip()
        if self._begins_with_suffix(body):
            return marked[: len(marked) - len(body)] + MARK + body
        body = body.rstrip()
        if body and len(body) < self._longest_prefix and body in self._insides:
            at = marked.index(body) + 1
            return marked[:at] + MARK + marked[at:]
        return marked

    def key(self, text: str, field: str) -> str:
        """An object's key: marked where it holds or ends in control text.

        No more than that, for a template must find its keys, and `name` is the inside of `<name>`.
        """
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

    def _begins_with_suffix(self, body: str) -> bool:
        return body[:1] in self._suffix_firsts and any(
            body[:length] in self._suffixes for length in self._suffix_lengths
        )

    def _mark_tail(self, text: str) -> str:
        body = text.rstrip()
        marked = text
        for start in range(len(body) - 1, max(0, len(body) - self._longest_prefix) - 1, -1):
            if body[start:] in self._prefixes:
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
                self.key(str(key), field): self.value(item, f"{field}.{key}", depth + 1)
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
