"""Hugging Face folders: single or sharded, and what they must not hold."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execute.weights import CheckpointError, open_checkpoint


def edit(folder: Path, tmp_path: Path, **changes: object) -> Path:
    """A copy with config fields changed; None removes one."""
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(kept))
    return copy


@pytest.fixture(scope="module")
def folder(tiny_folder: Any) -> Path:
    path: Path = tiny_folder()
    return path


def test_sharded_equals_single(folder: Path, tiny_folder: Any) -> None:
    sharded = tiny_folder(shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, many = open_checkpoint(folder), open_checkpoint(sharded)
    assert one.config == many.config
    assert one.tensors.keys() == many.tensors.keys()
    for name in one.tensors:
        assert torch.equal(one.read(name), many.read(name))


def test_old_and_new_spelling_of_rope_agree(folder: Path, tmp_path: Path) -> None:
    old = edit(
        folder,
        tmp_path,
        rope_parameters=None,
        rope_theta=777.0,
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    config = open_checkpoint(old).config
    assert config.rope_theta == 777.0
    assert config.rope_scaling is not None
    assert (config.rope_scaling.type, config.rope_scaling.factor) == ("yarn", 4.0)
    assert config.rope_scaling.original_context_tokens == 128


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"intermediate_size": 113}, "model.layers.0.mlp.gate_proj.weight"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ({"mlp_bias": "yes"}, "mlp_bias"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_field(
    folder: Path, tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(edit(folder, tmp_path, **changes))
    assert caught.value.field == field
    text = str(caught.value)
    assert "found" in text
    assert "allowed" in text


def test_a_missing_tensor_is_named(tiny_folder: Any, tmp_path: Path) -> None:
    copy = tmp_path / "cut"
    shutil.copytree(tiny_folder(shard_size="200KB"), copy)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    gone = index["weight_map"]["model.layers.1.mlp.down_proj.weight"]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != gone}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no such tensor"):
        open_checkpoint(copy)


def test_a_shard_outside_the_folder_is_refused(tiny_folder: Any, tmp_path: Path) -> None:
    copy = tmp_path / "escape"
    shutil.copytree(tiny_folder(shard_size="200KB"), copy)
    name = "model.safetensors.index.json"
    index = json.loads((copy / name).read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    (copy / name).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="inside the folder"):
        open_checkpoint(copy)


def test_an_absent_path_says_how_to_get_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="kagari models pull"):
        open_checkpoint(tmp_path / "nothing")
