"""Admission as a state machine: bounds hold, everything comes back, nobody is shut out for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.admission import Admission, AdmissionLimits, Shed, Ticket


def entered(admission: Admission, key: str = "k", now: float = 0.0) -> Ticket:
    ticket = admission.enter(key, now)
    assert isinstance(ticket, Ticket), ticket
    return ticket


def test_concurrency_is_bounded_globally_and_per_key() -> None:
    admission = Admission(
        AdmissionLimits(concurrent_requests=3, concurrent_requests_per_key=2, retry_after_s=0.5)
    )
    first = entered(admission, "a")
    entered(admission, "a")
    assert admission.enter("a", 0.0) == Shed("key_concurrency", 2, 0.5)
    entered(admission, "b")
    assert admission.enter("c", 0.0) == Shed("concurrency", 3, 0.5)
    admission.leave(first)
    entered(admission, "c")


def test_leaving_twice_gives_back_once() -> None:
    admission = Admission(AdmissionLimits())
    ticket = entered(admission)
    assert admission.reserve(ticket, prompt_tokens=10, max_tokens=5) is None
    admission.leave(ticket)
    admission.leave(ticket)
    assert (admission.in_flight, admission.reserved_tokens) == (0, 0)


def test_parallel_requests_cannot_all_pass_one_check() -> None:
    admission = Admission(AdmissionLimits(reserved_tokens=1000, output_reserve_tokens=100))
    sheds = [
        admission.reserve(entered(admission), prompt_tokens=300, max_tokens=10_000)
        for _ in range(5)
    ]
    assert sheds == [None, None, *[Shed("tokens", 1000, 1.0)] * 3]
    assert admission.reserved_tokens == 800  # output counts at most output_reserve_tokens


def test_each_choice_reserves_its_output() -> None:
    admission = Admission(AdmissionLimits(reserved_tokens=1000, output_reserve_tokens=100))
    first, second = entered(admission), entered(admission)
    assert admission.reserve(first, prompt_tokens=300, max_tokens=50, choices=4) is None
    assert admission.reserved_tokens == 500
    shed = admission.reserve(second, prompt_tokens=100, max_tokens=10_000, choices=5)
    assert shed == Shed("tokens", 1000, 1.0)
    admission.leave(first)
    # More prompts of one request: what it holds itself does not shut it out.
    for _ in range(3):
        assert admission.reserve(second, prompt_tokens=900, max_tokens=1) is None
    admission.leave(second)
    assert admission.reserved_tokens == 0


def test_reservation_larger_than_the_bound_enters_alone() -> None:
    admission = Admission(AdmissionLimits(reserved_tokens=1000))
    giant = entered(admission)
    assert admission.reserve(giant, prompt_tokens=5000, max_tokens=1) is None
    small = entered(admission)
    assert isinstance(admission.reserve(small, prompt_tokens=1, max_tokens=1), Shed)
    admission.leave(giant)
    assert admission.reserve(small, prompt_tokens=1, max_tokens=1) is None


def test_rate_refills_with_time_and_a_refusal_costs_nothing() -> None:
    admission = Admission(AdmissionLimits(requests_per_minute_per_key=60))
    for _ in range(60):
        admission.leave(entered(admission, now=0.0))
    shed = admission.enter("k", 0.25)
    assert isinstance(shed, Shed)
    assert shed.retry_after_s == pytest.approx(0.75)
    assert isinstance(admission.enter("k", 0.5), Shed)
    assert isinstance(admission.enter("other", 0.5), Ticket)
    assert isinstance(admission.enter("k", 1.0), Ticket)


def test_full_gateway_does_not_cost_the_key_its_rate() -> None:
    admission = Admission(AdmissionLimits(concurrent_requests=1, requests_per_minute_per_key=2))
    ticket = entered(admission, now=0.0)
    for _ in range(5):
        assert admission.enter("k", 0.0) == Shed("concurrency", 1, 1.0)
    admission.leave(ticket)
    entered(admission, now=0.0)


def test_a_clock_that_stands_still_or_steps_back_grants_nothing() -> None:
    admission = Admission(AdmissionLimits(requests_per_minute_per_key=1))
    entered(admission, now=100.0)
    assert isinstance(admission.enter("k", 100.0), Shed)
    assert isinstance(admission.enter("k", 50.0), Shed)


class AdmissionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(
            AdmissionLimits(
                concurrent_requests=5,
                concurrent_requests_per_key=3,
                requests_per_minute_per_key=120,
                reserved_tokens=500,
                output_reserve_tokens=50,
            )
        )
        self.now = 0.0
        self.open: list[Ticket] = []

    @rule(key=st.sampled_from("abc"), wait=st.floats(0, 2))
    def enter(self, key: str, wait: float) -> None:
        self.now += wait
        match self.admission.enter(key, self.now):
            case Ticket() as ticket:
                self.open.append(ticket)
            case Shed(retry_after_s=after):
                assert after > 0

    @precondition(lambda self: self.open)
    @rule(data=st.data(), prompt=st.integers(1, 800), most=st.integers(1, 5000))
    def reserve(self, data: st.DataObject, prompt: int, most: int) -> None:
        ticket = data.draw(st.sampled_from(self.open))
        if ticket.reserved_tokens == 0:
            self.admission.reserve(ticket, prompt_tokens=prompt, max_tokens=most)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), twice=st.booleans())
    def leave(self, data: st.DataObject, twice: bool) -> None:
        ticket = data.draw(st.sampled_from(self.open))
        self.open.remove(ticket)
        self.admission.leave(ticket)
        if twice:
            self.admission.leave(ticket)

    @invariant()
    def books_are_the_sum_of_open_tickets(self) -> None:
        assert self.admission.in_flight == len(self.open) <= 5
        assert self.admission.reserved_tokens == sum(t.reserved_tokens for t in self.open)
        if len([t for t in self.open if t.reserved_tokens]) > 1:
            assert self.admission.reserved_tokens <= 500

    def teardown(self) -> None:
        for ticket in self.open:
            self.admission.leave(ticket)
        assert (self.admission.in_flight, self.admission.reserved_tokens) == (0, 0)


AdmissionMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestAdmissionMachine = AdmissionMachine.TestCase
