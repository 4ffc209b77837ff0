"""What readers of streams felt, by hand-made answers; and that a load is the same each time."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from benchmarks.pd.figures import FIGURES, Felt, Objective, highest
from benchmarks.pd.load import Answer, Shape, cold_arrivals
from gateway.cli.client import ChatReply


def answer(*, ttft_s: float, gaps_s: list[float], new_tokens: int = 100) -> Answer:
    pieces_at = tuple(accumulate(gaps_s, initial=ttft_s))
    reply = ChatReply(
        request_id="r",
        node="n1",
        prefill_node="",
        path="mixed",
        affinity="new",
        text="yes",
        prompt_tokens=new_tokens,
        cached_tokens=0,
        completion_tokens=len(pieces_at),
        started_at=0.0,
        pieces_at=pieces_at,
        total_s=pieces_at[-1],
    )
    return Answer("a/1", new_tokens, reply)


def test_a_request_counts_by_the_mean_of_its_tokens_and_a_gap_by_itself() -> None:
    smooth = [answer(ttft_s=1.0, gaps_s=[0.010] * 20) for _ in range(4)]
    held_up = answer(ttft_s=3.0, gaps_s=[0.010] * 15 + [1.0] * 5)
    felt = Felt.of([*smooth, held_up])
    found = {name: pytest.approx(figure(felt)) for name, (_, figure) in FIGURES.items()}
    assert found == {
        "ttft_p50": 1.0,
        "ttft_p90": 3.0,
        "ttft_p99": 3.0,
        "ttft_p90_minus_p50": 2.0,
        "time_per_token_p50": 10.0,
        "time_per_token_p90": 257.5,
        "time_per_token_p99": 257.5,
        "time_per_token_variance": 0.2 * 0.8 * 247.5**2,
        "token_gap_p90": 10.0,  # 5 gaps of 100 were longer
        "token_gap_p99": 1000.0,
        "token_gap_variance": 0.05 * 0.95 * 990**2,
    }


def test_a_request_keeps_its_objective_by_what_was_new_to_it() -> None:
    objective = Objective(prefill_rate=1000)
    kept = answer(ttft_s=13.9, gaps_s=[0.049] * 4, new_tokens=3000)
    assert objective.keeps(kept)
    assert not objective.keeps(replace(kept, new_tokens=2900))
    assert not objective.keeps(answer(ttft_s=1.0, gaps_s=[0.049, 0.049, 0.06]))
    assert objective.is_met([kept] * 9 + [replace(kept, new_tokens=1)])
    assert not objective.is_met([kept] * 8 + [replace(kept, new_tokens=1)])


@pytest.mark.parametrize(("limit", "found"), [(0.9, 0.75), (1.3, 1.25), (5.0, 1.75), (0.1, 0.0)])
def test_the_highest_load_is_bisected(limit: float, found: float) -> None:
    assert highest(lambda load: load <= limit, most=2.0, runs=3) == found


def test_cold_prompts_come_alike_with_a_seed_and_as_often_as_they_should() -> None:
    shape = Shape(cold_per_s=0.5)
    arrivals = list(cold_arrivals(shape, seed=7, seconds=1000))
    assert arrivals == list(cold_arrivals(shape, seed=7, seconds=1000))
    assert arrivals[:100] != list(cold_arrivals(shape, seed=8, seconds=1000))[:100]
    assert 450 <= len(arrivals) <= 550
    assert arrivals[::2] == arrivals[1::2]
    assert {min(words // 1000, 5) for _, words in arrivals} == {1, 2, 3, 4}
    assert len(list(cold_arrivals(shape.times(2.0), seed=7, seconds=1000))) > 900
