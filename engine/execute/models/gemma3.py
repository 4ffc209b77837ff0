"""Gemma 3, text: norms before and after each part, most layers with a window of their own theta."""

from __future__ import annotations

import torch

from engine.execute.layers.activation import gelu_mul
from engine.execute.models.decoder import Decoder, Layer


class Gemma3(Decoder):
    norm_shift = 1.0

    def embedding_scale(self) -> float:
        return self.config.hidden_size**0.5

    def load_layer(self, at: str) -> Layer:
        # What follows these two, the residual, is fp32.
        out_norm, down_norm = (
            self.load_norm(f"{at}.post_{part}_layernorm", dtype=torch.float32)
            for part in ("attention", "feedforward")
        )
        return Layer(
            attention_norm=self.load_norm(f"{at}.input_layernorm"),
            qkv=self.load_linear(f"{at}.self_attn", "q_proj", "k_proj", "v_proj"),
            head_norm=self.load_head_norm(at),
            out=self.load_linear(f"{at}.self_attn", "o_proj"),
            out_norm=out_norm,
            ffn_norm=self.load_norm(f"{at}.pre_feedforward_layernorm"),
            gate_up=self.load_linear(f"{at}.mlp", "gate_proj", "up_proj"),
            gate=gelu_mul,
            down=self.load_linear(f"{at}.mlp", "down_proj"),
            down_norm=down_norm,
        )
