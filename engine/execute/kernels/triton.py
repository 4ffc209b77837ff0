"""The page kernels in Triton, for GPUs; bits are copied, never computed with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 256  # (page, generation) pairs of one program


@triton.jit
def _write_pages(kv, arena, places, offset, dim, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < dim
    place = tl.load(places + row) + offset
    values = tl.load(kv + row * dim + lanes, mask=inside)
    tl.store(arena + place * dim + lanes, values, mask=inside)


@triton.jit
def _verify_tags(tags, pages, generations, rows, wrong, pairs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < pairs
    page = tl.load(pages + lanes, mask=inside, other=0)
    tag = tl.load(tags + page, mask=inside, other=0)
    expected = tl.load(generations + lanes, mask=inside, other=0)
    row = tl.load(rows + lanes, mask=inside, other=0)
    # Several lanes may store the same 1: a race without a loser.
    tl.store(wrong + row, 1, mask=inside & (tag != expected))


def as_bits(values: Tensor) -> Tensor:
    """The same memory as integers: a copy needs no arithmetic of the dtype."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])


def write_pages(kv: Tensor, arena: Tensor, places: Tensor, *, offset: int) -> None:
    """See reference.write_pages."""
    assert kv.dtype == arena.dtype, "kv comes in the arena's dtype"
    assert kv.is_contiguous(), "kv is one block"
    assert arena.is_contiguous(), "the arena is one block"
    dim = kv.shape[-1]
    block = triton.next_power_of_2(dim)
    _write_pages[(places.numel(),)](as_bits(kv), as_bits(arena), places, offset, dim, BLOCK=block)


def verify_tags(
    tags: Tensor, pages: Tensor, generations: Tensor, rows: Tensor, *, num_rows: int
) -> Tensor:
    """See reference.verify_tags."""
    wrong = torch.zeros(num_rows, dtype=torch.int32, device=tags.device)
    pairs = pages.numel()
    grid = (triton.cdiv(pairs, PAIRS),)
    if pairs:
        _verify_tags[grid](tags, pages, generations, rows, wrong, pairs, BLOCK=PAIRS)
    return wrong != 0
