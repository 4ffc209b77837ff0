"""What a family's files may say that is not served: refused by field, before any weight is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.execute.weights import CheckpointError, open_checkpoint
from tests.engine.execute.family_checks import assert_equals_peer
from tests.engine.execute.tiny_families import GGUF_SHAPES, SHAPES, tiny_model, write_gguf

Edit = Callable[[gguf.GGUFWriter], None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family, shapes in SHAPES.items():
        (shape, *_) = shapes.values()
        found[family] = tmp_path_factory.mktemp(family)
        tiny_model(family, shape).save_pretrained(found[family])
    return found


def edited(folder: Path, tmp_path: Path, changes: dict[str, object]) -> Path:
    """The same weights under a changed config; None removes a field."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    (tmp_path / "model.safetensors").hardlink_to(folder / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("gemma3", {"sliding_window": 0}, "sliding_window"),
        ("gemma3", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ("gemma3", {"text_config": 7}, "text_config"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
         "rope_parameters sliding_attention"),
        ("gemma3", {"rope_parameters": {"full_attention": 3}}, "rope_parameters"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3", {"head_dim": None}, "model.layers.0.self_attn.q_proj.weight"),  # 128 by default
        ("qwen3", {"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", {"model_type": "qwen3_moe"}, "model_type"),
        ("qwen3", {"model_type": "llama"}, "model.layers.0.self_attn.k_norm.weight"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("qwen2", {"model_type": "llama"}, "model.layers.0.self_attn.k_proj.bias"),
        ("llama", {"model_type": "gemma3_text"}, "model.layers.0.self_attn.q_norm.weight"),
        ("llama", {"model_type": "qwen2"}, "model.layers.0.self_attn.q_proj.bias"),
        ("llama", {"model_type": None}, "model_type"),
    ],
)  # fmt: skip
def test_a_family_config_that_cannot_be_served_is_refused_by_field(
    family: str,
    changes: dict[str, object],
    field: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(edited(folders[family], tmp_path, changes))
    assert caught.value.field == field
    assert caught.value.remedy


def test_an_unknown_family_is_told_the_known_ones(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(edited(folders["llama"], tmp_path, {"model_type": "mamba"}))
    assert caught.value.allowed == "llama, qwen2, qwen3, gemma3_text, gemma3"


@pytest.mark.parametrize(
    ("family", "also", "field"),
    [
        ("gemma3", lambda w: w.add_float32("gemma3.final_logit_softcapping", 30.0),
         "gemma3.final_logit_softcapping"),
        ("qwen3", lambda w: w.add_expert_count(8), "qwen3.expert_count"),
        ("qwen3", lambda w: w.add_sliding_window(512), "qwen3.attention.sliding_window"),
        ("qwen3", lambda w: w.add_rope_dimension_count(16), "qwen3.rope.dimension_count"),
        ("qwen3", lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.ones(8, np.float32)),
         "blk.0.ffn_gate_inp.weight"),
        ("qwen3", lambda w: w.add_tensor("blk.1.attn_q.bias", np.ones(256, np.float32)),
         "model.layers.1.self_attn.q_proj.bias"),
        ("qwen3", lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(256, np.float32)),
         "model.layers.0.self_attn.k_proj.bias"),
    ],
)  # fmt: skip
def test_a_family_gguf_that_cannot_be_served_is_refused_by_field(
    family: str, also: Edit, field: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    shape = GGUF_SHAPES[family]["groups"]
    write_gguf(path, family, tiny_model(family, shape), ("F16",), also=also)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.field == field


@pytest.mark.parametrize("factor", [0.0, float("nan"), -2.0])
def test_rope_factors_that_turn_every_logit_to_nothing_are_refused_at_load(
    factor: float, tmp_path: Path, make_runner: Any
) -> None:
    def also(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.full(16, factor, np.float32))

    shape = GGUF_SHAPES["llama"]["groups"]
    write_gguf(tmp_path / "tiny.gguf", "llama", tiny_model("llama", shape), ("F16",), also=also)
    with pytest.raises(CheckpointError) as caught:
        make_runner(tmp_path / "tiny.gguf")
    assert caught.value.field == "rope_freqs.weight"


@pytest.mark.parametrize("architecture", ["qwen3moe", "gemma2", "mamba"])
def test_a_gguf_of_another_architecture_is_told_the_known_ones(
    architecture: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "other.gguf")
    assert caught.value.field == "general.architecture"
    assert caught.value.allowed == "llama, qwen2, qwen3, gemma3"


def test_gemma3_family_facts_where_files_are_silent(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Published configs of Gemma 3 leave most of this to transformers' defaults."""
    silent = dict.fromkeys(("layer_types", "_sliding_window_pattern", "rope_parameters"))
    changes = {**silent, "num_hidden_layers": 2, "sliding_window_pattern": 2, "eos_token_id": None}
    old = {"rope_local_base_freq": 300.0, "rope_theta": 5_000.0,
           "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    config = open_checkpoint(edited(folders["gemma3"], tmp_path, {**changes, **old})).config
    assert config.windows == (20, None)
    assert (config.rope_theta, config.local_rope_theta) == (5_000.0, 300.0)
    assert config.rope_scaling is not None
    assert (config.rope_scaling.type, config.rope_scaling.factor) == ("linear", 8.0)
    assert config.eos_token_ids == (1,)
    assert config.query_scale == pytest.approx(12**-0.5)


@pytest.mark.slow  # the real file is fetched for the full counts alone
def test_gemma3_family_gguf_without_a_pattern_has_every_sixth_layer_full(gemma_path: Path) -> None:
    config = open_checkpoint(gemma_path).config
    assert (config.num_layers, config.hidden_size, config.ffn_size) == (18, 640, 2048)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 1, 256)
    assert (config.vocab_size, config.context_tokens, config.tied_head) == (262144, 32768, True)
    assert config.windows == (512, 512, 512, 512, 512, None) * 3
    assert (config.rope_theta, config.local_rope_theta) == (1_000_000.0, 10_000.0)
    assert (config.rope_scaling, config.query_scale) == (None, 1 / 16)
    assert (config.bos_token_id, config.eos_token_ids) == (2, (1,))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_gemma3_family_text_part_of_a_model_that_also_sees(
    prefix: str, folders: dict[str, Path], tmp_path: Path, make_runner: Any
) -> None:
    folder = folders["gemma3"]
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        prefix + (name if prefix == "language_model." else name.removeprefix("model.")): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    tensors["vision_tower.patch.weight"] = torch.zeros(2, 3, 4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    (shape, *_) = SHAPES["gemma3"].values()
    model = tiny_model("gemma3", shape)
    assert_equals_peer(make_runner(tmp_path), model, [list(range(40))], tokens=4)
