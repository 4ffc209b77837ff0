"""How activations of 16 bits lie in their two planes of bytes, as each instruction set has them."""

from __future__ import annotations

import torch
from torch import Tensor

WITH_WORDS = ("scalar", "avx2")  # others multiply bytes


def planes_of(values: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """int [rows, k] → high and low, int8 [rows, k]."""
    if isa not in WITH_WORDS:
        high = (values + 128) >> 8
        return high.to(torch.int8), (values - (high << 8)).to(torch.int8)
    halves = values.to(torch.int16).view(len(values), -1, 2, 4, 4)[..., [0, 2, 1, 3]]
    planes = halves.contiguous().view(torch.int8).view(len(values), -1, 2, 32)
    high, low = planes.transpose(1, 2).contiguous().unbind(1)
    return high.flatten(1).contiguous(), low.flatten(1).contiguous()


def values_of(high: Tensor, low: Tensor, isa: str) -> Tensor:
    """The other way: int32 [rows, k]."""
    if isa not in WITH_WORDS:
        return high.int() * 256 + low
    both = torch.stack((high.view(len(high), -1, 32), low.view(len(high), -1, 32)), 2)
    words = both.contiguous().view(torch.int16).view(len(high), -1, 4)
    return words[..., [0, 2, 1, 3]].flatten(1).int()
