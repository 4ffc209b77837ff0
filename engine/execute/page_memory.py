"""An arena's pages as the slower tiers see them: bytes of the host (store/tiered.PageMemory)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.execute.arena import Arena


def page_memory(arena: Arena) -> ArenaMemory | StagedMemory:
    return ArenaMemory(arena) if arena.pages.device.type == "cpu" else StagedMemory(arena)


class ArenaMemory:
    """Of an arena on the CPU: the pages themselves, nothing is copied twice."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.page_bytes = arena.layout.page_bytes
        self._bytes = memoryview(arena.pages.view(torch.uint8).view(-1).numpy())  # type: ignore[arg-type]

    def generation(self, page_id: int) -> int:
        return self._arena.generation(page_id)

    def assign(self, assigned: Sequence[tuple[int, int]]) -> None:
        self._arena.assign(assigned)

    def outgoing(self, page_ids: Sequence[int]) -> list[memoryview]:
        size = self.page_bytes
        return [self._bytes[page * size : (page + 1) * size] for page in page_ids]

    def incoming(self, page_ids: Sequence[int]) -> list[memoryview]:
        return self.outgoing(page_ids)

    def arrive(self, page_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        """They are there: the views are the pages."""

    def free(self, views: Sequence[memoryview]) -> None:
        """Nothing was borrowed."""


class StagedMemory:
    """Of an arena on a GPU: pinned buffers of a page each, copied on a stream of their own.

    A page is copied out after the step that sealed it gave its result, so nothing writes it then.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.page_bytes = arena.layout.page_bytes
        self._stream = torch.cuda.Stream(device=arena.pages.device)
        self._idle: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}  # by id of the view, which lives as long

    def generation(self, page_id: int) -> int:
        return self._arena.generation(page_id)

    def assign(self, assigned: Sequence[tuple[int, int]]) -> None:
        self._arena.assign(assigned)

    def outgoing(self, page_ids: Sequence[int]) -> list[memoryview]:
        views = self.incoming(page_ids)
        with torch.cuda.stream(self._stream):
            for page, view in zip(page_ids, views, strict=True):
                self._lent[id(view)].copy_(self._page(page), non_blocking=True)
        self._stream.synchronize()
        return views

    def incoming(self, page_ids: Sequence[int]) -> list[memoryview]:
        views: list[memoryview] = []
        for _ in page_ids:
            buffer = (
                self._idle.pop()
                if self._idle
                else torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=True)
            )
            view = memoryview(buffer.numpy())  # type: ignore[arg-type]
            self._lent[id(view)] = buffer
            views.append(view)
        return views

    def arrive(self, page_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        with torch.cuda.stream(self._stream):
            for page, view in zip(page_ids, views, strict=True):
                self._page(page).copy_(self._lent[id(view)], non_blocking=True)
        self._stream.synchronize()

    def free(self, views: Sequence[memoryview]) -> None:
        self._idle += [self._lent.pop(id(view)) for view in views]

    def _page(self, page_id: int) -> Tensor:
        return self._arena.pages[page_id].view(torch.uint8).view(-1)
