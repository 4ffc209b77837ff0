"""The published policies by small examples, and one cell of the benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.routing.__main__ import (
    FLEETS,
    LOAD_1,
    OURS,
    OURS_LOST,
    paced,
    policies,
    rows_of,
    run_cell,
)
from benchmarks.routing.published import ApproximateRadix, KvEventCost, LeastRequests, SessionHash
from gateway.lab.nodes import ModelNode, NodeSpec, PageNews
from gateway.lab.view import Told, View
from gateway.lab.workload import PAGE_TOKENS, Agents, Request, TraceRow


def view(nodes: int = 3) -> View:
    return View([ModelNode(index, NodeSpec(), {}) for index in range(nodes)], Told())


def request(*names: int, session: int = 0) -> Request:
    keys = [name.to_bytes(16, "little") for name in names]
    tokens = len(names) * PAGE_TOKENS + 1
    return Request(0.0, session, tokens, 10, keys, tokens)


def test_least_requests_counts_and_hashing_does_not() -> None:
    nodes = view()
    nodes.nodes[0].send(request(1), 1)
    assert LeastRequests().choose(nodes, request(1), 0.0)[0] == 1
    places = {SessionHash().choose(nodes, request(1, session=one), 0.0)[0] for one in range(40)}
    assert places == {0, 1, 2}
    assert len({SessionHash().choose(nodes, request(one), 0.0)[0] for one in range(9)}) == 1


def test_a_radix_tree_returns_a_long_match_unless_counts_are_apart() -> None:
    nodes, tree = view(), ApproximateRadix(absolute=2)
    nodes.nodes[0].send(request(9), 1)
    first, tokens = tree.choose(nodes, request(1, 2, 3), 0.0)
    assert (first, tokens) == (1, 3 * PAGE_TOKENS + 1)
    nodes.nodes[1].send(request(1, 2, 3), tokens)
    assert tree.choose(nodes, request(1, 2, 3, 4), 0.0) == (1, PAGE_TOKENS + 1)
    assert tree.choose(nodes, request(1, 5, 6, 7), 0.0)[0] == 2, "a match of a quarter is none"
    assert ApproximateRadix(match=0.1)._find([b"x"]) == (0, None)
    for _ in range(3):
        nodes.nodes[1].send(request(8), 1)
    assert tree.choose(nodes, request(1, 2, 3, 4), 0.0)[0] == 2


def test_a_kv_event_cost_credits_tiers_and_counts_what_decodes() -> None:
    nodes = view()
    prompt = request(1, 2, 3, 4)
    nodes.take(2, PageNews("device", list(prompt.keys), []))
    assert KvEventCost().choose(nodes, prompt, 0.0) == (2, 1)
    for _ in range(2):
        nodes.nodes[2].send(request(*range(10, 14)), 1)  # 8 blocks in use there, for 4 of overlap
    assert KvEventCost().choose(nodes, prompt, 0.0)[0] == 0
    assert KvEventCost(prefill_scale=16.0).choose(nodes, prompt, 0.0)[0] == 2


def test_a_cell_puts_ours_first_and_loses_little_with_events() -> None:
    fleet = FLEETS[0]
    requests = Agents(sessions_per_s=0.45, until_s=150.0).requests()
    found = run_cell(fleet, requests, policies(quick=True))
    ours = found[OURS].goodput
    assert all(ours >= one.goodput for name, one in found.items() if name != OURS_LOST)
    assert found[OURS_LOST].goodput >= ours - 0.02
    rows = rows_of("a cell", found)
    assert rows[0].name == "goodput, a cell"
    assert rows[0].best in rows[0].peers
    assert "radix, best" in rows[0].peers


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda one: one.name)
def test_load_means_requests_a_second_and_node(fleet) -> None:
    rows = [TraceRow(100.0 * at, 600, [at, at + 10**6], 5) for at in range(2000)]
    requests = paced(rows, fleet, 0.5, quick=False)
    span = requests[-1].at - requests[0].at
    rate = 0.5 * LOAD_1 * len(fleet.speeds)
    assert len(requests) / span == pytest.approx(rate, rel=0.05)


def test_without_a_trace_it_says_so(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.routing", "--trace", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=240,
        check=False,
    )
    assert told.returncode == 1
    assert "error: --trace" in told.stderr
