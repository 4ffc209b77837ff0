"""A breaker lets one trial through after its pause; probes change their mind only when sure."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.breaker import Breaker, Probes


def test_it_opens_after_failures_in_a_row_and_a_trial_closes_it() -> None:
    breaker = Breaker(failures=3, pause_s=1.0)
    for _ in range(2):
        breaker.end(breaker.begin(0.0), "failed", 0.0)
    breaker.end(breaker.begin(0.0), "worked", 0.0)
    for _ in range(3):
        assert breaker.allows(0.0)
        breaker.end(breaker.begin(0.0), "failed", 0.0)
    assert breaker.state(0.9) == "open"
    assert not breaker.allows(0.9)
    assert breaker.state(1.0) == "half_open"
    is_trial = breaker.begin(1.0)
    assert is_trial
    assert not breaker.allows(1.0), "one trial at a time"
    breaker.end(is_trial, "worked", 1.2)
    assert breaker.state(1.2) == "closed"


def test_each_failed_trial_doubles_the_pause_up_to_the_longest() -> None:
    breaker = Breaker(failures=1, pause_s=1.0, longest_pause_s=4.0)
    now, pauses = 0.0, []
    breaker.end(breaker.begin(now), "failed", now)
    for _ in range(5):
        began = now
        while not breaker.allows(now):
            now += 0.25
        pauses.append(now - began)
        breaker.end(breaker.begin(now), "failed", now)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_client_that_leaves_a_trial_makes_room_for_the_next() -> None:
    breaker = Breaker(failures=1)
    breaker.end(breaker.begin(0.0), "failed", 0.0)
    breaker.end(breaker.begin(1.0), "neither", 1.0)
    assert breaker.state(1.0) == "half_open"
    assert breaker.allows(1.0)


@pytest.mark.parametrize("outcome", ["worked", "failed", "neither"])
def test_calls_from_before_say_nothing_of_an_open_one(outcome) -> None:
    breaker = Breaker(failures=1)
    old, bad = breaker.begin(0.0), breaker.begin(0.0)
    breaker.end(bad, "failed", 0.0)
    breaker.end(old, outcome, 0.5)
    assert breaker.state(0.5) == "open"
    assert breaker.state(1.0) == "half_open"


class BreakerMachine(RuleBasedStateMachine):
    """Calls begin and end in any order; never two trials, never stuck for good."""

    @initialize()
    def start(self) -> None:
        self.breaker = Breaker(failures=2)
        self.now = 0.0
        self.calls: list[bool] = []

    @rule(step=st.sampled_from([0.1, 0.9, 5.0, 40.0]))
    def wait(self, step: float) -> None:
        self.now += step

    @precondition(lambda self: self.breaker.allows(self.now))
    @rule()
    def begin(self) -> None:
        self.calls.append(self.breaker.begin(self.now))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), outcome=st.sampled_from(["worked", "failed", "neither"]))
    def end(self, data: st.DataObject, outcome: str) -> None:
        place = data.draw(st.integers(0, len(self.calls) - 1))
        self.breaker.end(self.calls.pop(place), outcome, self.now)

    @invariant()
    def one_trial(self) -> None:
        assert sum(self.calls) <= 1

    @invariant()
    def it_comes_back(self) -> None:
        later = self.now + self.breaker.longest_pause_s
        assert self.breaker.allows(later) or any(self.calls)


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_probes_have_hysteresis_but_for_the_first() -> None:
    probes = Probes(up_after=2, down_after=3)
    assert probes.take(True)
    assert probes.is_up
    told = [probes.take(good) for good in (False, False, True, False, False)]
    assert not any(told)
    assert probes.take(False)
    assert not probes.is_up
    assert not probes.take(True)
    assert probes.take(True)
    other = Probes()
    assert not other.take(False)
    assert not other.take(True)
    assert other.take(True)
