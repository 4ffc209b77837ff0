"""GGUF files of the Llama family: tensors by Hugging Face's names, in its layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.execute.weights.facts import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_VOCAB,
    CheckpointError,
    ModelConfig,
    RopeScaling,
    TensorInfo,
    check_llama,
    digest_of,
    main_precision,
    real,
    whole,
)
from engine.execute.weights.ggml_blocks import FORMATS, BlockFormat, unpack
from engine.execute.weights.gguf_header import Header, TensorEntry, damaged, read_header

if TYPE_CHECKING:
    from torch import Tensor

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int
    form: BlockFormat


class GgufCheckpoint:
    """A GGUF file whose header was checked; see facts.Checkpoint. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        header = read_header(path)
        self.metadata = header.metadata
        self._place(header)
        self.config = _llama_config(self.metadata, self.tensors)
        check_llama(self.config, self.tensors, path)
        self.weights_digest = digest_of(self.tensors, [(header.file_bytes, header.head)])
        self.precision = main_precision(self.tensors)

    def _place(self, header: Header) -> None:
        alignment = whole(
            "general.alignment", self.metadata.get("general.alignment"), high=1 << 20, default=32
        )
        start = -(-len(header.head) // alignment) * alignment
        for entry in header.tensors:
            name, form = hf_name(entry.name), _form(entry)
            num_bytes = math.prod(entry.shape) * form.num_bytes // form.weights
            if entry.offset % alignment or start + entry.offset + num_bytes > header.file_bytes:
                raise damaged(
                    name,
                    f"{num_bytes} bytes at offset {start + entry.offset} of {header.file_bytes}",
                    f"an aligned place inside the file ({alignment} bytes)",
                )
            if name in self.tensors:
                raise damaged(name, "the name twice", "each tensor once")
            self.tensors[name] = TensorInfo(entry.shape, form.name, num_bytes)
            self._places[name] = _Place(start + entry.offset, form)

    def read(self, name: str) -> Tensor:
        """See facts.Checkpoint.read; q and k rows in Hugging Face's order (halves, not pairs)."""
        import torch

        info, place = self.tensors[name], self._places[name]
        data = torch.empty(info.num_bytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(place.offset)
            got = file.readinto(memoryview(data.numpy()))  # type: ignore[arg-type]
        if got != info.num_bytes:
            raise damaged(name, f"{got} bytes", f"{info.num_bytes} bytes")
        weights = unpack(place.form, data).view(info.shape)
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        for part, count in heads.items():
            if f"self_attn.{part}." in name:
                pairs = weights.view(count, self.config.head_dim // 2, 2, -1)
                weights = pairs.transpose(1, 2).reshape(info.shape)
        return weights


def _form(entry: TensorEntry) -> BlockFormat:
    form = FORMATS.get(entry.kind)
    if form is None:
        raise CheckpointError(
            entry.name,
            found=f"GGML type {entry.kind}",
            allowed=", ".join(known.name for known in FORMATS.values()),
            remedy="Take a file with another quantisation of this model, e.g. Q8_0.",
        )
    if not entry.shape or min(entry.shape) < 1 or entry.shape[-1] % form.weights:
        raise damaged(
            entry.name, f"shape {list(entry.shape)}", f"rows of {form.weights} × n {form.name}"
        )
    return form


def _llama_config(metadata: dict[str, object], tensors: dict[str, TensorInfo]) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            "general.architecture",
            found=repr(architecture),
            allowed="'llama'",
            remedy="Choose a model of the Llama family, e.g. smollm2-135m.",
        )

    def get(name: str) -> object:
        return metadata.get(f"llama.{name}")

    for key in ("expert_count", "attention.sliding_window"):
        if get(key):
            raise CheckpointError(
                f"llama.{key}",
                found=get(key),
                allowed="nothing",
                remedy="Choose a dense Llama with full attention.",
            )
    hidden = whole("llama.embedding_length", get("embedding_length"))
    heads = whole("llama.attention.head_count", get("attention.head_count"))
    embedding = tensors.get("model.embed_tokens.weight")
    rows = embedding.shape[0] if embedding is not None else None
    head_dim = whole(
        "llama.attention.key_length", get("attention.key_length"), default=max(1, hidden // heads)
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        if whole(f"llama.{key}", get(key), default=head_dim) != head_dim:
            raise CheckpointError(
                f"llama.{key}",
                found=get(key),
                allowed=f"the head's {head_dim}",
                remedy="Choose a Llama whose heads turn and read in full width.",
            )
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture="llama",
        num_layers=whole("llama.block_count", get("block_count"), high=MAX_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=whole(
            "llama.attention.head_count_kv", get("attention.head_count_kv"), default=heads
        ),
        head_dim=head_dim,
        ffn_size=whole("llama.feed_forward_length", get("feed_forward_length")),
        vocab_size=whole("llama.vocab_size", rows, high=MAX_VOCAB),
        context_tokens=whole("llama.context_length", get("context_length"), high=MAX_CONTEXT),
        rope_theta=real("llama.rope.freq_base", get("rope.freq_base"), default=10_000.0),
        rope_scaling=_rope_scaling(get, "rope_freqs.weight" in tensors),
        norm_eps=real(
            "llama.attention.layer_norm_rms_epsilon", get("attention.layer_norm_rms_epsilon")
        ),
        tied_head="lm_head.weight" not in tensors,
        bos_token_id=None if bos is None else whole("tokenizer.ggml.bos_token_id", bos, low=0),
        eos_token_ids=()
        if eos is None
        else (whole("tokenizer.ggml.eos_token_id", eos, low=0, high=MAX_VOCAB),),
    )


def _rope_scaling(get: object, has_factors: bool) -> RopeScaling | None:
    assert callable(get)
    if has_factors:
        return RopeScaling("factors")
    kind = get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            "llama.rope.scaling.type",
            found=repr(kind),
            allowed="none, linear or yarn",
            remedy="Choose a model with one of these.",
        )
    factor = real("llama.rope.scaling.factor", get("rope.scaling.factor"))
    if kind == "linear":
        return RopeScaling("linear", factor)
    return RopeScaling(
        "yarn",
        factor,
        whole(
            "llama.rope.scaling.original_context_length",
            get("rope.scaling.original_context_length"),
            high=MAX_CONTEXT,
        ),
        attention_factor=None
        if get("rope.scaling.attn_factor") is None
        else real("llama.rope.scaling.attn_factor", get("rope.scaling.attn_factor")),
    )
