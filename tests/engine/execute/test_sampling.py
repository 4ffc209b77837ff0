"""Choices follow their distribution and depend on nothing but their own row."""

import math
from array import array
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execute.sampling import Choice, adjust, exponentials, sample, weigh
from policies.contract.wire import LARGEST_PENALTY as LARGEST
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


HISTORY = array("I", [4, 9, 9, 2, 17, 4, 4, 30, 9, 2])
NUM_COMPLETION = 4  # the last of these


def penalised(logits: Any, asked: Sampling) -> Any:
    """The definition, for one row."""
    out = np.array(logits, dtype=np.float32)
    for token in set(HISTORY):
        out[token] *= asked.repetition_penalty if out[token] < 0 else 1 / asked.repetition_penalty
    counts = np.bincount(HISTORY[-NUM_COMPLETION:], minlength=len(out))
    out -= asked.frequency_penalty * counts + asked.presence_penalty * (counts > 0)
    for token, bias in asked.logit_bias:
        out[token] += bias
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"frequency_penalty": 0.9},
        {"presence_penalty": -1.1},
        {"logit_bias": ((2, -3.5), (40, 2.25))},
        {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.4,
            "presence_penalty": 0.3,
            "logit_bias": ((4, 1.5), (9, -100.0)),
        },
    ],
    ids=str,
)
def test_penalties_and_bias_are_as_defined(changes: dict[str, Any]) -> None:
    logits = torch.randn(2, 41, generator=torch.Generator().manual_seed(6)) * 3
    asked = sampling(**changes)
    expected = penalised(logits[0].numpy(), asked)
    mate = logits[1].clone()
    adjust(logits, [Choice(asked, NUM_COMPLETION, HISTORY), Choice(sampling(), 3)])
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[1], mate)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 41, generator=torch.Generator().manual_seed(7)) * 3
    peer = RepetitionPenaltyLogitsProcessor(1.37)
    expected = peer(torch.tensor([HISTORY.tolist()]), logits.clone())
    adjust(logits, [Choice(sampling(repetition_penalty=1.37), 0, HISTORY)])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("heat", [0.4, 1.0, 1.6])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (30, 0.6, 0.05), (5, 0.97, 0.2)],
)
def test_the_cuts_are_those_of_transformers(
    heat: float, top_k: int, top_p: float, min_p: float
) -> None:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(6, 120, generator=torch.Generator().manual_seed(8)) * 2
    scores, ids = logits.double(), torch.zeros(6, 1, dtype=torch.long)
    warpers: list[Any] = [TemperatureLogitsWarper(heat)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(ids, scores)
    asked = sampling(temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p)
    weights = weigh(logits, [asked] * 6)
    shares = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(shares, scores.softmax(-1), rtol=1e-6, atol=1e-12)


def test_draws_with_penalties_follow_their_distribution() -> None:
    logits = np.linspace(1.5, -1.5, 41, dtype=np.float32)
    asked = sampling(
        temperature=0.8,
        repetition_penalty=1.4,
        frequency_penalty=0.5,
        presence_penalty=0.2,
        logit_bias=((4, 0.7), (39, 2.5)),
        seed=21,
    )
    shares = np.exp(penalised(logits, asked) / 0.8)
    shares /= shares.sum()
    count = 8000
    rows = torch.tensor(logits).repeat(count, 1)
    # Another seed for each draw, at one position: all with the same history.
    seeded = [msgspec.structs.replace(asked, seed=seed) for seed in range(count)]
    drawn = sample(rows, [Choice(each, NUM_COMPLETION, HISTORY) for each in seeded])
    found = np.bincount(np.array(drawn), minlength=41)
    statistic = (((found - count * shares) ** 2) / (count * shares)).sum()
    assert statistic < 90, "chi square of 40 degrees of freedom: 1 in 100,000 is above 88"


def test_penalties_and_bias_apply_to_greedy_rows() -> None:
    logits = torch.zeros(3, 41)
    logits[:, 9] = 2.0
    logits[:, 20] = 1.5
    asked = [
        Choice(sampling(temperature=0.0, repetition_penalty=2.0), NUM_COMPLETION, HISTORY),
        Choice(sampling(temperature=0.0, logit_bias=((7, 5.0),)), 0),
        Choice(sampling(temperature=0.0), 0),
    ]
    assert sample(logits, asked) == [20, 7, 9]


def test_presence_and_frequency_ignore_the_prompt() -> None:
    logits = torch.zeros(1, 41)
    logits[0, 17] = 1.0  # in the prompt's part of the history only
    asked = sampling(temperature=0.0, presence_penalty=5.0, frequency_penalty=5.0)
    assert sample(logits, [Choice(asked, NUM_COMPLETION, HISTORY)]) == [17]


def test_no_bias_lets_a_banned_stop_token_through() -> None:
    logits = torch.zeros(1, 5)
    asked = sampling(
        temperature=0.0, min_tokens=3, stop_token_ids=(2,), logit_bias=((2, 100.0), (3, 1.0))
    )
    assert sample(logits.clone(), [Choice(asked, 2)]) == [3]
    assert sample(logits.clone(), [Choice(asked, 3)]) == [2]


def test_the_widest_values_stay_finite() -> None:
    logits = torch.randn(1, 41, generator=torch.Generator().manual_seed(9)) * 30
    for factor in (LARGEST, 1 / LARGEST):
        asked = sampling(
            repetition_penalty=factor,
            frequency_penalty=LARGEST,
            presence_penalty=-LARGEST,
            logit_bias=((3, LARGEST),),
        )
        assert sample(logits.clone(), [Choice(asked, NUM_COMPLETION, HISTORY)])[0] is not None


def test_a_history_can_grow_after_it_was_read() -> None:
    history = array("I", HISTORY)
    asked = sampling(repetition_penalty=1.5, presence_penalty=1.0)
    logits = torch.zeros(1, 41)
    sample(logits, [Choice(asked, NUM_COMPLETION, history)])
    history.append(3)
    assert len(history) == len(HISTORY) + 1


settings_of_rows = st.builds(
    sampling,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.4]),
    logit_bias=st.sampled_from([(), (), ((3, 4.0), (200, -2.0))]),
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
    choices = [
        Choice(row, position, array("I", [at * at % 331 for at in range(40 + position)]))
        for position, row in enumerate(rows)
    ]
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
