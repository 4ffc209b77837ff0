"""What this machine's memory and multipliers allow, and who else keeps its cores busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.children import busy_s
from benchmarks.peers.driver import timed
from engine.execute.weights import ModelConfig


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    flops: float


def measure_machine() -> Machine:
    block = torch.ones(32 << 20)
    square = torch.randn(1024, 1024).to(torch.bfloat16)

    def best(work: Callable[[], object]) -> float:
        return min(timed(work) for _ in range(20))  # short and often, to slip between neighbours

    return Machine(
        bytes_per_s=block.numel() * 4 / best(block.sum),
        flops=2 * 1024**3 / best(lambda: square @ square),
    )


def floor_s(facts: ModelConfig, machine: Machine, *, batch: int, new: int, context: int) -> float:
    """The larger of bytes ÷ bandwidth and operations ÷ rate for one step."""
    width = facts.num_heads * facts.head_dim
    kv_width = facts.num_kv_heads * facts.head_dim
    layer = facts.hidden_size * (2 * width + 2 * kv_width + 3 * facts.ffn_size)
    weights = facts.num_layers * layer
    head = facts.vocab_size * facts.hidden_size
    seen = context * new - new * (new - 1) // 2  # keys over all new tokens of a sequence
    operations = 2 * batch * (new * weights + head + 2 * facts.num_layers * seen * width)
    stored = 2 * weights + 4 * head + batch * facts.num_layers * context * kv_width * 2 * 2
    return max(stored / machine.bytes_per_s, operations / machine.flops)


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
