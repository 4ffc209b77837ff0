"""Llama, and Qwen2, which is Llama with biases on queries, keys and values."""

from engine.execute.models.wiring import Wiring

LLAMA = Wiring()
