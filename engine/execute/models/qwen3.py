"""Qwen3, dense: Llama with a norm on each head's query and key."""

from engine.execute.models.wiring import HEAD_NORMS, Wiring

QWEN3 = Wiring(head_norms=HEAD_NORMS)
