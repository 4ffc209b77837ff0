"""Tiny random models of every family in odd shapes: transformers' own, as folders and as GGUF."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

Fields = dict[str, object]

VOCAB = 160
COMMON: Fields = {
    "vocab_size": VOCAB,
    "hidden_size": 210,  # a multiple of every number of heads in use, of no vector width
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}
NO_GROUPS: Fields = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}
ONE_KV_HEAD: Fields = {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 18}


def rope(kind: str = "default", theta: float = 10_000.0, **rest: object) -> Fields:
    return {"rope_type": kind, "rope_theta": theta, **rest}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=128)
LLAMA3 = rope(
    "llama3",
    500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LINEAR = rope("linear", factor=2.0)


def gemma_rope(**full: object) -> Fields:
    return {
        "full_attention": {"rope_type": "default", "rope_theta": 5_000.0, **full},
        "sliding_attention": rope("default", 300.0),
    }


WINDOWED: Fields = {"sliding_window": 20, "query_pre_attn_scalar": 12}
# family → what differs from COMMON in each configuration
SHAPES: dict[str, dict[str, Fields]] = {
    "llama": {
        "odd-groups": {"rope_parameters": rope()},
        "no-groups-tied-linear": {
            **NO_GROUPS, "tie_word_embeddings": True, "rope_parameters": LINEAR,
        },
        "one-kv-head-yarn": {**ONE_KV_HEAD, "rope_parameters": YARN},
        "llama3": {"head_dim": 16, "rope_parameters": LLAMA3},
        "biased": {"attention_bias": True, "mlp_bias": True, "rope_parameters": rope()},
    },
    "qwen2": {
        "odd-groups": {"rope_parameters": rope()},
        "no-groups-tied-linear": {
            **NO_GROUPS, "tie_word_embeddings": True, "rope_parameters": LINEAR,
        },
        "one-kv-head-yarn": {**ONE_KV_HEAD, "rope_parameters": YARN},
    },
    "qwen3": {
        "odd-groups": {"rope_parameters": rope(theta=1e6)},
        "no-groups-tied-linear-biased": {
            **NO_GROUPS, "tie_word_embeddings": True, "attention_bias": True,
            "rope_parameters": LINEAR,
        },
        "one-kv-head-yarn": {**ONE_KV_HEAD, "rope_parameters": YARN},
    },
    "gemma3": {
        "odd-groups-tied": {
            **WINDOWED, "tie_word_embeddings": True, "rope_parameters": gemma_rope(),
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "no-groups-linear": {
            **NO_GROUPS, "sliding_window": 7, "query_pre_attn_scalar": 40,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": gemma_rope(rope_type="linear", factor=8.0),
        },
        "one-kv-head-biased-all-windows": {
            **ONE_KV_HEAD, "sliding_window": 64, "query_pre_attn_scalar": 18,
            "attention_bias": True, "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "sliding_attention"],
            "rope_parameters": gemma_rope(),
        },
    },
}  # fmt: skip
# GGUF's blocks want rows of 32 or 256 weights.
BLOCKS: Fields = {"hidden_size": 256, "intermediate_size": 256}
GGUF_SHAPES: dict[str, dict[str, Fields]] = {
    family: {
        "groups": {
            **BLOCKS, **tail, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
            "rope_parameters": first,
        },
        "one-kv-head-tied": {
            **BLOCKS, **tail, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24,
            "tie_word_embeddings": True, "rope_parameters": first,
        },
        "no-groups-scaled": {
            **BLOCKS, **tail, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
            "rope_parameters": second,
        },
    }
    for family, tail, first, second in (
        ("llama", {"attention_bias": True, "mlp_bias": True}, rope(), LINEAR),
        ("qwen2", {}, rope(theta=1e6), YARN),
        ("qwen3", {}, rope(theta=1e6), YARN),
        (
            "gemma3",
            {"sliding_window": 20, "num_hidden_layers": 3, "layer_types": [
                "sliding_attention", "sliding_attention", "full_attention"]},
            gemma_rope(),
            gemma_rope(rope_type="linear", factor=8.0),
        ),
    )
}  # fmt: skip
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Bytes of a K block that hold its half-precision scales, and what these are about.
HALVES = {
    "Q4_K": {0: 2e-4, 2: 1.5e-3},
    "Q5_K": {0: 1e-4, 2: 1.5e-3},
    "Q6_K": {208: 2e-5},
}


def tiny_model(family: str, changes: Mapping[str, object]) -> Any:
    """transformers' own class with random weights; norms and biases are random too."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }[family]
    fields = {**COMMON, **changes}
    if family == "gemma3":
        fields.setdefault("query_pre_attn_scalar", fields["head_dim"])
    torch.manual_seed(7)
    model = model_class(config_class(**fields))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def random_blocks(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Packed rows of a K format, which the gguf package unpacks but does not pack."""
    weights, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (math.prod(shape) // weights, num_bytes), dtype=np.uint8)
    for at, size in HALVES[kind].items():
        halves = (random.uniform(0.5, 1.5, len(blocks)) * size).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def pack(weights: np.ndarray, kind: str, random: np.random.Generator) -> tuple[np.ndarray, str]:
    """In that format, or in the closest that the row length allows."""
    if weights.ndim == 1:
        return weights, "F32"
    if weights.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        kind = "Q8_0" if weights.shape[1] % 32 == 0 else "F16"
    if kind in HALVES:
        return random_blocks(kind, weights.shape, random), kind
    return quantize(weights, gguf.GGMLQuantizationType[kind]), kind


def write_gguf(
    path: Path,
    family: str,
    model: Any,
    kinds: tuple[str, ...],
    *,
    also: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """The model as llama.cpp's converter lays it out, matrices in these formats by turns; the
    model's own weights become what the file holds. also: writes what else is in the file."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    also(writer)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _write_rope(writer, family, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    random = np.random.default_rng(5)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    turn = 0
    for name, tensor in state.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2] if family == "llama" else ""
        )
        values = tensor.numpy()
        shift = 1.0 if family == "gemma3" and name.endswith("norm.weight") else 0.0
        if heads is not None:
            halves = values.reshape(heads, 2, config.head_dim // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        packed, kind = pack(np.ascontiguousarray(values + np.float32(shift)), kinds[turn], random)
        turn = (turn + (values.ndim > 1)) % len(kinds)
        stem, _, suffix = name.rpartition(".")
        known = names.get_name(stem)
        assert known is not None, name
        of_kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{known}.{suffix}", packed, raw_dtype=of_kind)
        values = dequantize(packed, of_kind).reshape(values.shape)
        if heads is not None:
            pairs = values.reshape(heads, config.head_dim // 2, 2, -1)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        tensor.copy_(torch.from_numpy(values - np.float32(shift)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_rope(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    rope = config.rope_parameters
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(kinds)
        local = rope["sliding_attention"]["rope_theta"]
        writer.add_float32(f"{family}.rope.freq_base_swa", local)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
