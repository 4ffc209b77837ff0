"""Hugging Face folders of the Llama family: config.json beside one or more safetensors files.

Format: 8 bytes little endian header length, a JSON header, then the data it places.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER_BYTES = 100 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 64 << 20
# safetensors' name → (ours, bytes)
PRECISIONS = {"F32": ("fp32", 4), "F16": ("fp16", 2), "BF16": ("bf16", 2)}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def _damaged(field: str, found: object, allowed: str) -> CheckpointError:
    return CheckpointError(
        field, found=found, allowed=allowed, remedy="The folder is damaged; fetch it again."
    )


def read_json(path: Path, most: int) -> dict[str, Any]:
    """A bounded JSON object; raises CheckpointError."""
    if not path.is_file():
        raise _damaged(path.name, "no such file", "a file of the checkpoint's folder")
    size = path.stat().st_size
    if size > most:
        raise _damaged(path.name, f"{size} bytes", f"at most {most} bytes")
    return _object(path.name, path.read_bytes())


def _object(field: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(field, f"bad JSON ({error})", "a JSON object") from error
    if not isinstance(value, dict):
        raise _damaged(field, type(value).__name__, "a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    offset: int
    dtype: str


class FolderCheckpoint:
    """A folder whose headers were checked; see facts.Checkpoint. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, object] = dict(read_json(path / "config.json", MAX_CONFIG_BYTES))
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        headers = [self._parse(file) for file in _shards(path)]
        self.config = _llama_config(self.metadata, "lm_head.weight" in self.tensors)
        check_llama(self.config, self.tensors, path)
        self.weights_digest = digest_of(self.tensors, headers)
        self.precision = main_precision(self.tensors)

    def _parse(self, path: Path) -> tuple[int, bytes]:
        if not path.is_file():
            raise _damaged(path.name, "no such file", "every shard that the index names")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(
                    f"{path.name} header", f"{length} bytes", f"what fits in {size} bytes"
                )
            head = file.read(length)
        data_bytes = size - 8 - length
        for name, entry in _object(f"{path.name} header", head).items():
            if name == "__metadata__":
                continue
            if name in self.tensors:
                raise _damaged(name, "the name twice", "each tensor once")
            info, begin, dtype = _entry(f"{path.name} {name}", entry, data_bytes)
            self.tensors[name] = info
            self._places[name] = _Place(path, 8 + length + begin, dtype)
        return size, head

    def read(self, name: str) -> Tensor:
        """See facts.Checkpoint.read."""
        import torch

        info, place = self.tensors[name], self._places[name]
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        data = torch.empty(info.num_bytes, dtype=torch.uint8)
        with place.path.open("rb") as file:
            file.seek(place.offset)
            got = file.readinto(memoryview(data.numpy()))  # type: ignore[arg-type]
        if got != info.num_bytes:
            raise _damaged(name, f"{got} bytes", f"{info.num_bytes} bytes")
        return data.view(dtypes[place.dtype]).view(info.shape).float()


def _shards(path: Path) -> list[Path]:
    if not (path / INDEX).is_file():
        return [path / SINGLE]
    names = read_json(path / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise _damaged("weight_map", type(names).__name__, "an object of tensor → file")
    files = set(names.values())
    for file in files:
        # A shard is a plain name: a header must not lead outside its folder.
        if not isinstance(file, str) or "/" in file or "\\" in file or file in ("", ".", ".."):
            raise _damaged("weight_map", repr(file), "file names inside the folder")
    return [path / file for file in sorted(files)]


def _entry(name: str, entry: object, data_bytes: int) -> tuple[TensorInfo, int, str]:
    if not isinstance(entry, dict):
        raise _damaged(name, type(entry).__name__, "an object with dtype, shape, data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in PRECISIONS:
        raise CheckpointError(
            name,
            found=f"dtype {dtype!r}",
            allowed=", ".join(PRECISIONS),
            remedy="Take an unquantised checkpoint, or a GGUF file.",
        )
    if not isinstance(shape, list) or not 1 <= len(shape) <= 4:
        raise _damaged(name, f"shape {shape!r}", "one to four sizes")
    precision, num_bytes = PRECISIONS[dtype]
    for size in shape:
        num_bytes *= whole(f"{name} shape", size, high=1 << 40)
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise _damaged(name, f"data_offsets {offsets!r}", "[begin, end]")
    begin, end = (whole(f"{name} data_offsets", at, low=0, high=data_bytes) for at in offsets)
    if end - begin != num_bytes:
        raise _damaged(name, f"{end - begin} bytes", f"{num_bytes} bytes for {shape}")
    return TensorInfo(tuple(shape), precision, num_bytes), begin, dtype


def _llama_config(config: dict[str, object], has_head: bool) -> ModelConfig:
    if config.get("model_type") != "llama":
        raise CheckpointError(
            "model_type",
            found=repr(config.get("model_type")),
            allowed="'llama'",
            remedy="Choose a model of the Llama family, e.g. smollm2-135m.",
        )
    for key, allowed in {
        "quantization_config": (None,),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "hidden_act": (None, "silu"),
    }.items():
        if config.get(key) not in allowed:
            raise CheckpointError(
                key,
                found=repr(config.get(key)),
                allowed=" or ".join(map(repr, allowed)),
                remedy="Choose a plain Llama checkpoint, or a GGUF file of this model.",
            )
    hidden = whole("hidden_size", config.get("hidden_size"))
    heads = whole("num_attention_heads", config.get("num_attention_heads"))
    eos = config.get("eos_token_id")
    bos = config.get("bos_token_id")
    theta, scaling = _rope(config)
    return ModelConfig(
        architecture="llama",
        num_layers=whole("num_hidden_layers", config.get("num_hidden_layers"), high=MAX_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=whole("num_key_value_heads", config.get("num_key_value_heads"), default=heads),
        head_dim=whole("head_dim", config.get("head_dim"), default=max(1, hidden // heads)),
        ffn_size=whole("intermediate_size", config.get("intermediate_size")),
        vocab_size=whole("vocab_size", config.get("vocab_size"), high=MAX_VOCAB),
        context_tokens=whole(
            "max_position_embeddings", config.get("max_position_embeddings"), high=MAX_CONTEXT
        ),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=real("rms_norm_eps", config.get("rms_norm_eps"), default=1e-6),
        # A tied checkpoint may still carry a copy of the head; the config's word decides.
        tied_head=config.get("tie_word_embeddings") is True or not has_head,
        bos_token_id=None if bos is None else whole("bos_token_id", bos, low=0, high=MAX_VOCAB),
        eos_token_ids=tuple(
            whole("eos_token_id", one, low=0, high=MAX_VOCAB)
            for one in (eos if isinstance(eos, list) else [] if eos is None else [eos])
        ),
    )


def _rope(config: dict[str, object]) -> tuple[float, RopeScaling | None]:
    """theta and scaling: rope_parameters (transformers 5), or rope_theta and rope_scaling (4)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise _damaged("rope_parameters", repr(rope), "an object")
    theta = real("rope_theta", rope.get("rope_theta", config.get("rope_theta")), default=10_000.0)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            "partial_rotary_factor",
            found=rope["partial_rotary_factor"],
            allowed="1.0",
            remedy="Choose a Llama whose heads turn in full width.",
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(
            "rope_type",
            found=repr(kind),
            allowed="default, linear, llama3 or yarn",
            remedy="Choose a model with one of these.",
        )
    factor = real("rope factor", rope.get("factor"))
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    original = whole(
        "original_max_position_embeddings",
        rope.get("original_max_position_embeddings", config.get("max_position_embeddings")),
        high=MAX_CONTEXT,
    )
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor,
            original,
            low_freq_factor=real("low_freq_factor", rope.get("low_freq_factor")),
            high_freq_factor=real("high_freq_factor", rope.get("high_freq_factor")),
        )
    given = rope.get("attention_factor")
    return theta, RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=real("beta_fast", rope.get("beta_fast"), default=32.0),
        beta_slow=real("beta_slow", rope.get("beta_slow"), default=1.0),
        attention_factor=None if given is None else real("attention_factor", given),
        truncate=rope.get("truncate", True) is not False,
    )
