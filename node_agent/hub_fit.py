"""What a model will need of this machine, from its files' sizes and its config alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
HELD_BYTES = 2  # of a weight in memory: bf16
HEAD_BYTES = 4  # of the matrix that gives logits: fp32, beside an embedding that it is tied to
KV_BYTES = 2  # bf16


class Fit(Struct, frozen=True):
    """None where the config does not tell."""

    disk_free_bytes: int
    memory_available_bytes: int
    weights_bytes: int | None  # in memory
    kv_bytes_per_token: int | None
    kv_tokens_that_fit: int | None  # beside the weights


def fit(config: Mapping[str, object] | None, *, checkpoint_bytes: int, folder: Path) -> Fit:
    """config is config.json's content, None where the model has none (GGUF)."""
    weights = kv = tokens = None
    memory = memory_available_bytes()
    if config is not None:
        text = config.get("text_config")
        values = {**config, **text} if isinstance(text, dict) else dict(config)
        kv = _kv_bytes_per_token(values)
        weights = _weights_bytes(values, checkpoint_bytes)
    if kv and weights is not None:
        tokens = max(0, memory - weights) // kv
    return Fit(shutil.disk_usage(_existing(folder)).free, memory, weights, kv, tokens)


def _kv_bytes_per_token(values: Mapping[str, object]) -> int | None:
    layers, heads = _count(values, "num_hidden_layers"), _count(values, "num_attention_heads")
    hidden = _count(values, "hidden_size")
    if layers is None or heads is None:
        return None
    kv_heads = _count(values, "num_key_value_heads") or heads
    width = _count(values, "head_dim") or (hidden // heads if hidden else None)
    return None if width is None else 2 * layers * kv_heads * width * KV_BYTES


def _weights_bytes(values: Mapping[str, object], checkpoint_bytes: int) -> int | None:
    kind = values.get("torch_dtype", values.get("dtype"))
    each = WEIGHT_BYTES.get(str(kind))
    if each is None:
        return None
    head = (_count(values, "vocab_size") or 0) * (_count(values, "hidden_size") or 0)
    is_tied = values.get("tie_word_embeddings") is True
    return checkpoint_bytes // each * HELD_BYTES + head * (HEAD_BYTES - HELD_BYTES * (not is_tied))


def _count(values: Mapping[str, object], key: str) -> int | None:
    found = values.get(key)
    return found if isinstance(found, int) and 0 < found < 1 << 40 else None


def memory_available_bytes() -> int:
    """What Linux says it could give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.exists())
