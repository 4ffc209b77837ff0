"""Choices follow their distribution and depend on nothing but their own row."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execute.sampling import Choice, exponentials, sample
from policies.contract.wire import Sampling


def sampling(**changes: object) -> Sampling:
    return Sampling(**({"max_tokens": 9} | changes))  # type: ignore[arg-type]


def draw(logits: list[float], count: int, **changes: object) -> Counter[int | None]:
    rows = torch.tensor([logits]).repeat(count, 1)
    asked = sampling(**changes)
    return Counter(sample(rows, [Choice(asked, position) for position in range(count)]))


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    greedy = Choice(sampling(temperature=0.0), 0)
    assert sample(logits, [greedy, greedy]) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = [1.0, 0.0, -1.0, 2.0]
    count = 4000
    found = draw(logits, count, temperature=temperature, seed=5)
    weights = [math.exp(value / temperature) for value in logits]
    for token, weight in enumerate(weights):
        share = weight / sum(weights)
        # Five standard deviations: one wrong alarm in a million, and the seed is fixed anyway.
        assert abs(found[token] - count * share) < 5 * math.sqrt(count * share * (1 - share))


def test_top_k_keeps_k_tokens() -> None:
    assert set(draw([1.0, 1.1, 1.2, 1.3], 300, top_k=2)) == {2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
    assert set(draw(logits, 400, top_p=0.49)) == {0}
    assert set(draw(logits, 400, top_p=0.6)) == {0, 1}
    assert set(draw(logits, 400, top_p=0.81)) == {0, 1, 2}
    assert set(draw(logits, 400, top_p=0.0)) == {0}


def test_top_p_counts_within_top_k() -> None:
    logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    # Of the two that top-k leaves the first holds 4/7, so it reaches a half by itself.
    assert set(draw(logits, 300, top_k=2, top_p=0.5)) == {0}


def test_min_p_is_relative_to_the_best() -> None:
    logits = [math.log(share) for share in (0.6, 0.29, 0.11)]
    assert set(draw(logits, 400, min_p=0.4)) == {0, 1}
    assert set(draw(logits, 400, min_p=1.0)) == {0}


def test_min_tokens_masks_stop_tokens_until_then() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0]])
    asked = sampling(temperature=0.0, min_tokens=2, stop_token_ids=(2, 1, 99))
    assert sample(logits.clone(), [Choice(asked, 1)]) == [0]
    assert sample(logits.clone(), [Choice(asked, 2)]) == [2]


def test_a_tiny_temperature_is_greedy_not_nan() -> None:
    assert draw([1.0, 1.5, -2.0], 20, temperature=1e-300) == {1: 20}


def test_logits_that_are_no_numbers_give_no_token() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0], [float("inf"), 0.0]])
    asked = [Choice(sampling(temperature=1.0), 0)] * 3
    found = sample(logits, asked)
    assert found[0] is None
    assert found[1] in (0, 1)
    assert found[2] is None


settings_of_rows = st.builds(
    sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (0, 7)]),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(settings_of_rows, min_size=1, max_size=9), shuffle=st.randoms())
def test_a_row_does_not_depend_on_its_batch_mates(rows: list[Sampling], shuffle: object) -> None:
    """Noise indexed by row or by rank would change a row beside a mate with top-k."""
    generator = torch.Generator().manual_seed(len(rows))
    logits = torch.randn(len(rows), 331, generator=generator) * 3
    choices = [Choice(row, position) for position, row in enumerate(rows)]
    together = sample(logits.clone(), choices)
    single = [sample(logits[at : at + 1].clone(), [choice])[0] for at, choice in enumerate(choices)]
    order = list(range(len(rows)))
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    mixed = sample(logits[order].clone(), [choices[at] for at in order])
    assert together == single
    assert mixed == [single[at] for at in order]


def test_noise_is_exponential_and_fresh_for_each_seed_position_and_token() -> None:
    noise = exponentials(list(range(50)), 1000, device=torch.device("cpu"))
    assert noise.min() > 0
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 1) < 0.02
    assert abs(noise.var().item() - 1) < 0.06
    assert noise.unique().numel() == noise.numel()
    assert abs(torch.corrcoef(noise)[0, 1].item()) < 0.15
    assert draw([0.0] * 50, 30, seed=1) != draw([0.0] * 50, 30, seed=2)
