"""What a model needs of this machine, counted from configs of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_agent.hub_fit import fit, gguf_config

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
}
PARAMETERS = 1000 * 64 + 2 * (64 * (4 + 2 + 2 + 4) * 32 + 3 * 64 * 96)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2000 kB\n")
    (tmp_path / "cpuinfo").write_text("flags: avx2 avx512_bf16\n")
    return tmp_path


def test_weights_and_kv_are_counted(proc: Path) -> None:
    found = fit(CONFIG, proc / "not" / "yet", proc=proc)
    assert found.memory_available_bytes == 2_048_000
    assert found.weights_bytes == 2 * PARAMETERS + 4 * 1000 * 64
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert found.kv_tokens_that_fit == (2_048_000 - found.weights_bytes) // 512
    assert found.disk_free_bytes > 0


def test_without_bf16_on_the_cpu_weights_take_twice_as_much(proc: Path) -> None:
    (proc / "cpuinfo").write_text("flags: avx2\n")
    assert fit(CONFIG, proc, proc=proc).weights_bytes == 4 * PARAMETERS + 4 * 1000 * 64


def test_the_config_of_a_model_that_also_sees_is_the_text_part(proc: Path) -> None:
    assert fit({"text_config": CONFIG}, proc, proc=proc) == fit(CONFIG, proc, proc=proc)


def test_heads_that_are_not_told_follow_from_the_others(proc: Path) -> None:
    config = {
        key: value
        for key, value in CONFIG.items()
        if key not in ("head_dim", "num_key_value_heads")
    }
    assert fit(config, proc, proc=proc).kv_bytes_per_token == 2 * 2 * 4 * 16 * 2


def test_a_model_larger_than_memory_fits_no_token(proc: Path) -> None:
    big = {**CONFIG, "num_hidden_layers": 500}
    assert fit(big, proc, proc=proc).kv_tokens_that_fit == 0


@pytest.mark.parametrize("config", [None, {}, {"num_hidden_layers": "two"}, {"hidden_size": -1}])
def test_what_the_config_does_not_say_is_not_guessed(
    proc: Path, config: dict[str, object] | None
) -> None:
    found = fit(config, proc, proc=proc)
    assert (found.weights_bytes, found.kv_bytes_per_token) == (None, None)
    assert found.kv_tokens_that_fit is None


def test_a_gguf_header_tells_the_same(proc: Path) -> None:
    header = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "tokenizer.ggml.tokens": ["x"] * 1000,
    }
    assert fit(gguf_config(header), proc, proc=proc) == fit(CONFIG, proc, proc=proc)
