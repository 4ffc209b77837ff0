"""Routing's three stages, one table each, and what must not move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing import (
    Candidate,
    Reach,
    RoutingParameters,
    Scored,
    Wanted,
    affinity,
    filter_candidates,
    parse_parameters,
    pick,
    pick_in_turn,
    rendezvous,
    retry_after_s,
    score,
)

PARAMETERS = RoutingParameters()


def node(name: str, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "engine": 0,
        "state": "ready",
        "engine_ready": True,
        "tried": False,
        "in_flight": 0,
        "max_in_flight": 256,
        "overloaded": False,
        "backlog_tokens": 0,
        "tokens_per_s": 1000.0,
    }
    return Candidate(node_id=name, **(fields | changes))


def wanted(tokens: int = 1000, key: bytes = b"key", home: str | None = None) -> Wanted:
    return Wanted(tokens, key, home, has_affinity_key=home is not None)


def choose(
    candidates: list[Candidate], want: Wanted, hits: dict[str, int] | None = None
) -> tuple[str, str]:
    scored = score(
        candidates, want, lambda one: [Reach((hits or {}).get(one.node_id, 0))], PARAMETERS
    )
    decision = pick(scored, want, [], PARAMETERS)
    return decision.chosen.candidate.node_id, decision.reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"state": "suspect"}, "state"),
        ({"state": "draining"}, "state"),
        ({"state": "joining"}, "state"),
        ({"state": "lost"}, "state"),
        ({"engine_ready": False}, "engine"),
        ({"in_flight": 256}, "full"),
        ({"in_flight": 255}, None),
        ({"overloaded": True}, "overloaded"),
        ({"tried": True}, "tried"),
    ],
)
def test_filter(change: dict[str, Any], why: str | None) -> None:
    kept, rejected = filter_candidates([node("a", **change), node("b")])
    assert [one.node_id for one in kept] == (["a", "b"] if why is None else ["b"])
    assert rejected == ([] if why is None else [("a", why)])


def test_tried_nodes_are_better_than_none() -> None:
    kept, _ = filter_candidates([node("a", tried=True), node("b", state="lost")])
    assert [one.node_id for one in kept] == ["a"]


@pytest.mark.parametrize(
    ("candidate", "hit", "cost_s"),
    [
        (node("a"), 0, 4.0),  # 4 × 1000 own tokens at 1000 tokens/s
        (node("a"), 960, 0.16),
        (node("a"), 1000, 0.004),  # never nothing: the last token is computed
        (node("a", backlog_tokens=500), 960, 0.66),
        (node("a", tokens_per_s=4000.0), 0, 1.0),
        (node("a", tokens_per_s=0.0), 0, 2.0),  # the fallback rate
    ],
)
def test_score_is_backlog_and_four_times_own_work_in_seconds(
    candidate: Candidate, hit: int, cost_s: float
) -> None:
    (scored,) = score([candidate], wanted(), lambda one: [Reach(hit)], PARAMETERS)
    assert scored.cost_s == pytest.approx(cost_s)


def test_what_others_wait_costs_the_same_on_a_slow_node_as_on_a_fast_one() -> None:
    """Priced at each node's own rate, a slow node was left idle until the fast ones were full."""
    nodes = [node("a", tokens_per_s=1000.0), node("b", tokens_per_s=3000.0)]
    slow, fast = score(nodes, wanted(), lambda one: [], PARAMETERS)
    assert slow.own_s == pytest.approx(1000 / 1000 + 3 * 1000 / 2000)
    assert fast.own_s == pytest.approx(1000 / 3000 + 3 * 1000 / 2000)


def test_a_home_that_tells_of_no_pages_is_believed_to_hold_the_last_prompt() -> None:
    nodes = [node("a"), node("b", tells_pages=False, backlog_tokens=2000)]
    for home, hit in (("b", 900), ("a", 0), (None, 0)):
        want = Wanted(1000, b"key", home, has_affinity_key=True, home_tokens=900)
        scored = score(nodes, want, lambda one: [], PARAMETERS)
        assert max(one.hit_tokens for one in scored) == hit
    assert choose(nodes, Wanted(1000, b"key", "b", True, 900))[0] == "b"


@pytest.mark.parametrize(
    ("share", "pressure_s"), [(0.0, 0.0), (0.5, 0.5), (0.9, 4.5), (1.0, 49.5), (1.5, 49.5)]
)
def test_used_pages_press_the_more_the_fewer_are_left(share: float, pressure_s: float) -> None:
    (scored,) = score([node("a", kv_share=share)], wanted(), lambda one: [], PARAMETERS)
    assert scored.pressure_s == pytest.approx(pressure_s)
    assert scored.cost_s == pytest.approx(4.0 + pressure_s)


def test_a_full_pool_sends_a_prompt_elsewhere_before_it_preempts_others() -> None:
    nodes = [node("a", kv_share=0.95), node("b", backlog_tokens=5000)]
    assert choose(nodes, wanted())[0] == "b"


@pytest.mark.parametrize(
    ("reaches", "hit", "fetch_s"),
    [
        ([Reach(64)], 64, 0.0),
        ([Reach(64), Reach(640, 1e-5)], 640, 576e-5),
        ([Reach(128, 1e-6), Reach(512, 1e-5)], 512, 128e-6 + 384e-5),
        ([Reach(64), Reach(640, 1e-3)], 64, 0.0),  # as slow as computing it at 1000 tokens/s
        ([Reach(64), Reach(640, 1.0), Reach(960, 1e-6)], 64, 0.0),  # nothing behind what is missing
        ([Reach(640, 1e-5), Reach(320, 1e-6)], 640, 640e-5),  # a slower tier that reaches less far
        ([], 0, 0.0),
    ],
)
def test_slower_tiers_cost_their_fetch_instead_of_prefill(
    reaches: list[Reach], hit: int, fetch_s: float
) -> None:
    (scored,) = score([node("a")], wanted(), lambda one: reaches, PARAMETERS)
    assert (scored.hit_tokens, scored.uncached_tokens) == (hit, 1000 - hit)
    assert scored.fetch_s == pytest.approx(fetch_s)
    assert scored.cost_s == pytest.approx(4 * (1000 - hit) / 1000 + fetch_s)


def test_the_faster_tier_wins_among_equal_prefixes() -> None:
    reaches = {"a": [Reach(960, 4e-4)], "b": [Reach(960, 1e-6)], "c": [Reach(64)]}
    nodes = [node(name) for name in "abc"]
    scored = score(nodes, wanted(), lambda one: reaches[one.node_id], PARAMETERS)
    assert pick(scored, wanted(), [], PARAMETERS).chosen.candidate.node_id == "b"


@given(
    st.lists(st.builds(Reach, st.integers(0, 1000), st.floats(0, 0.01)), max_size=4),
    st.sampled_from([50.0, 1000.0, 1e5]),
)
def test_a_prefix_in_a_slower_tier_never_makes_a_node_dearer(
    reaches: list[Reach], rate: float
) -> None:
    nodes = [node("a", tokens_per_s=rate)]
    (cold,) = score(nodes, wanted(), lambda one: [], PARAMETERS)
    (warm,) = score(nodes, wanted(), lambda one: reaches, PARAMETERS)
    assert warm.cost_s <= cold.cost_s + 1e-9


def order(names: list[str], key: bytes) -> list[str]:
    return sorted(names, key=lambda name: rendezvous(key, node(name)), reverse=True)


@pytest.mark.parametrize(
    ("name", "candidates", "want", "hits", "chosen"),
    [
        ("least backlog", [node("a", backlog_tokens=900), node("b")], wanted(), {}, "b"),
        ("resident prefix", [node("a"), node("b")], wanted(), {"b": 960}, "b"),
        (
            "a prefix is worth a queue",
            [node("a"), node("b", backlog_tokens=3000)],
            wanted(),
            {"b": 960},
            "b",
        ),
        (
            "but not any queue",
            [node("a"), node("b", backlog_tokens=4000)],
            wanted(),
            {"b": 960},
            "a",
        ),
        (
            "home within slack",
            [node("a"), node("b", backlog_tokens=140)],
            wanted(home="b"),
            {},
            "b",
        ),
        (
            "home beyond slack",
            [node("a"), node("b", backlog_tokens=160)],
            wanted(home="b"),
            {},
            "a",
        ),
        (
            "a short prompt's home within the window",
            [node("a"), node("b", backlog_tokens=45)],
            wanted(tokens=1, home="b"),
            {},
            "b",
        ),
        ("home is gone", [node("a")], wanted(home="b"), {}, "a"),
        ("faster node", [node("a"), node("b", tokens_per_s=2000.0)], wanted(), {}, "b"),
    ],
)
def test_pick(
    name: str, candidates: list[Candidate], want: Wanted, hits: dict[str, int], chosen: str
) -> None:
    assert choose(candidates, want, hits)[0] == chosen, name


def test_equals_follow_rendezvous_until_the_bound() -> None:
    names = ["a", "b", "c", "d"]
    first, second, *_ = order(names, b"key")
    idle = [node(name) for name in names]
    assert choose(idle, wanted()) == (first, "rendezvous")
    busy = [node(name, in_flight=3 if name == first else 2) for name in names]
    assert choose(busy, wanted()) == (first, "rendezvous")  # room: ceil(1.25 × 10 ÷ 4) = 4
    hot = [node(name, in_flight=4 if name == first else 2) for name in names]
    assert choose(hot, wanted()) == (second, "rendezvous")


def test_identical_prompts_do_not_herd_on_one_node() -> None:
    """A cold index scores every node alike; the maximum alone would send all to one."""
    in_flight = dict.fromkeys("abcd", 0)
    for _ in range(40):
        candidates = [node(name, in_flight=count) for name, count in in_flight.items()]
        in_flight[choose(candidates, wanted(tokens=10))[0]] += 1
    assert max(in_flight.values()) <= 13  # 1.25 × the mean of 10, rounded up


def test_a_beginning_that_all_nodes_have_decides_nothing() -> None:
    """A preamble that every prompt shares put the same nodes first for all of them."""
    names = ["a", "b", "c", "d"]
    nodes = [node(name) for name in names]

    def chosen(own: bytes, held_tokens: int) -> str:
        want = Wanted(
            640, b"request", None, False, page_keys=[own, b"second", b"first"], page_tokens=64
        )
        return choose(nodes, want, dict.fromkeys(names, held_tokens))[0]

    own = [b"own %d" % number for number in range(40)]
    assert {chosen(key, 0) for key in own} == {order(names, b"first")[0]}
    assert {chosen(key, 64) for key in own} == {order(names, b"second")[0]}
    for held in (128, 192, 639):  # all of it, as far as it has pages, too
        assert [chosen(key, held) for key in own] == [order(names, key)[0] for key in own]
    assert {chosen(key, 128) for key in own} == set(names)


def test_a_session_keeps_its_order_whatever_is_resident() -> None:
    names = ["a", "b", "c", "d"]
    nodes = [node(name) for name in names]
    want = Wanted(640, b"session", None, True)
    for held in (0, 64, 639):
        first = order(names, b"session")[0]
        assert choose(nodes, want, dict.fromkeys(names, held))[0] == first


def test_unequal_nodes_share_by_their_rates() -> None:
    """A bound on counts alone would fill a slow node as if it were a fast one."""
    rates = {"a": 1000.0, "b": 3000.0, "c": 1000.0, "d": 3000.0}
    in_flight = dict.fromkeys(rates, 0)
    for number in range(400):
        nodes = [
            node(name, in_flight=in_flight[name], tokens_per_s=rate) for name, rate in rates.items()
        ]
        in_flight[choose(nodes, wanted(tokens=10, key=b"%d" % number))[0]] += 1
    for name, count in in_flight.items():
        assert count <= 1.25 * 400 * rates[name] / sum(rates.values()) + 1, name


@given(st.integers(2, 12), st.integers(0, 2**32))
def test_a_node_that_leaves_moves_only_its_own_keys(nodes: int, seed: int) -> None:
    names = [f"n{index}" for index in range(nodes)]
    keys = [f"{seed}-{index}".encode() for index in range(60)]
    before = {key: order(names, key)[0] for key in keys}
    gone = names[seed % nodes]
    rest = [name for name in names if name != gone]
    for key, chosen in before.items():
        assert chosen == gone or order(rest, key)[0] == chosen


def test_a_node_that_joins_takes_about_its_share() -> None:
    keys = [f"key{index}".encode() for index in range(2000)]
    before = [order(["a", "b", "c", "d"], key)[0] for key in keys]
    after = [order(["a", "b", "c", "d", "e"], key)[0] for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"e"}
    assert 0.16 < len(moved) / len(keys) < 0.24  # 1/5


@pytest.mark.parametrize(
    ("has_key", "home", "served", "verdict"),
    [
        (False, None, "a", "none"),
        (True, None, "a", "new"),
        (True, "a", "a", "hit"),
        (True, "b", "a", "spill"),
    ],
)
def test_affinity_verdict(has_key: bool, home: str | None, served: str, verdict: str) -> None:
    assert affinity(Wanted(1, b"k", home, has_key), served) == verdict


def test_round_robin_ignores_load_and_pages() -> None:
    nodes = [node("b", backlog_tokens=9999), node("a")]
    taken = [pick_in_turn(nodes, wanted(), [], turn).chosen.candidate.node_id for turn in range(4)]
    assert taken == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("backlogs", "seconds"), [([], 1.0), ([0], 0.5), ([5000, 3000], 3.0), ([10**9], 30.0)]
)
def test_retry_after(backlogs: list[int], seconds: float) -> None:
    nodes = [node("n", backlog_tokens=backlog) for backlog in backlogs]
    assert retry_after_s(nodes, PARAMETERS) == seconds


candidates = st.lists(
    st.builds(
        node,
        st.sampled_from("abcdef"),
        in_flight=st.integers(0, 300),
        backlog_tokens=st.integers(0, 10**6),
        tokens_per_s=st.sampled_from([0.0, 50.0, 8000.0]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one.node_id,
)


@given(candidates, st.sampled_from([None, *"abcdef"]), st.integers(1, 50_000))
def test_a_pick_is_explained_and_near_the_least_cost(
    nodes: list[Candidate], home: str | None, tokens: int
) -> None:
    want = wanted(tokens=tokens, home=home)
    scored = score(nodes, want, lambda one: [], PARAMETERS)
    decision = pick(scored, want, [("x", "full")], PARAMETERS)
    least = min(one.cost_s for one in scored)
    chosen = decision.chosen
    rate = chosen.candidate.tokens_per_s or PARAMETERS.fallback_tokens_per_s
    allowed = max(PARAMETERS.window_s, PARAMETERS.slack * tokens / rate)
    assert chosen.cost_s <= least + (allowed if decision.reason == "home" else 0.05)
    assert decision.scored == tuple(scored)
    assert decision.rejected == (("x", "full"),)
    shuffled = list(reversed(scored))
    again = pick(shuffled, want, [], PARAMETERS).chosen
    assert isinstance(again, Scored)
    if decision.reason != "least_in_flight":
        assert again == chosen, "the order of nodes decided"


def test_defaults_file_and_code_agree() -> None:
    path = Path(__file__).parents[2] / "policies/defaults/routing.toml"
    assert parse_parameters(path.read_text()) == PARAMETERS


def test_a_misspelt_parameter_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="own_wieght"):
        parse_parameters("own_wieght = 2.0")
