"""Cut, flipped and lying headers: always a CheckpointError or a sane checkpoint, never a crash."""

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.execute.weights import Checkpoint, CheckpointError, open_checkpoint
from engine.execute.weights.families import tensor_shapes

LIMIT_BYTES = 64 << 20
MANY = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


NAMES = {
    "model.embed_tokens.weight": ("token_embd.weight", (40, 32)),
    "model.norm.weight": ("output_norm.weight", (32,)),
    "input_layernorm": ("blk.0.attn_norm.weight", (32,)),
    "q": ("blk.0.attn_q.weight", (32, 32)),
    "k": ("blk.0.attn_k.weight", (16, 32)),
    "v": ("blk.0.attn_v.weight", (16, 32)),
    "o": ("blk.0.attn_output.weight", (32, 32)),
    "post": ("blk.0.ffn_norm.weight", (32,)),
    "gate": ("blk.0.ffn_gate.weight", (64, 32)),
    "up": ("blk.0.ffn_up.weight", (64, 32)),
    "down": ("blk.0.ffn_down.weight", (32, 64)),
}


def small_gguf() -> tuple[bytes, int]:
    """A one-layer Q8_0 Llama, and how long its header is."""
    numbers = {"block_count": 1, "context_length": 128, "embedding_length": 32,
               "feed_forward_length": 64, "attention.head_count": 4,
               "attention.head_count_kv": 2, "rope.dimension_count": 8}  # fmt: skip
    entries = [entry("general.architecture", 8, text("llama"))]
    entries += [
        entry(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in numbers.items()
    ]
    entries.append(entry("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)))
    tokens = b"".join(text(f"t{at}") for at in range(40))
    entries.append(entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 40) + tokens))
    scores = struct.pack("<40f", *range(40))
    entries.append(entry("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 40) + scores))
    infos, data = b"", b""
    for name, shape in NAMES.values():
        blocks = 1
        for extent in shape:
            blocks *= extent
        payload = bytes(34) * (blocks // 32) if len(shape) > 1 else bytes(4 * blocks)
        infos += text(name) + struct.pack("<I", len(shape))
        infos += b"".join(struct.pack("<Q", extent) for extent in reversed(shape))
        infos += struct.pack("<IQ", 8 if len(shape) > 1 else 0, len(data))
        data += payload + bytes(-len(payload) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(NAMES), len(entries)) + b"".join(entries) + infos
    padding = bytes(-len(header) % 32)
    return header + padding + data, len(header)


GGUF, HEADER = small_gguf()


def try_open(path: Path) -> None:
    """Opens; a refusal has four parts, an acceptance has shapes that fit the file."""
    tracemalloc.start()
    try:
        opened = opened_or_refused(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < LIMIT_BYTES
    if isinstance(opened, CheckpointError):
        assert opened.field
        assert opened.found
        assert opened.allowed
        return
    for name in tensor_shapes(opened.config):
        assert opened.tensors[name].num_bytes <= len(GGUF)


def opened_or_refused(path: Path) -> Checkpoint | CheckpointError:
    try:
        return open_checkpoint(path)
    except CheckpointError as error:
        return error


def test_the_untouched_file_opens(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(GGUF)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.num_layers == 1
    assert checkpoint.metadata["tokenizer.ggml.scores"] == [float(at) for at in range(40)]
    assert checkpoint.read("model.layers.0.mlp.up_proj.weight").shape == (64, 32)


@MANY
@given(length=st.integers(0, len(GGUF) - 1))
def test_a_truncated_gguf_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(GGUF[:length])
    # The last tensor ends with padding that may be cut without harm.
    if length >= len(GGUF) - 31:
        try_open(path)
    else:
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


@MANY
@given(flips=st.lists(st.integers(0, HEADER * 8 - 1), min_size=1, max_size=8))
def test_flipped_bits_in_a_gguf_header_never_crash(tmp_path: Path, flips: list[int]) -> None:
    damaged = bytearray(GGUF)
    for bit in flips:
        damaged[bit // 8] ^= 1 << (bit % 8)
    path = tmp_path / "flipped.gguf"
    path.write_bytes(damaged)
    try_open(path)


@MANY
@given(at=st.integers(0, HEADER - 8), value=st.sampled_from([2**64 - 1, 2**63, 2**40, 2**32 - 1]))
def test_absurd_numbers_in_a_gguf_header_allocate_nothing(
    tmp_path: Path, at: int, value: int
) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(GGUF[:at] + struct.pack("<Q", value) + GGUF[at + 8 :])
    try_open(path)


def test_an_absurd_context_costs_no_more_than_the_pool(
    tmp_path: Path, make_runner: Any, tiny_folder: Any
) -> None:
    """2^26 positions in rotary tables would be 6 GB of this tiny model."""
    folder = tiny_folder(max_position_embeddings=1 << 26)
    runner = make_runner(folder, num_pages=8, page_size=16)
    assert runner.context_tokens == 1 << 26
    positions = [rotary._cos.shape[0] for rotary in runner.model.rotary.values()]
    assert positions == [128]


@settings(max_examples=60, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(data=st.binary(max_size=300))
def test_noise_is_no_gguf(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


def test_a_real_file_cut_short_is_refused(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with model_path.open("rb") as file:
        path.write_bytes(file.read(8 << 20))
    with pytest.raises(CheckpointError, match="inside the file"):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def folder(tiny_folder: Any) -> Path:
    path: Path = tiny_folder()
    return path


@MANY
@given(flips=st.lists(st.integers(0, 8 * 2400), min_size=1, max_size=6))
def test_flipped_bits_in_a_safetensors_header_never_crash(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, flips: list[int]
) -> None:
    copy = tmp_path_factory.getbasetemp() / "flipped-folder"
    copy.mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", copy)
    damaged = bytearray((folder / "model.safetensors").read_bytes())
    for bit in flips:
        damaged[bit // 8] ^= 1 << (bit % 8)
    (copy / "model.safetensors").write_bytes(damaged)
    opened = opened_or_refused(copy)
    assert isinstance(opened, CheckpointError) or opened.config.num_layers == 2


def header_only(tmp_path: Path, folder: Path, entries: object) -> Path:
    shutil.copy(folder / "config.json", tmp_path)
    head = json.dumps(entries).encode()
    data = struct.pack("<Q", len(head)) + head + bytes(64)
    (tmp_path / "model.safetensors").write_bytes(data)
    return tmp_path


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "I8", "shape": [64], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [8], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [-16], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": "16", "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [16], "data_offsets": [64, 0]},
        {"dtype": ["F32"], "shape": [16], "data_offsets": [0, 64]},
        [1, 2],
        None,
    ],
)
def test_a_lying_safetensors_entry_is_refused(tmp_path: Path, folder: Path, wrong: object) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(header_only(tmp_path, folder, {"model.norm.weight": wrong}))


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, folder: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CheckpointError, match="fits in 10 bytes"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
