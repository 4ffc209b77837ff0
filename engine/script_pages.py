"""Pages of a scripted engine: they hold nothing, but go to other engines as any others do.

So a split between scripted engines is one: its connection, its keys, what prefill found cached and
the first token are real; only what the pages say of their tokens is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.store.page_codec import PageLayout


class ScriptPages:
    """A PageMemory (store/tiered.py) of one number a token."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.layout = PageLayout("bf16", 1, 1, page_size, 1)
        self.page_bytes = self.layout.page_bytes
        self._bytes = memoryview(bytearray(num_pages * self.page_bytes))
        self._tags = [0] * num_pages

    def generation(self, page_id: int) -> int:
        return self._tags[page_id]

    def assign(self, assigned: Sequence[tuple[int, int]]) -> None:
        for page_id, generation in assigned:
            self._tags[page_id] = generation

    def outgoing(self, page_ids: Sequence[int]) -> list[memoryview]:
        size = self.page_bytes
        return [self._bytes[page * size : (page + 1) * size] for page in page_ids]

    def incoming(self, page_ids: Sequence[int]) -> list[memoryview]:
        return self.outgoing(page_ids)

    def arrive(self, page_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        """They are there: the views are the pages."""

    def free(self, views: Sequence[memoryview]) -> None:
        """Nothing was borrowed."""
