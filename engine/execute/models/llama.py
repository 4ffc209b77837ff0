"""Llama, and Qwen2, which is Llama with biases on queries, keys and values."""

from __future__ import annotations

from engine.execute.layers.activation import silu_mul
from engine.execute.models.decoder import Decoder, Layer


class Llama(Decoder):
    def load_layer(self, at: str) -> Layer:
        return Layer(
            attention_norm=self.load_norm(f"{at}.input_layernorm"),
            qkv=self.load_linear(f"{at}.self_attn", "q_proj", "k_proj", "v_proj"),
            out=self.load_linear(f"{at}.self_attn", "o_proj"),
            ffn_norm=self.load_norm(f"{at}.post_attention_layernorm"),
            gate_up=self.load_linear(f"{at}.mlp", "gate_proj", "up_proj"),
            gate=silu_mul,
            down=self.load_linear(f"{at}.mlp", "down_proj"),
        )
