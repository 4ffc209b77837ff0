"""The reference beside which the engine is measured and tested: transformers, from our weights."""

from __future__ import annotations

from typing import Any

import torch

from engine.execute.weights import Checkpoint, RopeScaling


def transformers_llama(
    checkpoint: Checkpoint, *, dtype: torch.dtype, stretched: RopeScaling | None = None
) -> Any:
    """LlamaForCausalLM with the checkpoint's (dequantised) weights; stretched replaces its rope."""
    from transformers import LlamaConfig, LlamaForCausalLM

    facts = checkpoint.config
    rope: dict[str, object] = {"rope_theta": facts.rope_theta, "rope_type": "default"}
    scaling = stretched or facts.rope_scaling
    if scaling is not None:
        rope |= {
            "rope_type": scaling.type,
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context_tokens,
        }
        if scaling.type == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
            }
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.ffn_size,
        num_hidden_layers=facts.num_layers,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        max_position_embeddings=facts.context_tokens,
        rms_norm_eps=facts.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=facts.tied_head,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(dtype)  # type: ignore[arg-type]
    state = {
        name: checkpoint.read(name).to(dtype)
        for name in checkpoint.tensors
        if name != "rope_freqs.weight" and not (facts.tied_head and name == "lm_head.weight")
    }
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    # Buffers made on the meta device are empty: the rotary tables are built anew.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()
