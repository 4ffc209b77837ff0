"""Roles move with the load: late, one at a time, never back and forth, never the last of a kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.placement import Move, NodeLoad, PlacementParameters, RoleBalance

PARAMETERS = PlacementParameters()
QUICK = PlacementParameters(window_s=6.0, dwell_s=20.0)  # for the properties: a second is a step
RATE, CAPACITY = 1000.0, 100_000


class Model:
    """Nodes of equal pools, a demand in tokens per second and contexts that spread evenly."""

    def __init__(
        self,
        prefill: int,
        decode: int,
        rates: list[float] | None = None,
        parameters: PlacementParameters = PARAMETERS,
    ) -> None:
        rates = rates or [RATE] * (prefill + decode)
        self.nodes = {
            f"n{index}": NodeLoad(
                f"n{index}", "prefill" if index < prefill else "decode", rate, 0, CAPACITY
            )
            for index, rate in enumerate(rates)
        }
        self.balance = RoleBalance(parameters)
        self.now = 0.0
        self.tokens = 0.0
        self.moves: list[tuple[float, Move]] = []

    def count(self, role: str) -> int:
        return sum(node.role == role for node in self.nodes.values())

    def run(self, seconds: int, demand: float, context: float) -> list[Move]:
        before = len(self.moves)
        for _ in range(seconds):
            self.now += 1.0
            self.tokens += demand
            each = int(context / max(1, self.count("decode")))
            seen = [
                replace(node, context_tokens=each if node.role == "decode" else 0)
                for node in self.nodes.values()
            ]
            move = self.balance.observe(seen, int(self.tokens), self.now)
            if move is not None:
                self.nodes[move.node_id] = replace(self.nodes[move.node_id], role=move.role)
                self.moves.append((self.now, move))
        return [move for _, move in self.moves[before:]]


def test_a_prompt_heavy_load_gets_a_node_once_it_lasts() -> None:
    fleet = Model(2, 4)
    assert fleet.run(300, demand=1400, context=100_000) == []  # 0.75 of two nodes is 1,500
    assert fleet.run(70, demand=1900, context=100_000) == []  # the mean of a window, then a window
    (move,) = fleet.run(60, demand=1900, context=100_000)
    assert (move.role, move.reason) == ("prefill", "prefill_short")
    assert fleet.count("prefill") == 3


def test_contexts_that_fill_the_pools_get_one() -> None:
    fleet = Model(3, 1)
    (move,) = fleet.run(200, demand=600, context=80_000)
    assert (move.role, move.reason) == ("decode", "decode_short")


def test_a_peak_moves_nothing() -> None:
    fleet = Model(2, 4)
    fleet.run(300, demand=1000, context=100_000)
    for _ in range(10):
        fleet.run(20, demand=2500, context=100_000)
        assert fleet.run(100, demand=700, context=100_000) == []
    assert fleet.moves == []


def test_where_both_are_short_nobody_moves() -> None:
    assert Model(2, 2).run(1000, demand=5000, context=190_000) == []


def test_moves_wait_for_one_another() -> None:
    fleet = Model(1, 7)
    fleet.run(2000, demand=2500, context=50_000)
    times = [at for at, _ in fleet.moves]
    assert len(times) == 3
    assert min(b - a for a, b in pairwise(times)) >= PARAMETERS.dwell_s


def test_nothing_moves_while_a_node_is_switching() -> None:
    fleet = Model(2, 4)
    fleet.nodes["n5"] = replace(fleet.nodes["n5"], is_switching=True)
    assert fleet.run(600, demand=1900, context=100_000) == []


loads = st.tuples(st.floats(0, 8000), st.floats(0, 800_000))


@settings(max_examples=40, deadline=None)
@given(
    prefill=st.integers(0, 4),
    decode=st.integers(0, 4),
    rates=st.lists(st.sampled_from([300.0, 1000.0, 3000.0]), min_size=8, max_size=8),
    phases=st.lists(loads, min_size=1, max_size=3),
)
def test_a_steady_load_never_moves_a_node_back_and_no_kind_dies_out(
    prefill, decode, rates, phases
) -> None:
    fleet = Model(prefill, decode, rates[: prefill + decode], QUICK)
    for demand, context in phases:
        fleet.run(13, demand, context)  # what is left of the phase before
        moves = fleet.run(80, demand, context)
        assert len({move.role for move in moves}) <= 1
        assert (fleet.count("prefill") > 0) == (prefill > 0)
        assert (fleet.count("decode") > 0) == (decode > 0)


@settings(max_examples=30, deadline=None)
@given(load=loads, noise=st.lists(st.floats(-0.045, 0.045), min_size=10, max_size=10))
def test_noise_within_the_margin_never_moves_a_node_back(load, noise) -> None:
    fleet = Model(3, 3, parameters=QUICK)
    demand, context = load
    for wave in (*noise, *noise):
        fleet.run(9, demand * (1 + wave), context * (1 + wave))
    assert len({move.role for _, move in fleet.moves}) <= 1
