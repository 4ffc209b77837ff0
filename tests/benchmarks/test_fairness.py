"""A flood beside a modest tenant: who asks what, how it is told, and a gateway without a queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.fairness import load
from benchmarks.fairness.__main__ import OPEN, OWN, compare
from benchmarks.fairness.load import Flood, Played, arrivals, play
from benchmarks.fairness.open_gateway import EVERYTHING
from gateway.cli.client import ChatReply, Server
from policies import queue
from policies.backlog import Backlog

MODEST, GREEDY = Server("http://modest", "m"), Server("http://greedy", "g")


def test_a_flood_is_there_at_once_and_no_prompt_comes_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_there = threading.Barrier(3)
    asked: list[tuple[Server, str]] = []

    def stream_chat(
        server: Server, body: Mapping[str, Any], headers: object, timeout_s: float
    ) -> ChatReply:
        text = body["messages"][0]["content"]
        asked.append((server, text))
        if server is GREEDY and text.split()[2] == "0":
            all_there.wait(20)  # one after the other they would wait for ever
        at, tokens = time.monotonic(), len(text.split())
        return ChatReply("r", "n1", "", "mixed", "new", text, tokens, 0, 4, at, (at,), 0.0)

    monkeypatch.setattr(load, "stream_chat", stream_chat)
    monkeypatch.setattr(load, "WARM_S", 0.0)
    monkeypatch.setattr(load, "EVERY_S", 0.02)
    flood = Flood(num_prompts=3, tokens=300)
    played = play("m", MODEST, seconds=0.1, seed=1, flood=flood, greedy=GREEDY)
    modest = [text for server, text in asked if server is MODEST]
    assert len({text for _, text in asked}) == len(asked)
    assert sorted(modest) == sorted(played.texts)
    assert len(modest) == len(list(arrivals(1, 0.1)))
    alone = play("m", MODEST, seconds=0.1, seed=1, flood=None, greedy=GREEDY)
    assert alone.texts == played.texts


def test_waits_are_told_beside_the_worse_ways_and_beside_nobody() -> None:
    def played(ttft_s: float, greedy: float = 0.0) -> Played:
        return Played([ttft_s] * 10, ["yes"] * 10, greedy)

    others = {OPEN: played(8.0, 900.0), OWN: played(6.0, 800.0)}
    rows = {row.name: row for row in compare("long", played(0.5), played(2.0, 810.0), others)}
    assert {name: figure.ratio for name, figure in rows["long_ttft_p90"].peers.items()} == {
        OPEN: 4.0,
        OWN: 3.0,
    }
    assert rows["long_ttft_p50_alone"].peers["alone"].ratio == 0.25
    assert rows["long_greedy"].peers[OPEN].ratio == pytest.approx(0.9)


def test_without_a_queue_an_engine_is_given_all_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits() -> bool:
        backlog = Backlog()
        backlog.open(20_000)
        return queue.Window(backlog, budget_tokens=512).fits(1500, 0.0, 1000.0)

    assert not fits()
    monkeypatch.setattr(queue, "BUDGETS", EVERYTHING)
    assert fits()
