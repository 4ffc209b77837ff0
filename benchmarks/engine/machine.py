"""What this machine's memory and multipliers can do, and who else keeps its cores busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from benchmarks.children import busy_s
from benchmarks.peers.driver import timed

TRIALS = 20  # short and often, to slip between neighbours
LONG_S = 0.2  # what takes longer is tried once: a product that torch has no kernel for here
BYTES_A_FLOAT = 4  # of a register
SIDE = 1024  # of square matrices: enough work to reach the multipliers' rate, still in cache


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of all threads together; a product and its sum are two operations."""

    bytes_per_s: float
    int8_per_s: float
    float_per_s: float  # fp32 or bf16, whichever is quicker here

    def or_better(self, again: Machine) -> Machine:
        """Of two measures: neighbours can only have made a rate lower than it is."""
        return Machine(
            max(self.bytes_per_s, again.bytes_per_s),
            max(self.int8_per_s, again.int8_per_s),
            max(self.float_per_s, again.float_per_s),
        )

    def __str__(self) -> str:
        return (
            f"{self.bytes_per_s / 1e9:.0f} GB/s read, {self.int8_per_s / 1e9:.0f} GOP/s int8, "
            f"{self.float_per_s / 1e9:.0f} GFLOP/s"
        )


def measure_machine(read_bytes: int) -> Machine:
    """read_bytes: as many as a step reads, so that a cache helps the floor as it helps a step."""
    block = torch.ones(max(read_bytes, 1 << 20) // 4)
    single = torch.randn(SIDE, SIDE)
    half = single.to(torch.bfloat16)
    whole = torch.randint(-127, 127, (SIDE, SIDE), dtype=torch.int8)

    operations = 2 * SIDE**3
    floats = operations / min(_least_s(lambda: single @ single), _least_s(lambda: half @ half))
    integers = operations / _least_s(lambda: torch._int_mm(whole, whole))
    if integers < floats / BYTES_A_FLOAT:  # torch has no kernel for them; AVX2 multiplies bytes too
        integers = floats * BYTES_A_FLOAT
    return Machine(
        bytes_per_s=block.numel() * 4 / _least_s(block.sum),
        int8_per_s=integers,
        float_per_s=floats,
    )


def quicker_precisions(hidden: int, ffn: int) -> tuple[str, ...]:
    """Of "bf16" and "fp32", what products of this shape take less time in: a prompt's, and those of
    one row. With units for bf16 alone (AMX) a prompt's may be the one and single rows the other."""

    def product_s(dtype: torch.dtype, rows: int) -> float:
        weight, inputs = torch.randn(ffn, hidden).to(dtype), torch.randn(rows, hidden).to(dtype)
        return _least_s(lambda: linear(inputs, weight))

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    quicker = [min(dtypes, key=lambda name: product_s(dtypes[name], rows)) for rows in (256, 1)]
    return tuple(dict.fromkeys(quicker))


def _least_s(work: Callable[[], object]) -> float:
    once = timed(work)
    return once if once > LONG_S else min(once, *(timed(work) for _ in range(TRIALS)))


class Neighbours:
    """How many cores others kept busy since the last time it was asked."""

    def __init__(self, own_s: Callable[[], float]) -> None:
        self._own_s = own_s
        self._before = (time.perf_counter(), busy_s(), own_s())

    def cores(self) -> float:
        now = (time.perf_counter(), busy_s(), self._own_s())
        elapsed, busy, own = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        return max(busy - own, 0.0) / elapsed
