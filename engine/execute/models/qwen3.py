"""Qwen3, dense: Llama with a norm on each head's query and key."""

from __future__ import annotations

from dataclasses import replace

from engine.execute.models.decoder import Layer
from engine.execute.models.llama import Llama


class Qwen3(Llama):
    def load_layer(self, at: str) -> Layer:
        return replace(super().load_layer(at), head_norm=self.load_head_norm(at))
