"""An arena's pages as the slower tiers see them: bytes of the host (store/tiered.PageMemory)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.execute.arena import Arena


def page_memory(arena: Arena) -> ArenaMemory | StagedMemory:
    device = arena.pages.device
    return ArenaMemory(arena) if device.type == "cpu" else StagedMemory(arena, GpuCopies(device))


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


class GpuCopies:
    """Copies between pages on a GPU and pinned memory, queued on a stream of their own.

    NOTE: no test has run this class, for want of a GPU; StagedMemory's tests have another in its
    place, which copies as late as this one may.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device=device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def queue(self, target: Tensor, source: Tensor) -> None:
        """Neither may be touched until finish."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Until all that was queued is copied."""
        self._stream.synchronize()


class StagedMemory:
    """Of an arena on a GPU: pinned buffers of a page each.

    A page is copied out after the step that sealed it gave its result, so nothing writes it then.
    """

    def __init__(self, arena: Arena, copies: GpuCopies) -> None:
        self._arena = arena
        self.page_bytes = arena.layout.page_bytes
        self._copies = copies
        self._idle: list[Tensor] = []  # as many as were lent at once
        self._lent: dict[int, Tensor] = {}  # by id of the view, which lives as long

    def generation(self, page_id: int) -> int:
        return self._arena.generation(page_id)

    def assign(self, assigned: Sequence[tuple[int, int]]) -> None:
        self._arena.assign(assigned)

    def outgoing(self, page_ids: Sequence[int]) -> list[memoryview]:
        views = self.incoming(page_ids)
        for page, view in zip(page_ids, views, strict=True):
            self._copies.queue(self._lent[id(view)], self._page(page))
        self._copies.finish()
        return views

    def incoming(self, page_ids: Sequence[int]) -> list[memoryview]:
        views: list[memoryview] = []
        for _ in page_ids:
            buffer = self._idle.pop() if self._idle else self._copies.buffer(self.page_bytes)
            view = memoryview(buffer.numpy())  # type: ignore[arg-type]
            self._lent[id(view)] = buffer
            views.append(view)
        return views

    def arrive(self, page_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        for page, view in zip(page_ids, views, strict=True):
            self._copies.queue(self._page(page), self._lent[id(view)])
        self._copies.finish()

    def free(self, views: Sequence[memoryview]) -> None:
        self._idle += [self._lent.pop(id(view)) for view in views]

    def _page(self, page_id: int) -> Tensor:
        return self._arena.pages[page_id].view(torch.uint8).view(-1)
