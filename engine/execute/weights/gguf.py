"""GGUF files of the Llama family: a bounded header parser and tensors in Hugging Face's layout.

Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little endian. Nothing that the
header claims is believed before it is compared with the size of the file.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

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

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER_BYTES = 256 << 20
MAX_ENTRIES = 1 << 16
MAX_NAME_BYTES = 1 << 12
# GGUF value type → (array typecode, struct letter)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9

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


def _damaged(field: str, found: object, allowed: str) -> CheckpointError:
    return CheckpointError(
        field, found=found, allowed=allowed, remedy="The file is damaged; fetch it again."
    )


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


class _Header:
    """Reads the header's values in order; every length is checked against what is left."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.limit = min(size, MAX_HEADER_BYTES)
        self.at = 0

    def take(self, count: int, field: str) -> bytes:
        if count > self.limit - self.at:
            raise _damaged(
                field, f"{count} bytes at offset {self.at}", f"what fits in {self.limit} bytes"
            )
        data = self.file.read(count)
        if len(data) != count:
            raise _damaged(field, f"end of file at offset {self.at + len(data)}", "a whole header")
        self.at += count
        return data

    def number(self, letter: str, field: str) -> int | float:
        (value,) = struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), field))
        return value

    def count(self, letter: str, field: str, most: int) -> int:
        value = self.number(letter, field)
        assert isinstance(value, int)
        if value > most:
            raise _damaged(field, value, f"at most {most}")
        return value

    def string(self, field: str, most: int = MAX_HEADER_BYTES) -> str:
        data = self.take(self.count("Q", field, most), field)
        return data.decode("utf-8", "replace")

    def name(self, field: str) -> str:
        name = self.string(field, MAX_NAME_BYTES)
        if not name:
            raise _damaged(field, "an empty name", f"1 to {MAX_NAME_BYTES} bytes")
        return name

    def value(self, kind: int, field: str) -> object:
        if kind == STRING:
            return self.string(field)
        if kind == BOOL:
            return self.number("B", field) != 0
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], field)
        if kind == ARRAY:
            return self._array(field)
        raise _damaged(field, f"value type {kind}", "a type of GGUF version 3 (0 to 12)")

    def _array(self, field: str) -> object:
        kind = self.count("I", field, 1 << 31)
        count = self.count("Q", field, self.limit)
        if kind in NUMBERS:
            numbers = array(NUMBERS[kind])
            numbers.frombytes(self.take(count * numbers.itemsize, field))
            return numbers.tolist()
        if kind == BOOL:
            return [byte != 0 for byte in self.take(count, field)]
        if kind != STRING:
            raise _damaged(field, f"array of type {kind}", "an array of numbers or strings")
        if count * 8 > self.limit - self.at:
            raise _damaged(field, f"{count} strings", f"what fits in {self.limit} bytes")
        return [self.string(field) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int
    form: BlockFormat


class GgufCheckpoint:
    """A GGUF file whose header was checked; see facts.Checkpoint. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        with path.open("rb") as file:
            header = _Header(file, size)
            self._parse(header, size)
            file.seek(0)
            head = file.read(header.at)
        self.config = _llama_config(self.metadata, self.tensors)
        check_llama(self.config, self.tensors, path)
        self.weights_digest = digest_of(self.tensors, [(size, head)])
        self.precision = main_precision(self.tensors)

    def _parse(self, header: _Header, size: int) -> None:
        magic = header.take(4, "magic")
        if magic != b"GGUF":
            raise _damaged("magic", repr(magic), "b'GGUF'")
        version = header.number("I", "version")
        if version not in (2, 3):
            raise CheckpointError(
                "version",
                found=version,
                allowed="2 or 3, little endian",
                remedy="Convert the file with a current gguf tool.",
            )
        num_tensors = header.count("Q", "tensor_count", MAX_ENTRIES)
        num_entries = header.count("Q", "metadata_kv_count", MAX_ENTRIES)
        for _ in range(num_entries):
            key = header.name("metadata key")
            kind = header.count("I", key, 1 << 31)
            self.metadata[key] = header.value(kind, key)
        found = [self._tensor(header) for _ in range(num_tensors)]
        alignment = whole(
            "general.alignment", self.metadata.get("general.alignment"), high=1 << 20, default=32
        )
        start = -(-header.at // alignment) * alignment
        for name, shape, form, offset in found:
            num_bytes = form.num_bytes
            for extent in shape:
                num_bytes *= extent
            num_bytes //= form.weights
            if offset % alignment or start + offset + num_bytes > size:
                raise _damaged(
                    name,
                    f"{num_bytes} bytes at offset {start + offset} of {size}",
                    f"an aligned place inside the file ({alignment} bytes)",
                )
            if name in self.tensors:
                raise _damaged(name, "the name twice", "each tensor once")
            self.tensors[name] = TensorInfo(shape, form.name, num_bytes)
            self._places[name] = _Place(start + offset, form)

    def _tensor(self, header: _Header) -> tuple[str, tuple[int, ...], BlockFormat, int]:
        name = hf_name(header.name("tensor name"))
        num_dims = header.count("I", name, 4)
        shape = tuple(header.count("Q", name, 1 << 40) for _ in range(num_dims))[::-1]
        kind = header.count("I", name, 1 << 31)
        offset = header.count("Q", name, 1 << 62)
        form = FORMATS.get(kind)
        if form is None:
            raise CheckpointError(
                name,
                found=f"GGML type {kind}",
                allowed=", ".join(known.name for known in FORMATS.values()),
                remedy="Take a file with another quantisation of this model, e.g. Q8_0.",
            )
        if not shape or min(shape) < 1 or shape[-1] % form.weights:
            raise _damaged(name, f"shape {list(shape)}", f"rows of {form.weights} × n {form.name}")
        return name, shape, form, offset

    def read(self, name: str) -> Tensor:
        """See facts.Checkpoint.read; q and k rows in Hugging Face's order (halves, not pairs)."""
        import torch

        info, place = self.tensors[name], self._places[name]
        data = torch.empty(info.num_bytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(place.offset)
            got = file.readinto(memoryview(data.numpy()))  # type: ignore[arg-type]
        if got != info.num_bytes:
            raise _damaged(name, f"{got} bytes", f"{info.num_bytes} bytes")
        weights = unpack(place.form, data).view(info.shape)
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        for part, count in heads.items():
            if f"self_attn.{part}." in name:
                pairs = weights.view(count, self.config.head_dim // 2, 2, -1)
                weights = pairs.transpose(1, 2).reshape(info.shape)
        return weights


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
