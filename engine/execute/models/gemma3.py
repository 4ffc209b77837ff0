"""Gemma 3, text: norms before and after each part, most layers with a window of their own theta."""

from engine.execute.models.wiring import HEAD_NORMS, Wiring

GEMMA3 = Wiring(
    head_norms=HEAD_NORMS,
    out_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    gate="gelu",
    down_norm="post_feedforward_layernorm",
    norm_shift=1.0,
    scales_embedding=True,
)
