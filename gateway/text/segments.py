"""Remembers the token ids of segments, so that a turn costs only its new text."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict

ENTRY_BYTES = 250  # a dict entry, an ordering link and an array header, roughly


class SegmentCache:
    """Segment text → token ids, least recently used first out, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._ids_by_text: OrderedDict[str, array[int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._ids_by_text)

    def get(self, text: str) -> array[int] | None:
        """The ids, not to be changed, or None."""
        ids = self._ids_by_text.get(text)
        if ids is not None:
            self._ids_by_text.move_to_end(text)
        return ids

    def put(self, text: str, ids: array[int]) -> None:
        if text in self._ids_by_text:
            return
        size = _size(text, ids)
        if size > self._max_bytes:
            return
        self._ids_by_text[text] = ids
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._ids_by_text.popitem(last=False))


def _size(text: str, ids: array[int]) -> int:
    return sys.getsizeof(text) + len(ids) * ids.itemsize + ENTRY_BYTES
