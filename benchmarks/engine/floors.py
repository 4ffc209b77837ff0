"""The least that a step can take here: stored bytes ÷ bandwidth, or operations ÷ rate."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engine.machine import Machine
from engine.execute.weights import Checkpoint, ModelConfig

PAGE_VALUE_BYTES = 2  # bf16
# Activations of the exact path are 16-bit integers, multiplied as two planes of 8 bits.
PLANES = {"exact": 2, "fast": 1}
PLAIN = ("fp32", "f32", "fp16", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Weights:
    """What every step reads once, in bytes as the file has them, scales and minima included."""

    facts: ModelConfig
    stored_bytes: int
    layer_parameters: int
    head_parameters: int
    is_quantised: bool

    def operations(self, *, tokens: int, heads: int, seen: int) -> tuple[float, float]:
        """(of weights, of attention): heads tokens reach the head, seen keys are looked at."""
        width = self.facts.num_heads * self.facts.head_dim
        products = tokens * self.layer_parameters + heads * self.head_parameters
        return 2.0 * products, 4.0 * self.facts.num_layers * seen * width

    def page_bytes(self, keys: int) -> int:
        width = self.facts.num_kv_heads * self.facts.head_dim
        return self.facts.num_layers * keys * width * 2 * PAGE_VALUE_BYTES


def weights_of(checkpoint: Checkpoint) -> Weights:
    facts = checkpoint.config
    head = "model.embed_tokens.weight" if facts.tied_head else "lm_head.weight"
    layers = [
        info
        for name, info in checkpoint.tensors.items()
        if name.startswith("model.layers.") and len(info.shape) == 2
    ]
    return Weights(
        facts,
        stored_bytes=sum(info.num_bytes for info in layers) + checkpoint.tensors[head].num_bytes,
        layer_parameters=sum(info.shape[0] * info.shape[1] for info in layers),
        head_parameters=facts.vocab_size * facts.hidden_size,
        is_quantised=checkpoint.precision not in PLAIN,
    )


def floor_s(
    weights: Weights,
    machine: Machine,
    compute: str,
    *,
    batch: int,
    new: int,
    context: int,
    shared: int = 0,
) -> float:
    """One step of batch sequences that each compute new tokens, the last at position context − 1.

    shared: keys of all sequences' contexts that lie in memory once.
    """
    seen = batch * (context * new - new * (new - 1) // 2)
    linear, attention = weights.operations(tokens=batch * new, heads=batch, seen=seen)
    planes = PLANES[compute]
    linear_rate = machine.int8_per_s / planes if weights.is_quantised else machine.float_per_s
    keys = shared + batch * (context - shared)
    read = weights.stored_bytes + weights.page_bytes(keys)
    return max(read / machine.bytes_per_s, linear / linear_rate + attention / machine.float_per_s)
