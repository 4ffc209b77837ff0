"""How decoders of one family differ from others, as values that both forward passes read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Parts of a layer by their tensors' names below model.layers.N, without .weight or .bias.

    attention_norm, qkv (one product), head norms, rotation, attention, out, out_norm; then
    ffn_norm, gate_up (one product), gate, down, down_norm. None: the family has no such norm.
    """

    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    head_norms: tuple[str, str] | None = None  # of each query head, of each key head
    out: str = "self_attn.o_proj"
    out_norm: str | None = None
    ffn_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    gate: Literal["silu", "gelu"] = "silu"
    down: str = "mlp.down_proj"
    down_norm: str | None = None
    norm_shift: float = 0.0  # what a norm adds to its weight
    scales_embedding: bool = False  # by the square root of its width

    def embedding_scale(self, hidden_size: int) -> float:
        """Factor on the embedded tokens."""
        return hidden_size**0.5 if self.scales_embedding else 1.0


HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
