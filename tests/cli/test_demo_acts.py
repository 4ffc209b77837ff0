"""The demo's claims are decided from rows: they hold when they should and fail when they should."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import accumulate

import pytest
from msgspec.structs import replace

from gateway.cli.client import ChatReply
from gateway.demo import scenario
from gateway.demo.acts import (
    Killed,
    Return,
    Turn,
    affinity_act,
    discount_act,
    hit_rate,
    landing_act,
    tiers_act,
)
from gateway.demo.landing import COARSE, FINE, SPLIT, Landing, sparkline
from gateway.demo.returns import stranger
from gateway.demo.stack import StackFailed
from gateway.ledger.requests import RequestLine
from gateway.ledger.usage import UsageLine
from policies.contract.wire import Usage
from policies.pricing import Rates, charge

RATES = Rates(20_000, 4_000, 40_000)


REPLY = ChatReply(
    request_id="r",
    node="n1",
    prefill_node="",
    path="mixed",
    affinity="hit",
    text="yes",
    prompt_tokens=1000,
    cached_tokens=0,
    completion_tokens=8,
    started_at=100.0,
    pieces_at=(100.5,),
    total_s=0.7,
)


def reply(request_id: str, node: str, cached: int) -> ChatReply:
    return dataclasses.replace(REPLY, request_id=request_id, node=node, cached_tokens=cached)


def turns(routing: str, cached: int, node_of: Callable[[int, int], str]) -> list[Turn]:
    made = []
    for turn in range(1, 4):
        for agent in range(4):
            told = reply(f"{routing}-{turn}-{agent}", node_of(agent, turn), cached)
            bill = charge(Usage(1000, cached, 8), RATES).bill
            made.append(Turn(routing, f"a{agent}", turn, told, bill))
    return made


def in_turn(agent: int, turn: int) -> str:
    return f"n{(agent + turn) % 2 + 1}"


def at_home(agent: int, turn: int) -> str:
    return f"n{agent % 2 + 1}"


def test_affinity_holds_with_a_clear_margin_and_agents_at_home() -> None:
    act = affinity_act(turns("rr", 300, in_turn), turns("affinity", 800, at_home))
    assert act.ok
    assert len(act.rows) == 24
    assert set(act.rows[0]) >= {
        *("turn", "node", "affinity", "prompt_tokens", "cached_tokens", "ttft_s"),
        "charge_nano_usd",
    }


@pytest.mark.parametrize(
    ("cached_after", "node_of"),
    [(350, at_home), (800, in_turn), (200, at_home), (800, lambda agent, turn: "n1")],
)
def test_affinity_fails_without_margin_or_home_or_on_one_node(
    cached_after: int, node_of: Callable[[int, int], str]
) -> None:
    assert not affinity_act(turns("rr", 300, in_turn), turns("x", cached_after, node_of)).ok


def test_hit_rate_is_cached_over_prompt() -> None:
    assert hit_rate(turns("rr", 250, at_home)) == 0.25
    assert hit_rate([]) == 0.0


def line(request_id: str, cached: int) -> RequestLine:
    bill = charge(Usage(1000, cached, 8), RATES).bill
    return RequestLine(
        request_id, "default", "m", "ok", "mixed", "n1", None, 1000, cached, 8, bill, RATES
    )


def total(lines: list[RequestLine]) -> UsageLine:
    bill = sum(one.charge_nano_usd for one in lines)
    full = sum(charge(Usage(1000, 0, 8), RATES).full for _ in lines)
    cached = sum(one.cached_tokens for one in lines)
    count = len(lines)
    return UsageLine(
        None, None, None, None, count, 0, 1000 * count, cached, 8 * count, bill, full - bill
    )


def test_discount_balances_to_the_nano_usd() -> None:
    lines = [line("r0", 0), line("r1", 640)]
    told = [reply("r0", "n1", 0), reply("r1", "n1", 640)]
    act = discount_act(lines, total(lines), told)
    assert act.ok
    assert (
        act.rows[-1]["full_nano_usd"] - act.rows[-1]["discount_nano_usd"]
        == (act.rows[-1]["bill_nano_usd"])
    )


def test_discount_fails_by_one_nano_usd_anywhere() -> None:
    lines = [line("r0", 0), line("r1", 640)]
    told = [reply("r0", "n1", 0), reply("r1", "n1", 640)]
    whole = total(lines)
    wrong_row = [lines[0], replace(lines[1], charge_nano_usd=lines[1].charge_nano_usd + 1)]
    assert not discount_act(wrong_row, total(wrong_row), told).ok
    off_by_one = replace(whole, charge_nano_usd=whole.charge_nano_usd + 1)
    assert not discount_act(lines, off_by_one, told).ok
    assert not discount_act(lines, whole, [told[0], reply("r1", "n1", 704)]).ok
    assert not discount_act([], replace(whole, charge_nano_usd=0, saved_nano_usd=0), []).ok


def test_in_turn_agents_never_get_affinity_by_accident() -> None:
    """Nodes in turn over a fixed order of an even number of agents would look like affinity."""
    node_by_agent: dict[int, int] = {}
    stayed = served = 0
    for turn in range(1, scenario.NUM_TURNS + 1):
        for agent in scenario.turn_order(turn):
            stayed += node_by_agent.get(agent) == served % 2
            node_by_agent[agent] = served % 2
            served += 1
    assert stayed == 0


def test_each_turn_resends_the_one_before_it() -> None:
    conversation = scenario.Conversation(2)
    first = list(conversation.ask(1))
    conversation.hear("It parses.")
    second = list(conversation.ask(2))
    assert second[: len(first)] == first
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    others = scenario.Conversation(0).ask(1)
    assert others[0] == first[0]
    assert others[1] != first[1]


def came_back(tier: str, ttft_s: float, tiers: dict[str, int], text: str = "yes") -> Return:
    cached = sum(tiers.values())
    spoke_at = REPLY.started_at + ttft_s
    told = dataclasses.replace(REPLY, text=text, cached_tokens=cached, pieces_at=(spoke_at,))
    return Return(tier, told, tiers)


RETURNS = [
    came_back("cold", 8.0, {}),
    came_back("device", 0.2, {"device": 960}),
    came_back("host", 0.4, {"device": 128, "host": 832}),
    came_back("disk", 0.8, {"disk": 960}),
]
KILLED = Killed("the stream ended in an error", "failed", 0, 7.0)


def test_a_conversation_that_comes_back_holds_with_bars_for_each_tier() -> None:
    act = tiers_act(RETURNS, KILLED)
    assert act.ok
    assert [row["tier"] for row in act.rows] == ["cold", "device", "host", "disk"]
    assert [row["times_quicker"] for row in act.rows] == [1, 40, 20, 10]


@pytest.mark.parametrize(
    ("place", "worse"),
    [
        (0, came_back("cold", 8.0, {"device": 64})),
        (1, came_back("device", 4.0, {"device": 960})),  # no quicker than that
        (2, came_back("host", 0.4, {"device": 832, "host": 128})),  # it never left the device
        (2, came_back("host", 0.4, {"host": 500})),  # the rest was lost
        (3, came_back("disk", 0.8, {"disk": 960}, text="no")),  # another answer
    ],
)
def test_tiers_fail_when_a_return_is_slow_partial_or_different(place: int, worse: Return) -> None:
    returns = [*RETURNS[:place], worse, *RETURNS[place + 1 :]]
    assert not tiers_act(returns, KILLED).ok


@pytest.mark.parametrize(
    "killed", [Killed("", "ok", 100, 7.0), Killed("an error", "failed", 5, 7.0)]
)
def test_tiers_fail_when_the_killed_stream_ended_well_or_was_billed(killed: Killed) -> None:
    assert not tiers_act(RETURNS, killed).ok


def test_the_stranger_is_as_long_and_shares_no_beginning() -> None:
    own, other = scenario.Conversation(0).ask(1), stranger()
    assert [one["role"] for one in other] == [one["role"] for one in own]
    assert len(other[0]["content"]) == len(own[0]["content"])
    assert other[0]["content"][:20] != own[0]["content"][:20]


def streamed(node: str, prefill_node: str, begin: float, gaps_s: list[float]) -> ChatReply:
    return dataclasses.replace(
        REPLY,
        node=node,
        prefill_node=prefill_node,
        path="split" if prefill_node else "mixed",
        pieces_at=tuple(accumulate(gaps_s, initial=begin)),
    )


def landed(way: str, *, wait_s: float, text: str = "yes") -> Landing:
    """A prompt lands at 100 and speaks at 110; a token that does not wait for it takes 1/64 s."""
    quick, prefill = 1 / 64, "n2" if way == SPLIT.name else ""
    waits = [quick] * 32 + [wait_s] * int(9 / wait_s) + [quick] * 64
    beside = streamed("n1", prefill, 99.5, waits)
    elsewhere = beside if prefill else streamed("n2", "", 99.5, [quick] * 600)
    prompt = dataclasses.replace(streamed("n1", prefill, 110.0, [quick] * 7), text=text)
    return Landing(way, (beside, elsewhere, beside, elsewhere), prompt)


LANDED = [
    landed(COARSE.name, wait_s=1.0),
    landed(FINE.name, wait_s=0.5),
    landed(SPLIT.name, wait_s=1 / 64),
]


def test_a_prompt_that_lands_holds_up_the_streams_beside_it_and_no_others() -> None:
    act = landing_act(LANDED)
    assert act.ok, act.claims
    assert [row["ms_per_token_p90"] for row in act.rows] == [1000, 500, 15.62]
    assert [row["streams_beside"] for row in act.rows] == [2, 2, 4]
    assert [row["ttft_s"] for row in act.rows] == [10, 10, 10]


@pytest.mark.parametrize(
    ("place", "worse"),
    [
        (0, landed(COARSE.name, wait_s=1 / 32)),  # hardly held up
        (1, landed(FINE.name, wait_s=1 / 64)),
        (2, landed(SPLIT.name, wait_s=0.5)),  # held up all the same
        (2, landed(SPLIT.name, wait_s=1 / 64, text="no")),  # another answer
        (2, landed("whole on one node", wait_s=1 / 64)),
    ],
)
def test_landing_fails_where_split_is_no_smoother_not_split_or_says_something_else(
    place: int, worse: Landing
) -> None:
    named = dataclasses.replace(worse, way=LANDED[place].way)
    assert not landing_act([*LANDED[:place], named, *LANDED[place + 1 :]]).ok


def test_a_prompt_that_met_no_stream_is_no_measure() -> None:
    alone = dataclasses.replace(LANDED[0], streams=(LANDED[0].streams[1],))
    with pytest.raises(StackFailed, match="no stream"):
        alone.p90_ms()


def test_a_spark_is_higher_for_each_doubling_and_blank_where_nobody_speaks() -> None:
    assert [sparkline(one) for one in LANDED] == [
        "▆" * 25 + "▁" * 3,
        "▅" * 25 + "▁" * 3,
        "▁" * 28,
    ]
    (stream, *_), quiet_from = LANDED[2].streams, 500
    ended = dataclasses.replace(stream, pieces_at=stream.pieces_at[:quiet_from])
    assert sparkline(dataclasses.replace(LANDED[2], streams=(ended,))) == "▁" * 20 + " " * 8
