"""The gate of a feed-forward layer: activation(gate) × up."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

GRAIN = 32_768  # elements a thread takes at least, at::internal::GRAIN_SIZE
GELU_ALONE = 16_384  # elements up to which one thread computes gelu; more are split among all
LANES = 64  # two bf16 vectors: torch's inner loop; what is left over runs scalar code


def silu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 × width] → [rows, width]."""
    return _gated(gate_up, F.silu, alone=GRAIN - 1, threads_of=_silu_threads)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 × width] → [rows, width]; gelu by tanh."""
    return _gated(gate_up, _gelu, alone=GELU_ALONE, threads_of=_gelu_threads)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _silu_threads(elements: int) -> int:
    return min(torch.get_num_threads(), -(-elements // GRAIN))


def _gelu_threads(elements: int) -> int:
    return torch.get_num_threads() if elements > GELU_ALONE else 1


def _gated(
    gate_up: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    alone: int,
    threads_of: Callable[[int], int],
) -> Tensor:
    """torch rounds exp and tanh differently in a vector and in the scalar rest of a loop, and the
    rest lies where threads split the rows; so a split inside a row is avoided, for row-invariance.
    alone: elements that one thread takes whole.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    if _splits_cleanly(rows * width, width, threads_of(rows * width)):
        return activation(gate).mul_(up)
    few = max(1, alone // width)
    return torch.cat([activation(part) for part in gate.split(few)]).mul_(up)


def _splits_cleanly(elements: int, width: int, threads: int) -> bool:
    share = -(-elements // threads)
    return share % width == 0 or (width % LANES == 0 and share % LANES == 0)
