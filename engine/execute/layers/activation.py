"""The gate of a feed-forward layer: silu(gate) × up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GRAIN = 32_768  # elements a thread takes at least, at::internal::GRAIN_SIZE
LANES = 64  # two bf16 vectors: torch's inner loop; what is left over runs scalar code


def silu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 × width] → [rows, width].

    torch rounds exp differently in a vector and in the scalar rest of a loop, and the rest lies
    where threads split the rows; so a split inside a row is avoided, for row-invariance.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    if _splits_cleanly(rows, width):
        return F.silu(gate).mul_(up)
    alone = max(1, (GRAIN - 1) // width)
    return torch.cat([F.silu(part) for part in gate.split(alone)]).mul_(up)


def _splits_cleanly(rows: int, width: int) -> bool:
    elements = rows * width
    threads = min(torch.get_num_threads(), -(-elements // GRAIN))
    share = -(-elements // threads)
    return share % width == 0 or (width % LANES == 0 and share % LANES == 0)
