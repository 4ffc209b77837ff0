"""Every family and file format against transformers, and against itself however it is run."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execute.models.registry import WIRINGS
from engine.execute.weights import open_checkpoint
from engine.execute.weights.families import FAMILIES
from tests.engine.execute.conftest import PACKED
from tests.engine.execute.family_checks import assert_equals_peer, run_every_way
from tests.engine.execute.tiny_families import (
    GGUF_SHAPES,
    KINDS,
    SHAPES,
    VOCAB,
    tiny_model,
    write_gguf,
)

LENGTHS = (1, 17, 181)
# Of logits. Natively activations are rounded to 16 bits; for AMX tiles, weights of 4 bits are too.
ATOL = {"fp32": 1e-4, "native": 2.5e-3 if torch.cpu.get_capabilities().get("amx_tile") else 1e-3}
ALL_SHAPES = [
    pytest.param(family, name, id=f"{family}-{name}")
    for family, shapes in SHAPES.items()
    for name in shapes
]
GGUF_CASES = [
    pytest.param(family, name, kinds, id=f"{family}-{name}-{'-'.join(kinds)}",
                 marks=() if kinds == KINDS and name == "groups" else pytest.mark.slow)
    for family, shapes in GGUF_SHAPES.items()
    for name in shapes
    for kinds in (KINDS, *((kind,) for kind in KINDS))
]  # fmt: skip


def prompt_of(length: int, vocab: int = VOCAB) -> list[int]:
    return [(7 * at * at + 11 * at + 3) % vocab for at in range(length)]


def save(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The model's own weights are rounded to dtype; its buffers, not in the folder, are not."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "shape"), ALL_SHAPES)
def test_family_from_safetensors_equals_transformers(
    family: str, shape: str, tmp_path: Path, make_runner: Any
) -> None:
    model = tiny_model(family, SHAPES[family][shape])
    folder = save(model, tmp_path)
    assert_equals_peer(make_runner(folder), model, [prompt_of(length) for length in LENGTHS])


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(
            *case.values,
            id=case.id,
            marks=() if case.values[1] == "odd-groups-tied" else pytest.mark.slow,
        )
        for case in ALL_SHAPES
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_family_from_half_precision_safetensors_equals_transformers(
    family: str, shape: str, dtype: torch.dtype, tmp_path: Path, make_runner: Any
) -> None:
    """The peer holds the rounded weights and computes in fp32, as the runner does."""
    model = tiny_model(family, SHAPES[family][shape])
    folder = save(model, tmp_path, dtype)
    assert open_checkpoint(folder).precision == {torch.bfloat16: "bf16"}.get(dtype, "fp16")
    assert_equals_peer(make_runner(folder), model, [prompt_of(length) for length in LENGTHS])


@pytest.mark.parametrize("precision", list(ATOL))
@pytest.mark.parametrize(("family", "shape", "kinds"), GGUF_CASES)
def test_family_from_gguf_equals_transformers_on_the_dequantised_weights(
    family: str,
    shape: str,
    kinds: tuple[str, ...],
    precision: str,
    tmp_path: Path,
    make_runner: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Natively too: formats without a kernel, and heads of 24, are torch's between its ops."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # torch's products are in fp32
    model = tiny_model(family, GGUF_SHAPES[family][shape])
    path = tmp_path / "tiny.gguf"
    write_gguf(path, family, model, kinds)
    held = {info.precision for info in open_checkpoint(path).tensors.values()}
    assert held >= ({kinds[0].lower()} if len(kinds) == 1 else {"q4_k", "q6_k", "q5_0", "bf16"})
    runner = make_runner(path, precision=precision, pages="fp32")
    prompts = [prompt_of(length) for length in LENGTHS]
    assert_equals_peer(runner, model, prompts, atol=ATOL[precision])


@pytest.mark.parametrize("family", list(SHAPES))
def test_family_is_wholly_native_where_all_its_products_are_packed(
    family: str, tiny_gguf: Any, make_runner: Any
) -> None:
    runner = make_runner(tiny_gguf(family), precision="native")
    assert runner.compute_precision == "int16"
    assert runner.model.fallbacks == 0
    assert make_runner(tiny_gguf(family), precision="fast").compute_precision == "int8"


@pytest.mark.parametrize("family", list(SHAPES))
def test_family_with_heads_of_24_falls_back_for_its_attention_alone(
    family: str, tmp_path: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # torch's attention is in fp32
    model = tiny_model(family, GGUF_SHAPES[family]["one-kv-head-tied"])
    write_gguf(tmp_path / "tiny.gguf", family, model, PACKED)
    runner = make_runner(tmp_path / "tiny.gguf", precision="native", pages="fp32")
    assert runner.compute_precision == "int16"
    assert runner.model.fallbacks == runner.model.config.num_layers
    prompts = [prompt_of(length) for length in LENGTHS]
    assert_equals_peer(runner, model, prompts, atol=ATOL["native"])
    run_every_way(runner, [prompt_of(length) for length in (50, 1, 33)], 4)


@pytest.mark.parametrize(("family", "shape"), [
    ("llama", "llama3"), ("qwen2", "no-groups-tied-linear"),
    ("qwen3", "no-groups-tied-linear-biased"), ("gemma3", "no-groups-linear"),
])  # fmt: skip
def test_family_with_plain_weights_runs_natively_around_its_products(
    family: str, shape: str, tmp_path: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # torch's products are in fp32
    model = tiny_model(family, SHAPES[family][shape])
    runner = make_runner(save(model, tmp_path), precision="native", pages="fp32")
    assert runner.model.attention is None
    assert runner.compute_precision == "fp32"
    assert_equals_peer(runner, model, [prompt_of(length) for length in LENGTHS])
    run_every_way(runner, [prompt_of(length) for length in (50, 1, 33)], 4)


def test_family_names_of_files_and_of_models_are_the_same() -> None:
    assert set(WIRINGS) == set(FAMILIES)


LONG_GEMMA = {
    "max_position_embeddings": 4096,
    "sliding_window": 100,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def test_gemma3_family_skips_key_blocks_before_the_window_and_equals_transformers(
    tmp_path: Path, make_runner: Any
) -> None:
    """At the window's edges and far behind whole key blocks."""
    model = tiny_model("gemma3", LONG_GEMMA)
    runner = make_runner(save(model, tmp_path), num_pages=160)
    block = runner.model.attention.shapes.key_block
    lengths = (99, 100, 101, block + 99, block + 100, 2 * block + 137)
    assert_equals_peer(runner, model, [prompt_of(length) for length in lengths], tokens=3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_family_is_exact_however_it_is_run(
    family: str, precision: str, tmp_path: Path, make_runner: Any
) -> None:
    (shape, *_) = SHAPES[family].values()
    runner = make_runner(save(tiny_model(family, shape), tmp_path), precision=precision)
    prompts = [prompt_of(length) for length in (150, 1, 33, 64, 97)]
    run_every_way(runner, prompts, 6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gemma3_family_is_exact_behind_skipped_key_blocks(
    precision: str, tmp_path: Path, make_runner: Any
) -> None:
    runner = make_runner(
        save(tiny_model("gemma3", LONG_GEMMA), tmp_path), precision=precision, num_pages=700
    )
    block = runner.model.attention.shapes.key_block
    prompts = [prompt_of(length) for length in (20, block + 90, 2 * block + 101)]
    run_every_way(runner, prompts, 4, chunk_sizes=((1 << 20,), (333, 64, 1), (700,)))


@pytest.mark.parametrize("family", list(SHAPES))
def test_trap_41_family_rope_tables_are_not_sized_by_the_original_context(
    family: str, tmp_path: Path, make_runner: Any
) -> None:
    """A table of the original 64 positions would fail or wrap behind them."""
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    changes = {"max_position_embeddings": 256, "rope_parameters": yarn}
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": 300.0}
        changes["rope_parameters"] = {"full_attention": yarn, "sliding_attention": local}
        changes |= {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_model(family, changes)
    runner = make_runner(save(model, tmp_path))
    assert runner.context_tokens == 256
    assert_equals_peer(runner, model, [prompt_of(length) for length in (63, 64, 65, 250)], tokens=5)
