"""Log probabilities: as torch defines them, ties by token id, and each row for itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execute.logprobs import describe


def test_they_are_log_softmax_with_the_rank_among_all() -> None:
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(1)) * 4
    tokens = [0, 89, 7, 31, 44]
    expected = logits.log_softmax(-1)
    for row, entry in enumerate(describe(logits, tokens, [3] * 5)):
        order = logits[row].argsort(descending=True).tolist()
        assert entry.logprob == expected[row, tokens[row]].item()
        assert order[entry.rank - 1] == tokens[row]
        assert [token for token, _ in entry.top] == order[:3]
        assert [value for _, value in entry.top] == [expected[row, at].item() for at in order[:3]]


@pytest.mark.parametrize("top", [0, 1, 2, 3, 5])
def test_equal_ones_are_told_by_token_id(top: int) -> None:
    (entry,) = describe(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]]), [4], [top])
    assert [token for token, _ in entry.top] == [1, 3, 0, 2, 4][:top]
    assert entry.rank == 3


def test_more_than_the_vocabulary_is_the_whole_vocabulary() -> None:
    (entry,) = describe(torch.tensor([[0.0, 1.0]]), [0], [9])
    assert [token for token, _ in entry.top] == [1, 0]


@settings(max_examples=40, deadline=None)
@given(tops=st.lists(st.integers(0, 12), min_size=1, max_size=12), coarse=st.booleans())
def test_a_row_does_not_depend_on_its_batch_mates(tops: list[int], coarse: bool) -> None:
    logits = torch.randn(len(tops), 331, generator=torch.Generator().manual_seed(len(tops)))
    if coarse:  # many ties
        logits = logits.mul(2).round()
    tokens = [at * 37 % 331 for at in range(len(tops))]
    together = describe(logits, tokens, tops)
    for at, top in enumerate(tops):
        assert describe(logits[at : at + 1].clone(), tokens[at : at + 1], [top]) == [together[at]]


def test_a_wide_row_is_the_same_alone_and_among_many_on_two_threads() -> None:
    """A sum that is split among threads by the number of rows would change the last bits."""
    torch.set_num_threads(2)
    logits = torch.randn(64, 49_152, generator=torch.Generator().manual_seed(3)) * 3
    together = describe(logits, [5] * 64, [4] * 64)
    for at in (0, 17, 63):
        assert describe(logits[at : at + 1].clone(), [5], [4]) == [together[at]]


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(2, 30)
    before = logits.clone()
    describe(logits, [1, 2], [3, 4])
    assert torch.equal(logits, before)
