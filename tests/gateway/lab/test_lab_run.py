"""Runs of many nodes: the same outcome each time, books that end at zero, what policies gain."""

from __future__ import annotations

import ast
import gzip
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

import gateway.lab
from gateway.lab.live_router import LiveRouter
from gateway.lab.nodes import DISK, HOST, NodeSpec, cluster
from gateway.lab.outcomes import summarise
from gateway.lab.run import _Run, play
from gateway.lab.view import Told, View
from gateway.lab.workload import Agents, Request, TraceRow, from_rows, overlay, read_rows
from policies.routing import RoutingParameters

PARAMETERS = RoutingParameters()
AGENTS = Agents(sessions_per_s=0.3, until_s=120.0)
FOUR = [NodeSpec(tiers=(HOST,))] * 4


class InTurn:
    """Node after node, whatever they hold."""

    def __init__(self) -> None:
        self.turn = 0

    def choose(self, view: View, request: Request, now: float) -> tuple[int, int]:
        self.turn += 1
        return self.turn % len(view.nodes), request.prompt_tokens


def test_a_run_is_repeatable_and_serves_everybody() -> None:
    requests = AGENTS.requests()
    one, two = (play(requests, FOUR, LiveRouter(PARAMETERS)) for _ in range(2))
    assert [(work.node, work.ended_at) for work in one.works] == [
        (work.node, work.ended_at) for work in two.works
    ]
    assert len(one.works) == len(requests)
    for work in one.works:
        assert work.arrived_at < work.first_token_at <= work.ended_at
        assert 0 <= work.cached_tokens < work.request.prompt_tokens


@pytest.mark.parametrize("told", [Told(), Told(is_on=False), Told(lost=0.1, late_s=2.0)])
def test_a_gateways_books_end_at_zero(told: Told) -> None:
    run = _Run(FOUR, LiveRouter(PARAMETERS), told, 120.0)
    run.play(AGENTS.requests())
    for view in run._view.nodes:
        assert (view.in_flight, view.in_flight_tokens, view.unanswered_tokens) == (0, 0, 0)
        assert view.backlog.tokens == 0
        assert view.node.held_tokens == 0


def test_the_next_turn_waits_for_the_answer_and_the_pause() -> None:
    outcome = play(AGENTS.requests(), FOUR, InTurn())
    by_request = {work.request: work for work in outcome.works}
    later = [work for work in outcome.works if work.request.follows is not None]
    assert later
    for work in later:
        assert work.request.follows is not None
        before = by_request[work.request.follows]
        assert work.arrived_at == pytest.approx(before.ended_at + work.request.at)


def test_the_live_policy_finds_pages_whatever_events_are_lost() -> None:
    requests = AGENTS.requests()
    outcomes = {
        "turn": play(requests, FOUR, InTurn()),
        "live": play(requests, FOUR, LiveRouter(PARAMETERS)),
        "lossy": play(requests, FOUR, LiveRouter(PARAMETERS), Told(lost=0.02)),
    }
    told = {name: summarise(one.works, one.nodes) for name, one in outcomes.items()}
    assert told["live"].hit > told["turn"].hit + 0.1
    assert told["live"].goodput >= told["turn"].goodput
    assert told["live"].ttft_p90_s < told["turn"].ttft_p90_s
    assert told["lossy"].goodput >= told["live"].goodput - 0.02


def test_what_shares_nothing_is_spread_evenly() -> None:
    random = Random(5)
    requests = [
        Request(0.25 * number, number, random.randrange(500, 12_000), 100, [], 1)
        for number in range(900)
    ]
    outcome = play(requests, FOUR, LiveRouter(PARAMETERS))
    told = summarise(outcome.works, outcome.nodes)
    assert told.uneven_work < 1.1
    assert told.uneven_stay < 1.1


def test_only_a_signal_finds_a_cache_that_tells_nothing() -> None:
    hits = {}
    for share in (0.0, 1.0):
        agents = replace(AGENTS, signal_share=share)
        router = LiveRouter(PARAMETERS, sees_pages=False)
        outcome = play(agents.requests(), FOUR, router, Told(is_on=False))
        hits[share] = summarise(outcome.works, outcome.nodes).hit
    assert hits[1.0] > hits[0.0] + 0.05


def test_a_slow_node_gets_its_share_and_keeps_nobody_waiting() -> None:
    specs = [NodeSpec(speed=speed, tiers=(HOST, DISK)) for speed in (0.5, 1.5, 0.5, 1.5)]
    requests = AGENTS.requests()
    told = {
        router: summarise(outcome.works, outcome.nodes)
        for router in (InTurn(), LiveRouter(PARAMETERS))
        for outcome in [play(requests, specs, router)]
    }
    turn, live = told.values()
    assert live.ttft_p90_s < turn.ttft_p90_s / 2


def test_what_one_node_put_into_the_store_all_others_fetch() -> None:
    specs = [NodeSpec(device_tokens=60_000.0, tiers=(cluster(4),))] * 4
    outcome = play(AGENTS.requests(), specs, InTurn())
    alone = play(AGENTS.requests(), [NodeSpec(device_tokens=60_000.0)] * 4, InTurn())
    stored = summarise(outcome.works, outcome.nodes).hit
    assert stored > summarise(alone.works, alone.nodes).hit + 0.3


ROWS = [
    TraceRow(0.0, 1100, [1, 2, 3], 5),
    TraceRow(1000.0, 1600, [1, 2, 4, 5], 0),
    TraceRow(3000.0, 600, [9, 10], 7),
]


def test_rows_become_requests_with_an_infinite_caches_budget(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress(b"\n".join(msgspec.json.encode(row) for row in ROWS)))
    requests = from_rows(read_rows(file), stretch=2.0)
    assert [one.at for one in requests] == [0.0, 2.0, 6.0]
    assert [len(one.keys) for one in requests] == [2, 3, 1]  # full pages only
    assert [one.new_tokens for one in requests] == [1100, 1600 - 2 * 512, 600]
    assert [one.session for one in requests] == [0, 0, 2]
    assert [one.output_tokens for one in requests] == [5, 1, 7]


def test_a_prompt_of_whole_pages_still_computes_its_last_token() -> None:
    (one,) = from_rows([TraceRow(0.0, 1024, [1, 2])])
    assert (len(one.keys), one.max_hit_pages) == (2, 1)


def test_overlaid_copies_share_nothing() -> None:
    rows = overlay(ROWS, 4)
    assert len(rows) == 12
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)
    assert len({one for row in rows for one in row.hash_ids}) == 4 * 7
    fresh = [one for one in from_rows(rows) if one.new_tokens == one.prompt_tokens]
    assert len(fresh) >= 8


def test_the_lab_imports_policies_and_itself_alone() -> None:
    """It decides nothing by itself, and runs anywhere."""
    for file in Path(gateway.lab.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                top = node.module.split(".")[0]
                ours = top in ("gateway", "engine", "node_agent")
                assert not ours or node.module.startswith("gateway.lab"), (file, node.module)
                assert top not in ("asyncio", "time", "torch", "structlog"), (file, node.module)
