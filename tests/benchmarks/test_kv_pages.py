"""Quantised pages are measured by what they do: runs that fit or do not, and known divergences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.beside import Beside, Figure
from benchmarks.kv_pages import __main__ as command
from benchmarks.kv_pages import divergence, turns
from engine.config import ModelSpec
from engine.execute.runner import ModelRunner, RunnerConfig, load_runner
from engine.store.page_codec import QUANTISED


def runner_of(folder: Path, **config: object) -> ModelRunner:
    spec = ModelSpec(name="m", identity="m", path=str(folder), format="safetensors")
    return load_runner(spec, RunnerConfig(threads=1, page_size=64, **config))  # type: ignore[arg-type]


def test_scales_are_counted_in_what_fits(tiny_llama: Path) -> None:
    layout = turns.layout_of(tiny_llama)
    rows = {row.name: row for row in command.fit_rows(layout)}
    for precision in QUANTISED:
        pages = 10**9 // replace(layout, precision=precision).page_bytes
        assert rows[f"fit/{precision}"].ours == pages * 64
        assert rows[f"fit/{precision}"].peers["bf16"].ratio == pytest.approx(32 / 18, rel=1e-3)


def test_turns_hit_what_fits_and_compute_again_what_does_not(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "HISTORY", 200)
    monkeypatch.setattr(turns, "ANSWER", 4)
    roomy, tight = runner_of(tiny_llama, num_pages=40), runner_of(tiny_llama, num_pages=7)
    fits = turns.converse(roomy, 3, 3, seed=0)
    assert fits.tokens_per_s > 0
    assert fits.cached > 0.6
    assert fits.preemptions == 0
    assert turns.converse(tight, 3, 3, seed=0).cached < fits.cached / 2


def test_the_crossover_is_where_it_stays_quicker() -> None:
    row = turns._crossover("int8", {1: 0.9, 4: 1.1, 8: 0.99, 12: 2.0})
    assert (row.ours, row.peers) == (2.0, {})
    assert row.detail.startswith("quicker from 12 conversations on; by conversations 1: 0.90, ")
    assert "from 1 conv" in turns._crossover("int8", {1: 1.2, 2: 1.1}).detail
    assert turns._crossover("int8", {1: 1.2, 2: 0.8}).detail.startswith("not quicker at last")


def test_rows_tell_ours_beside_bf16() -> None:
    found = {
        "int8": [turns.Run(30, 0.9, 0), turns.Run(50, 0.8, 0), turns.Run(40, 0.9, 1)],
        "bf16": [turns.Run(10, 0.1, 3), turns.Run(25, 0.1, 2), turns.Run(20, 0.2, 4)],
    }
    row = turns._row(8, "int8", found, 165_000_000)
    assert isinstance(row, Beside)
    assert (row.name, row.ours, row.peers) == ("turns_8/int8", 40, {"bf16": Figure(20, 2.0)})
    assert "int8: 90% of prompts cached, 1 preemptions; bf16: 10%" in row.detail


def test_coarser_pages_diverge_more_and_equal_ones_not_at_all(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "COMPARED", ("fp32", "bf16", "int8", "fp8"))
    runner = runner_of(tiny_llama, num_pages=4, kv_dtype="fp32")
    pieces = [[(at * 7 + start) % 160 for at in range(200)] for start in (1, 5)]
    found = divergence.compare(runner, pieces)
    assert found["fp32"].nats == pytest.approx(0, abs=1e-6)
    assert found["fp32"].same_best == 400
    assert 0 < found["bf16"].nats < found["int8"].nats < found["fp8"].nats < 4
