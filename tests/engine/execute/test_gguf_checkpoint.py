"""GGUF: facts, values as llama.cpp's own package unpacks them, rows in Hugging Face's order."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from engine.execute.weights import open_checkpoint
from engine.execute.weights.ggml_blocks import FORMATS, unpack
from engine.execute.weights.gguf import hf_name

HALVES = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "q4_1": (0, 2), "q5_1": (0, 2)}


@pytest.mark.parametrize("kind", [kind for kind, form in FORMATS.items() if form.weights > 1])
def test_every_block_format_unpacks_as_the_gguf_package_does(kind: int) -> None:
    form = FORMATS[kind]
    random = np.random.default_rng(kind)
    blocks = random.integers(0, 256, (37, form.num_bytes), dtype=np.uint8)
    for at in HALVES.get(form.name, (0,)):
        halves = random.standard_normal(37).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(37, 2)
    expected = dequantize(blocks, GGMLQuantizationType(kind)).reshape(-1)
    found = unpack(form, torch.from_numpy(blocks.reshape(-1)))
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(0, torch.float32), (1, torch.float16), (30, torch.bfloat16)]
)
def test_plain_formats_keep_their_values(kind: int, dtype: torch.dtype) -> None:
    values = torch.randn(77).to(dtype)
    assert torch.equal(unpack(FORMATS[kind], values.view(torch.uint8)), values.float())


def test_real_model_facts(model_path: Path) -> None:
    checkpoint = open_checkpoint(model_path)
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.ffn_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.context_tokens, config.tied_head) == (49152, 8192, True)
    assert (config.rope_theta, config.rope_scaling) == (100_000.0, None)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.norm_eps == pytest.approx(1e-5)
    assert checkpoint.precision == "q4_1"
    assert len(checkpoint.tensors) == 272
    assert checkpoint.weights_digest == open_checkpoint(model_path).weights_digest


def test_real_model_weights_equal_the_gguf_package_unpermuted(model_path: Path) -> None:
    """transformers un-permutes q and k alike, so its weights are these bit for bit."""
    checkpoint = open_checkpoint(model_path)
    wanted = {"token_embd.weight", "output_norm.weight"} | {
        f"blk.29.{part}.weight" for part in ("attn_q", "attn_k", "attn_v", "ffn_down", "ffn_norm")
    }
    compared = 0
    for tensor in GGUFReader(model_path).tensors:
        if tensor.name not in wanted:
            continue
        expected = dequantize(tensor.data, tensor.tensor_type)
        heads = {"blk.29.attn_q.weight": 9, "blk.29.attn_k.weight": 3}.get(tensor.name)
        if heads is not None:
            pairs = expected.reshape(heads, 32, 2, 576)
            expected = pairs.swapaxes(1, 2).reshape(expected.shape)
        assert np.array_equal(checkpoint.read(hf_name(tensor.name)).numpy(), expected)
        compared += 1
    assert compared == len(wanted)


def test_blocks_are_the_files_and_say_which_row_is_which(model_path: Path) -> None:
    checkpoint = open_checkpoint(model_path)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        name = f"model.layers.3.{part}.weight"
        blocks = checkpoint.read_blocks(name)
        assert blocks is not None
        assert (blocks.order is not None) == (part == "self_attn.q_proj")
        rows = unpack(FORMATS[blocks.kind], blocks.data).view(checkpoint.tensors[name].shape)
        ordered = rows if blocks.order is None else rows[blocks.order]
        assert torch.equal(ordered, checkpoint.read(name))
    assert checkpoint.read_blocks("model.norm.weight") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_model_weights_equal_transformers_own_gguf_loader(model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(
        str(model_path.parent), gguf_file=model_path.name, dtype=torch.float32
    )
    checkpoint = open_checkpoint(model_path)
    state = peer.state_dict()
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.read(name), state[name]), name


def test_header_is_read_without_torch(model_path: Path) -> None:
    program = (
        "import sys; from engine.execute.weights import open_checkpoint\n"
        "assert open_checkpoint(sys.argv[1]).config.num_layers == 30\n"
        "assert not {'torch', 'numpy', 'gguf'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
