"""Row counts at which this machine's matrix kernels give every row the same bits.

A GEMM library picks its kernel by shape, so a row's result may change with its batch mates. At
load the real weights are run over random rows: one base tile defines a row's result, and a size is
admitted only if it gives exactly that, wherever in the tile a row lies. Batches are padded to
admitted sizes, so "batched equals alone" is an equality. He et al., "Defeating Nondeterminism in
LLM Inference" (2025), names the failure that this rules out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BASES = (32, 16, 8, 4, 2, 64, 1)  # in order of preference; one row alone is always consistent

RowFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """sizes: the admitted row counts, ascending, never empty."""

    sizes: tuple[int, ...]

    def cover(self, rows: int) -> tuple[int, ...]:
        """Admitted sizes that together hold rows, the last one padded."""
        largest = self.sizes[-1]
        whole, rest = divmod(rows, largest)
        tail = next((size for size in self.sizes if size >= rest), largest) if rest else 0
        return (largest,) * whole + ((tail,) if tail else ())


def admit(
    functions: Sequence[tuple[RowFunction, Tensor]], *, sizes: Sequence[int] = SIZES
) -> RowTiles:
    """The sizes at which every function, given its sample rows [≥ max(sizes), …], agrees."""
    for base in BASES:
        expected = [_in_tiles(function, sample, base) for function, sample in functions]
        pairs = list(zip(functions, expected, strict=True))
        if all(_ignores_position(*function, rows, base) for function, rows in pairs):
            agreed = {
                size
                for size in sizes
                if all(_agrees(*function, rows, size) for function, rows in pairs)
            }
            return RowTiles(tuple(sorted(agreed | {base})))
    raise AssertionError("a tile of one row cannot disagree with itself")


def _in_tiles(function: RowFunction, sample: Tensor, size: int) -> Tensor:
    return torch.cat(
        [function(sample[at : at + size].clone()) for at in range(0, len(sample), size)]
    )


def _ignores_position(function: RowFunction, sample: Tensor, expected: Tensor, size: int) -> bool:
    tile = sample[:size]
    return all(
        torch.equal(function(tile.roll(shift, 0)), expected[:size].roll(shift, 0))
        for shift in {1, size // 2}
    )


def _agrees(function: RowFunction, sample: Tensor, expected: Tensor, size: int) -> bool:
    last = len(sample) - size
    return all(
        torch.equal(function(sample[at : at + size].clone()), expected[at : at + size])
        for at in {0, last}
    )
