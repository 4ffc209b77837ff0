"""What a model will need of this machine's memory and disk, from its config alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

HEAD_BYTES = 4  # of the matrix that gives logits: fp32, beside an embedding that it is tied to
KV_BYTES = 2  # bf16
# GGUF's name behind the architecture → config.json's.
GGUF_NAMES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}


class Fit(Struct, frozen=True):
    """None where the config does not tell."""

    disk_free_bytes: int
    memory_available_bytes: int
    weights_bytes: int | None  # in memory
    kv_bytes_per_token: int | None
    kv_tokens_that_fit: int | None  # beside the weights


def fit(config: Mapping[str, object] | None, folder: Path, *, proc: Path = Path("/proc")) -> Fit:
    """config is what config.json holds, None where nobody knows it."""
    memory = _memory_available_bytes(proc)
    text = (config or {}).get("text_config")
    values = {**(config or {}), **(text if isinstance(text, dict) else {})}
    weights, kv = _weights_bytes(values, _weight_bytes(proc)), _kv_bytes_per_token(values)
    tokens = None if weights is None or kv is None else max(0, memory - weights) // kv
    return Fit(shutil.disk_usage(_existing(folder)).free, memory, weights, kv, tokens)


def gguf_config(metadata: Mapping[str, object]) -> dict[str, object]:
    """The part of a config that a GGUF header tells under other names."""
    architecture = metadata.get("general.architecture")
    tokens = metadata.get("tokenizer.ggml.tokens")
    config = {
        name: metadata.get(f"{architecture}.{gguf_name}") for gguf_name, name in GGUF_NAMES.items()
    }
    return {**config, "vocab_size": len(tokens) if isinstance(tokens, list) else None}


def _kv_bytes_per_token(values: Mapping[str, object]) -> int | None:
    layers, heads = _count(values, "num_hidden_layers"), _heads(values)
    return None if layers is None or heads is None else 2 * layers * heads[1] * heads[2] * KV_BYTES


def _weights_bytes(values: Mapping[str, object], weight_bytes: int) -> int | None:
    """Embedding, projections of attention and of the feed-forward, head; norms are too small."""
    layers, hidden = _count(values, "num_hidden_layers"), _count(values, "hidden_size")
    ffn, vocab, heads = (
        _count(values, "intermediate_size"),
        _count(values, "vocab_size"),
        _heads(values),
    )
    if layers is None or hidden is None or ffn is None or vocab is None or heads is None:
        return None
    num_heads, kv_heads, width = heads
    layer = 2 * hidden * (num_heads + kv_heads) * width + 3 * hidden * ffn
    return (vocab * hidden + layers * layer) * weight_bytes + vocab * hidden * HEAD_BYTES


def _heads(values: Mapping[str, object]) -> tuple[int, int, int] | None:
    """(heads, those of keys and values, width of one)."""
    heads, hidden = _count(values, "num_attention_heads"), _count(values, "hidden_size")
    if heads is None:
        return None
    width = _count(values, "head_dim") or (hidden // heads if hidden else 0)
    return (heads, _count(values, "num_key_value_heads") or heads, width) if width else None


def _count(values: Mapping[str, object], key: str) -> int | None:
    found = values.get(key)
    return found if isinstance(found, int) and 0 < found < 1 << 40 else None


def _weight_bytes(proc: Path) -> int:
    """bf16 where the CPU multiplies it, as the engine chooses."""
    return 2 if "avx512_bf16" in (proc / "cpuinfo").read_text() else 4


def _memory_available_bytes(proc: Path) -> int:
    """What Linux says it could give without swapping."""
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.exists())
