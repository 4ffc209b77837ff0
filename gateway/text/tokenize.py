"""Rendered prompts to token ids: cut at control tokens, encode what is new, remember the rest.

Between two control tokens lies a segment; its ids depend on nothing outside it (checked at load),
so a conversation's next turn costs its new text. A tokenizer whose borders do not hold encodes the
whole prompt each time. In both cases untrusted text never yields a control id.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

from tokenizers import Tokenizer

from gateway.text.border_check import borders_hold
from gateway.text.errors import TextError
from gateway.text.guard import MARK, Guard
from gateway.text.segments import SegmentCache
from gateway.text.specials import (
    any_of,
    build_tokenizer,
    control_tokens,
    plain_tokenizer,
    read_tokenizer,
)

T = TypeVar("T")

CACHE_BYTES = 64 << 20
INLINE_CHARS = 2_000  # at most 0.4 ms of the event loop; a hop to a thread costs 40 µs
ENCODE_DEADLINE_S = 60.0
NUM_THREADS = 2

# Bounded by what waits for it: each request has at most one batch here.
_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")


class PromptTokenizer:
    """One tokenizer.json, ready to encode prompts; shared by all models that use it."""

    def __init__(self, tokenizer_json: bytes, *, cache_bytes: int = CACHE_BYTES) -> None:
        """Takes about a second: parse, tables, border check. Raises BundleError."""
        parsed = read_tokenizer(tokenizer_json)
        self.full = build_tokenizer(parsed)
        self.control = control_tokens(self.full, parsed)
        self.guard = Guard(token.text for token in self.control)
        self._id_by_text = {token.text: token.token_id for token in self.control}
        self._plain = plain_tokenizer(parsed, self._id_by_text.keys())
        self._control_ids = frozenset(self._id_by_text.values())
        self._cut = re.compile(f"({any_of(self._id_by_text)})").split
        self._cache = SegmentCache(cache_bytes)
        self.is_segmented = borders_hold(
            parsed, self.control, full=self.full, by_segments=self._by_segments
        )

    async def encode(self, rendered: str) -> array[int]:
        """Token ids of a rendered prompt in which untrusted text was guarded."""
        parts = self.cut(rendered)
        if not self.is_segmented:
            whole = rendered.replace(MARK, "")
            ids = await _run(len(whole), lambda: _encode(self.full, [whole])[0])
            # It may see control tokens where we see text, marked or not: do not let it.
            found = [token_id for token_id in ids if token_id in self._control_ids]
            if found == [self._id_by_text[text] for text in parts[1::2]]:
                return ids
        return await self._join(parts)

    async def encode_text(self, text: str) -> array[int]:
        """Token ids of untrusted text that no template surrounds; never a control id."""
        return await self._join([self.guard.text(text, "prompt").replace(MARK, "")])

    def cut(self, rendered: str) -> list[str]:
        """Segments at even places, control texts between them; marks are gone."""
        parts = self._cut(rendered)
        if MARK in rendered:
            parts[::2] = [part.replace(MARK, "") for part in parts[::2]]
        return parts

    async def _join(self, parts: list[str]) -> array[int]:
        known: dict[str, array[int]] = {}
        missing: list[str] = []
        for segment in parts[::2]:
            if segment and segment not in known:
                ids = self._cache.get(segment)
                if ids is None:
                    missing.append(segment)
                    known[segment] = _NO_IDS
                else:
                    known[segment] = ids
        if missing:
            encoded = await _run(sum(map(len, missing)), lambda: _encode(self._plain, missing))
            for segment, ids in zip(missing, encoded, strict=True):
                self._cache.put(segment, ids)
                known[segment] = ids
        prompt = array("I")
        for place, part in enumerate(parts):
            if place % 2:
                prompt.append(self._id_by_text[part])
            elif part:
                prompt.extend(known[part])
        return prompt

    def _by_segments(self, texts: list[str]) -> list[list[int]]:
        """What `encode` does, for the border check: without cache, many texts as one batch."""
        cuts = [self.cut(text) for text in texts]
        encoded = iter(_encode(self._plain, [part for parts in cuts for part in parts[::2]]))
        return [
            list(
                chain.from_iterable(
                    [self._id_by_text[part]] if place % 2 else next(encoded)
                    for place, part in enumerate(parts)
                )
            )
            for parts in cuts
        ]


async def _run(num_chars: int, work: Callable[[], T]) -> T:
    """work's result, from a thread when it would hold the loop. Raises TimeoutError."""
    if num_chars <= INLINE_CHARS:
        return work()
    async with asyncio.timeout(ENCODE_DEADLINE_S):
        return await asyncio.get_running_loop().run_in_executor(_threads, work)


_NO_IDS = array("I")


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[array[int]]:
    try:
        batch = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except (TypeError, UnicodeError) as error:  # what the library says of a lone surrogate
        raise TextError(
            "prompt",
            found="a lone surrogate",
            allowed="Unicode text",
            remedy="send well-formed JSON strings",
        ) from error
    return [array("I", encoding.ids) for encoding in batch]
