"""Metadata of a GGUF file → ModelConfig, for every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.execute.weights.facts import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_VOCAB,
    CheckpointError,
    ModelConfig,
    RopeScaling,
    TensorInfo,
    real,
    whole,
)
from engine.execute.weights.families import ATTENTION, FFN, QKV, SOFTCAPS, Family, refuse
from engine.execute.weights.gguf_header import damaged

WINDOW_PERIOD = 6  # where the file is silent, as llama.cpp has it
# llama.cpp knows Gemma 3's 27B by its layers: only its queries are scaled by hidden ÷ heads.
LAYERS_OF_27B = 62


def parse_metadata(
    family: Family, metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]
) -> ModelConfig:
    """tensors by Hugging Face name. Raises CheckpointError at the first field not served."""
    name = family.name

    def get(key: str) -> object:
        return metadata.get(f"{name}.{key}")

    unserved = ("expert_count", *SOFTCAPS)
    for key in unserved if family.has_windows else (*unserved, "attention.sliding_window"):
        if get(key):
            raise refuse(f"{name}.{key}", get(key), allowed="nothing", family=family)
    hidden = whole(f"{name}.embedding_length", get("embedding_length"))
    heads = whole(f"{name}.attention.head_count", get("attention.head_count"))
    num_layers = whole(f"{name}.block_count", get("block_count"), high=MAX_LAYERS)
    embedding = tensors.get("model.embed_tokens.weight")
    rows = embedding.shape[0] if embedding is not None else None
    head_dim = whole(
        f"{name}.attention.key_length",
        get("attention.key_length"),
        default=max(1, hidden // heads),
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        if whole(f"{name}.{key}", get(key), default=head_dim) != head_dim:
            raise refuse(f"{name}.{key}", get(key), allowed=f"the head's {head_dim}", family=family)
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    is_27b = family.has_windows and num_layers == LAYERS_OF_27B
    return ModelConfig(
        architecture=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=whole(
            f"{name}.attention.head_count_kv", get("attention.head_count_kv"), default=heads
        ),
        head_dim=head_dim,
        ffn_size=whole(f"{name}.feed_forward_length", get("feed_forward_length")),
        vocab_size=whole(f"{name}.vocab_size", rows, high=MAX_VOCAB),
        context_tokens=whole(f"{name}.context_length", get("context_length"), high=MAX_CONTEXT),
        rope_theta=real(
            f"{name}.rope.freq_base",
            get("rope.freq_base"),
            default=1_000_000.0 if family.has_windows else 10_000.0,
        ),
        rope_scaling=_rope_scaling(name, get, "rope_freqs.weight" in tensors),
        norm_eps=real(
            f"{name}.attention.layer_norm_rms_epsilon", get("attention.layer_norm_rms_epsilon")
        ),
        tied_head="lm_head.weight" not in tensors,
        bos_token_id=None
        if bos is None
        else whole("tokenizer.ggml.bos_token_id", bos, low=0, high=MAX_VOCAB),
        eos_token_ids=()
        if eos is None
        else (whole("tokenizer.ggml.eos_token_id", eos, low=0, high=MAX_VOCAB),),
        query_scale=(max(1, hidden // heads) if is_27b else head_dim) ** -0.5,
        windows=_windows(name, get, num_layers, has_windows=family.has_windows),
        local_rope_theta=real(
            f"{name}.rope.freq_base_swa", get("rope.freq_base_swa"), default=10_000.0
        ),
        biases=family.biases | _biases(tensors),
    )


def _biases(tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Metadata does not speak of them; the first layer's tensors stand for all."""
    found = {
        name.split(".")[-2]
        for name in tensors
        if name.startswith("model.layers.0.") and name.endswith("_proj.bias")
    }
    together = (QKV, ATTENTION[3:], FFN)
    return frozenset(name for names in together if found & set(names) for name in names)


def _windows(
    name: str, get: Callable[[str], object], num_layers: int, *, has_windows: bool
) -> tuple[int | None, ...]:
    key = f"{name}.attention.sliding_window"
    window = whole(key, get("attention.sliding_window"), low=0, high=MAX_CONTEXT, default=0)
    if not has_windows or not window:
        return (None,) * num_layers
    pattern = get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise damaged(f"{key}_pattern", f"{len(pattern)} entries", f"one of {num_layers} each")
        return tuple(window if is_local else None for is_local in pattern)
    period = whole(f"{key}_pattern", pattern, low=0, default=WINDOW_PERIOD)
    return tuple(
        window if not period or layer % period < period - 1 else None for layer in range(num_layers)
    )


def _rope_scaling(name: str, get: Callable[[str], object], has_factors: bool) -> RopeScaling | None:
    if has_factors:
        return RopeScaling("factors")
    kind = get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{name}.rope.scaling.type",
            found=repr(kind),
            allowed="none, linear or yarn",
            remedy="Choose a model with one of these.",
        )
    factor = real(f"{name}.rope.scaling.factor", get("rope.scaling.factor"))
    if kind == "linear":
        return RopeScaling("linear", factor)
    attention = get("rope.scaling.attn_factor")
    return RopeScaling(
        "yarn",
        factor,
        whole(
            f"{name}.rope.scaling.original_context_length",
            get("rope.scaling.original_context_length"),
            high=MAX_CONTEXT,
        ),
        attention_factor=None
        if attention is None
        else real(f"{name}.rope.scaling.attn_factor", attention),
    )
