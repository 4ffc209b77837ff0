"""Predicted residency: a deep page proves the rest, everything expires, and it stays bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.predicted import PredictedResidency


def keys(*names: int) -> list[bytes]:
    return [bytes([name]) * 16 for name in names]


def test_the_deepest_page_that_is_believed_there_counts_and_expires() -> None:
    held = PredictedResidency(100, ttl_s=600.0)
    held.expect(keys(3, 2, 1), now=0.0)
    assert held.pages(keys(5, 4, 3, 2, 1), now=599.0) == 3
    assert held.pages(keys(9, 2, 1), now=1.0) == 2
    assert held.pages(keys(9), now=1.0) == 0
    held.expect(keys(1), now=500.0)
    assert held.pages(keys(3, 2, 1), now=700.0) == 1
    held.expect(keys(7), now=1200.0)
    assert len(held) == 1, "what expired is gone"
    held.clear()
    assert held.pages(keys(7), now=1200.0) == 0


def test_the_bound_takes_tails_of_the_least_recent_first() -> None:
    held = PredictedResidency(4)
    held.expect(keys(3, 2, 1), now=0.0)
    held.expect(keys(12, 11), now=1.0)
    assert held.pages(keys(3, 2, 1), now=1.0) == 2
    assert held.pages(keys(12, 11), now=1.0) == 2
    with pytest.raises(ValueError, match="max_keys"):
        PredictedResidency(0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6), st.floats(0, 500)), max_size=60))
def test_it_never_holds_more_than_its_bound_nor_what_was_not_expected(steps) -> None:
    held, now, seen = PredictedResidency(10, ttl_s=100.0), 0.0, {}
    for first, depth, wait in steps:
        now += wait
        chain = keys(*range(first + depth, first, -1))
        held.expect(chain, now)
        seen |= dict.fromkeys(chain, now)
        assert len(held) <= 10
    for name in range(60):
        if held.pages(keys(name), now):
            assert now - seen[keys(name)[0]] < 100.0
