"""The rows of the engine's benchmark: names, shapes and arithmetic, with scripted engines."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.beside import JsonRow
from benchmarks.engine import agents, decode, memory, prompts, step_cost
from benchmarks.engine.bench import Bench
from benchmarks.engine.floors import Weights, floor_s
from benchmarks.engine.machine import Machine
from benchmarks.peers.driven import DrivenEngine
from engine.execute.weights import ModelConfig

SHAPE = {"name", "ours", "peer", "peer_name", "unit", "ratio", "detail"}
FACTS = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=4,
    ffn_size=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    context_tokens=4096,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-5,
    tied_head=True,
    bos_token_id=None,
    eos_token_ids=(),
    query_scale=1.0,
    windows=(None,) * 3,
    local_rope_theta=1e4,
    biases=frozenset(),
)
MACHINE = Machine(bytes_per_s=1e9, int8_per_s=2e9, float_per_s=1e9)
WEIGHTS = Weights(FACTS, 1000, layer_parameters=10, head_parameters=4, is_quantised=True)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[float], DrivenEngine]]:
    script = Path(__file__).parent / "scripted_engine.py"
    with ExitStack() as stack:

        def start(seconds: float) -> DrivenEngine:
            command = [sys.executable, str(script), str(seconds)]
            engine = DrivenEngine(command, {}, tmp_path / "log", limit_s=60)
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture
def bench(scripted) -> Bench:
    made = Bench(True, "", 2, MACHINE, WEIGHTS)
    made.ours = {"exact": scripted(0.002), "fast": scripted(0.001)}
    made.peers = {"near": scripted(0.004), "far": scripted(0.1)}
    return made


def rows_of(bench: Bench) -> dict[str, JsonRow]:
    rows = [row for result in bench.results for row in result.rows()]
    assert all(set(row) == SHAPE for row in rows)
    return {str(row["name"]): row for row in rows}


def names(*rows: str) -> set[str]:
    return {
        f"{row}{suffix}{peer}" for row in rows for suffix in ("", "_fast") for peer in ("", "/far")
    }


def test_decoding_is_told_for_each_batch_and_context_beside_the_best_peer(bench) -> None:
    decode.add_rows(bench)
    rows = rows_of(bench)
    measured = names("decode_b1", "decode_b1_2048", "decode_b8", "decode_b32")
    measured |= {"decode_b1_busy", "decode_b1_busy_fast"}
    cpu = {name for name in rows if name.startswith("cpu_per_token")}
    assert set(rows) - cpu == measured
    assert {name.split("/")[0] for name in cpu} == {
        f"cpu_per_token_{batch}{suffix}" for batch in ("b1", "b32") for suffix in ("", "_fast")
    }
    b8 = rows["decode_b8"]
    assert (b8["ours"], b8["peer"], b8["peer_name"]) == (4000, 2000, "near")
    assert b8["ratio"] == pytest.approx(2.0)
    assert rows["decode_b8_fast"]["ratio"] == pytest.approx(4.0)
    assert rows["decode_b8/far"]["ratio"] == pytest.approx(50.0)
    assert "one round: far" in str(b8["detail"]), "a hopeless peer is asked once"
    assert rows["cpu_per_token_b1"]["unit"] == "CPU ms/token"
    assert "ours fast keeps 100%, near 100%" in str(rows["decode_b1_busy"]["detail"])


def test_prompts_are_told_as_rates_and_first_tokens_as_times(bench) -> None:
    prompts.add_rows(bench)
    rows = rows_of(bench)
    beside_peers = ("prefill_512", "prefill_2048", "ttft_cold_2000", "ttft_warm_2000")
    alone = {f"{row}{suffix}" for row in ("warm_over_cold", "fork_n8") for suffix in ("", "_fast")}
    cpu = {name for name in rows if name.startswith("cpu_per_token_prefill_2048")}
    assert len(cpu) == 4
    assert set(rows) - cpu == names(*beside_peers) | alone
    assert rows["prefill_512"]["ours"] == pytest.approx(500)
    assert rows["ttft_cold_2000"]["ours"] == pytest.approx(4.0)
    assert rows["ttft_warm_2000"]["ratio"] == pytest.approx(2.0)
    assert rows["warm_over_cold"]["ours"] == pytest.approx(2000)
    assert rows["fork_n8"]["ratio"] == pytest.approx(8 * 500 / 508)


def test_agents_count_every_token_that_is_sent_and_got(bench) -> None:
    bench.peers["transformers fp32"] = bench.peers["near"]
    agents.add_rows(bench)
    rows = rows_of(bench)
    assert set(rows) == names("agents_32")
    assert rows["agents_32"]["ours"] == pytest.approx(500)
    assert set(bench.absent) == {"agents_32/transformers fp32"}


def test_memory_is_of_each_process_and_its_pages_are_told(bench, tmp_path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(3_000_000))
    memory.add_row(bench, model)
    row = rows_of(bench)["memory_resident_fast"]
    assert 1 < float(str(row["ours"])) < 200
    assert str(row["detail"]).startswith("weights file 3 MB, its pages 2, rest ")
    assert row["unit"] == "MB"


def test_a_steps_cost_outside_kernels_of_overlap_mixing_and_sharing(bench) -> None:
    step_cost.add_rows(bench)
    rows = rows_of(bench)
    own = ("step_overhead_b1", "overlap_b1", "overlap_b8", "mixed_step", "shared_prefix_step")
    assert set(rows) == {f"{row}{suffix}" for row in own for suffix in ("", "_fast")}
    assert rows["overlap_b8"]["ratio"] == pytest.approx(1.5)
    overhead, mixed = rows["step_overhead_b1"], rows["mixed_step"]
    assert (overhead["ours"], overhead["ratio"]) == (pytest.approx(0.05), pytest.approx(2.0))
    assert (mixed["ours"], mixed["peer_name"]) == (pytest.approx(0.006), "its parts alone")
    assert mixed["ratio"] == pytest.approx(1.0)
    assert rows["shared_prefix_step"]["ratio"] == pytest.approx(1.5)


def test_without_compiled_kernels_their_share_is_absent_with_the_remedy(bench, scripted) -> None:
    bench.only, bench.ours = "step_overhead_b1", {"exact": scripted(0)}
    step_cost.add_rows(bench)
    assert bench.absent == {"step_overhead_b1": "no compiled kernels serve here: g++ brings them"}
    assert bench.results == []


def test_only_what_was_asked_for_is_measured(bench) -> None:
    bench.only = "decode_b8_fast,agents"
    assert bench.wants("decode_b8")
    assert not bench.wants("decode_b32")
    bench.only = "cpu_per_token_b32"
    decode.add_rows(bench)
    assert {name.split("/")[0] for name in rows_of(bench)} == {
        "cpu_per_token_b32",
        "cpu_per_token_b32_fast",
    }


def test_a_peer_that_is_lost_is_named_and_the_others_go_on(bench, scripted) -> None:
    bench.peers["dead"] = scripted(0.001)
    os.kill(bench.peers["dead"]._process.pid, signal.SIGKILL)
    decode.add_rows(bench)
    assert "dead" in bench.absent
    assert rows_of(bench)["decode_b32"]["peer_name"] == "near"


def test_a_floor_is_bytes_or_operations_whichever_takes_longer() -> None:
    facts = WEIGHTS.facts
    width, kv_width = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    quick = Machine(bytes_per_s=1e9, int8_per_s=1e15, float_per_s=1e15)
    one = floor_s(WEIGHTS, quick, "exact", batch=1, new=1, context=64)
    assert one == pytest.approx((1000 + facts.num_layers * 64 * kv_width * 4) / 1e9)
    seen = sum(range(1, 65))
    attention = 4 * facts.num_layers * seen * width / 1e9
    for compute, planes in (("exact", 2), ("fast", 1)):
        linear = 2 * (64 * 10 + 4) * planes / 2e9
        floor = floor_s(WEIGHTS, MACHINE, compute, batch=1, new=64, context=64)
        assert floor == pytest.approx(linear + attention)
    shared = floor_s(WEIGHTS, quick, "exact", batch=2, new=1, context=64, shared=60)
    assert shared == pytest.approx((1000 + facts.num_layers * 68 * kv_width * 4) / 1e9)


def test_a_neighbour_can_only_lower_what_a_machine_seems_to_do() -> None:
    disturbed = Machine(bytes_per_s=5e8, int8_per_s=4e9, float_per_s=1e9)
    assert MACHINE.or_better(disturbed) == Machine(1e9, 4e9, 1e9)
