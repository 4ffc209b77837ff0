"""Memory that costs nothing until it is touched: arenas, packed weights, a step's scratch."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in pages of its own, huge ones where the system gives them for the asking:
    page by page they appear at the first touch, so that a large arena is no part of a start."""
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may be built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize).view(shape)
