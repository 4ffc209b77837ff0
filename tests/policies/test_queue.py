"""The gateway's queue: what an engine is given, whose turn it is, and that nobody starves."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from policies.backlog import Backlog, Credit
from policies.queue import Entry, FairQueue, QueueBounds, Window
from tests.state_machines import run_machine

RATE = 1000.0
BUDGET = 100
BOUNDS = QueueBounds()


def window(budget: int = BUDGET) -> tuple[Backlog, Window]:
    backlog = Backlog()
    return backlog, Window(backlog, budget)


def give(backlog: Backlog, one: Window, tokens: int) -> Credit:
    credit = backlog.open(tokens)
    one.sent(credit)
    return credit


def queue_of(*items: tuple[str, int], quantum: int = BUDGET) -> FairQueue[str]:
    """Items by (tenant, tokens), named after their place in the list; they came in its order, and
    no two rank the same."""
    queue: FairQueue[str] = FairQueue(quantum, BOUNDS)
    for at, (tenant, tokens) in enumerate(items):
        queue.add(Entry(f"{tenant}{at}", tenant, tokens, 1.001 * at / RATE))
    return queue


def take_all(queue: FairQueue[str], most: int | None = None) -> list[Entry[str]]:
    """With room for everything."""
    taken: list[Entry[str]] = []
    while (entry := queue.take(lambda _: True, tokens_of, RATE, most=most)) is not None:
        taken.append(entry)
    return taken


def tokens_of(entry: Entry[str]) -> int:
    return entry.tokens


# --- the window -----------------------------------------------------------------------------------


def test_an_engine_is_given_two_budgets() -> None:
    backlog, one = window()
    assert one.fits(200, 0.0, RATE)
    credit = give(backlog, one, 150)
    assert one.fits(50, 0.0, RATE)
    assert not one.fits(51, 0.0, RATE)
    backlog.advance(credit, 90, step=1)
    assert one.fits(110, 0.0, RATE)
    backlog.answer(credit, step=2)
    assert one.fits(200, 0.0, RATE)


def test_what_is_queued_here_is_not_there() -> None:
    backlog, one = window()
    credit = backlog.enqueue(500)
    assert (backlog.tokens, backlog.sent) == (500, 0)
    assert one.fits(200, 0.0, RATE)
    backlog.take_report(300, step=0)  # all of it another's: the engine was told of none of ours
    assert backlog.others == 300
    backlog.resize(credit, 120)
    backlog.send(credit)
    assert (backlog.ours, backlog.sent, backlog.queued) == (120, 120, 0)
    backlog.close(credit)
    assert (backlog.ours, backlog.queued) == (0, 0)


def test_a_large_prompt_enters_alone_and_leaves_room_for_one_budget() -> None:
    backlog, one = window()
    small = give(backlog, one, 1)
    assert not one.fits(201, 0.0, RATE)
    backlog.answer(small, step=1)
    assert one.fits(5000, 0.0, RATE)
    large = give(backlog, one, 5000)
    assert one.has_large
    assert one.fits(100, 0.0, RATE)
    assert not one.fits(101, 0.0, RATE)
    assert not one.fits(5000, 0.0, RATE)
    give(backlog, one, 60)
    assert not one.fits(41, 0.0, RATE)
    backlog.advance(large, 30, step=2)  # less than a budget is counted as what it is
    assert one.fits(110, 0.0, RATE)
    backlog.answer(large, step=3)
    assert not one.has_large


def test_what_others_asked_for_keeps_nobody_out_for_ever() -> None:
    backlog, one = window()
    backlog.take_report(600, step=1)
    one.reported(10.0)
    assert not one.fits(50, 10.0, RATE)
    assert one.outstanding(10.25, RATE) == 350
    assert one.fits(50, 10.46, RATE)
    assert one.fits(5000, 10.61, RATE)
    give(backlog, one, 10)  # now the engine may as well be at ours
    assert not one.fits(50, 10.7, RATE)


def test_a_gateway_that_is_always_busy_keeps_no_other_out() -> None:
    backlog, one = window()
    for second in range(3):
        backlog.take_report(450, step=second)  # each second as much again
        one.reported(float(second))
        fits = [tenth for tenth in range(10) if one.fits(150, second + tenth / 10, RATE)]
        if second == 0:
            assert fits[0] == 4  # 450 were there before it
            one.nobody_waits()
            assert not one.fits(150, 0.0, RATE)
    backlog.take_report(900, step=3)
    one.reported(3.0)
    one.nobody_waits()
    assert not one.fits(150, 3.0, RATE)
    backlog.take_report(900, step=4)
    one.reported(3.8)
    assert one.fits(150, 3.9, RATE)  # by then 900 are computed, whoever came since
    give(backlog, one, 150)
    assert not one.fits(1, 3.9, RATE)  # and the next one of ours is behind those


# --- whose turn it is -----------------------------------------------------------------------------


def test_the_shortest_of_a_tenant_first_and_a_late_one_not_before_an_old_one() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET, BOUNDS)
    for what, tokens, at in (("old", 90, 0.0), ("short", 10, 0.05), ("late", 10, 0.2)):
        queue.add(Entry(what, "a", tokens, at))
    assert [entry.what for entry in take_all(queue)] == ["short", "old", "late"]


def test_a_flood_of_one_tenant_delays_another_by_a_quantum() -> None:
    queue = queue_of(*[("flood", 50)] * 50, ("b", 50))
    taken = [entry.tenant for entry in take_all(queue)]
    assert taken.index("b") == 2


def test_rounds_in_which_nobody_may_send_pass_at_once() -> None:
    queue = queue_of(("a", 1_000_000), ("b", 2_000_000), quantum=1)
    assert [entry.tenant for entry in take_all(queue)] == ["a", "b"]


def test_who_does_not_fit_is_not_overtaken() -> None:
    queue = queue_of(("a", 80), ("b", 5))
    assert queue.take(lambda entry: entry.tokens < 50, tokens_of, RATE) is None
    assert len(queue) == 2
    assert [entry.tenant for entry in take_all(queue)] == ["a", "b"]


def test_large_ones_stand_aside_and_are_next_when_they_may() -> None:
    queue = queue_of(("a", 5000), ("b", 60), ("b", 60), ("a", 70))
    assert [entry.what for entry in take_all(queue, most=200)] == ["a3", "b1", "b2"]
    assert queue.take(lambda _: True, tokens_of, RATE, most=200) is None
    assert [entry.what for entry in take_all(queue)] == ["a0"]
    assert (len(queue), queue.tokens, queue.deficits) == (0, 0, {})


def test_a_prompt_whose_pages_came_meanwhile_counts_as_what_is_left() -> None:
    queue = queue_of(("a", 5000), ("b", 300))
    entry = queue.take(lambda one: one.tokens < 100, lambda one: one.tokens // 60, RATE)
    assert entry is not None
    assert (entry.what, entry.tokens, queue.tokens) == ("a0", 83, 300)


def test_a_full_queue_says_so() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET, QueueBounds(requests=3, tokens=1000))
    first = Entry("a", "a", 999, 0.0)
    queue.add(first)
    assert not queue.is_full
    queue.add(Entry("b", "a", 1, 0.0))
    assert queue.is_full  # by tokens
    queue.remove(first)
    queue.add(Entry("c", "b", 1, 0.0))
    assert not queue.is_full
    queue.add(Entry("d", "c", 1, 0.0))
    assert queue.is_full  # by requests


items = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 400)), min_size=1, max_size=40)


def test_of_equals_who_came_first_is_before() -> None:
    queue: FairQueue[str] = FairQueue(BUDGET, BOUNDS)
    entries = [Entry(str(number), "a", 10, 0.0) for number in range(3)]
    for entry in entries:
        queue.add(entry)
    assert [queue.before(entry, RATE) for entry in entries] == [0, 10, 20]
    assert queue.before(Entry("new", "a", 10, 0.0), RATE) == 30


@given(items=items, quantum=st.integers(1, 300))
@settings(deadline=None, max_examples=150)
def test_tenants_with_work_get_the_same_within_a_quantum_and_an_item(
    items: list[tuple[str, int]], quantum: int
) -> None:
    queue = queue_of(*items, quantum=quantum)
    left = Counter(tenant for tenant, _ in items)
    served = Counter({tenant: 0 for tenant in left})
    bound = quantum + max(tokens for _, tokens in items)
    for entry in take_all(queue):
        served[entry.tenant] += entry.tokens
        left[entry.tenant] -= 1
        waiting = [served[tenant] for tenant in left if left[tenant]]
        assert max(waiting, default=0) - min(waiting, default=0) <= bound
        if waiting:  # nor has one that just went got more than those who still wait
            assert served[entry.tenant] - min(waiting) <= bound
    assert sum(served.values()) == sum(tokens for _, tokens in items)
    assert (len(queue), queue.tokens, queue.deficits) == (0, 0, {})


@given(items=items, quantum=st.integers(1, 300), pick=st.integers(0, 39))
@settings(deadline=None, max_examples=150)
def test_what_is_said_to_come_before_is_what_comes(
    items: list[tuple[str, int]], quantum: int, pick: int
) -> None:
    queue = queue_of(*items, quantum=quantum)
    entries = list(queue.entries())
    entry = entries[pick % len(entries)]
    told = queue.before(entry, RATE)
    before = 0
    for one in take_all(queue):
        if one is entry:
            break
        before += one.tokens
    slack = 2 * quantum + max(tokens for _, tokens in items)
    others = len({tenant for tenant, _ in items}) - 1
    assert before <= told + slack * others
    assert told <= before + slack * others


# --- over time ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Prompt:
    number: int
    tenant: str
    tokens: int
    at: float
    credit: Credit
    entry: Entry[Prompt] | None
    sent_at: float | None = None


class OneEngine:
    """A gateway before an engine that computes at RATE, the shortest first, with ageing."""

    def __init__(self, budget: int) -> None:
        self.now = 0.0
        self.budget = budget
        self.backlog = Backlog()
        self.window = Window(self.backlog, budget)
        self.queue: FairQueue[Prompt] = FairQueue(budget, BOUNDS)
        self.there: list[Prompt] = []
        self.steps = 0
        self.asked: list[Prompt] = []

    def ask(self, tenant: str, tokens: int) -> Prompt:
        prompt = Prompt(
            len(self.asked), tenant, tokens, self.now, self.backlog.enqueue(tokens), None
        )
        prompt.entry = Entry(prompt, tenant, tokens, self.now)
        self.queue.add(prompt.entry)
        self.asked.append(prompt)
        self.pump()
        return prompt

    def leave(self, prompt: Prompt) -> None:
        if prompt.entry is not None:
            self.queue.remove(prompt.entry)
            prompt.entry = None
        elif prompt in self.there:
            self.there.remove(prompt)
            self.steps += 1  # which it is told of with its next step
        self.backlog.close(prompt.credit)
        self.pump()

    def compute(self, tokens: int) -> None:
        """A step: so many tokens, of the prompt that is first in the engine's order."""
        self.steps += 1
        self.now += tokens / RATE
        while tokens and self.there:
            prompt = min(self.there, key=lambda one: one.credit.tokens + RATE * one.at)
            done = min(tokens, prompt.credit.tokens)
            tokens -= done
            if done == prompt.credit.tokens:
                self.backlog.answer(prompt.credit, self.steps)
                self.there.remove(prompt)
            else:
                self.backlog.advance(prompt.credit, prompt.credit.tokens - done, self.steps)
        self.pump()

    def pump(self) -> None:
        while True:
            most = self.window.tokens if self.window.has_large else None
            entry = self.queue.take(
                lambda one: self.window.fits(one.tokens, self.now, RATE),
                lambda one: one.tokens,
                RATE,
                most=most,
            )
            if entry is None:
                return
            prompt = entry.what
            prompt.entry = None
            prompt.sent_at = self.now
            self.backlog.send(prompt.credit)
            self.window.sent(prompt.credit)
            self.there.append(prompt)


@pytest.mark.parametrize("rival", ["same", "other"])
def test_a_long_prompt_is_sent_though_short_ones_never_cease(rival: str) -> None:
    engine = OneEngine(BUDGET)
    engine.ask("a", 150)
    long = engine.ask("a", 4000)
    while long.sent_at is None:
        assert engine.now < 10.0
        engine.ask("a" if rival == "same" else "b", 50)
        engine.compute(50)
    assert long.sent_at <= 4.0 + 0.5  # its own length of waiting, and what was there before


class QueueMachine(RuleBasedStateMachine):
    """Prompts come, leave in the queue and behind it, and are computed."""

    @initialize(budget=st.integers(1, 150))
    def start(self, budget: int) -> None:
        self.engine = OneEngine(budget)

    @rule(tenant=st.sampled_from("abc"), tokens=st.integers(1, 600))
    def come(self, tenant: str, tokens: int) -> None:
        self.engine.ask(tenant, tokens)

    @precondition(lambda self: self.engine.asked)
    @rule(pick=st.integers(0, 1000))
    def leave(self, pick: int) -> None:
        self.engine.leave(self.engine.asked[pick % len(self.engine.asked)])

    @rule(tokens=st.integers(1, 200))
    def compute(self, tokens: int) -> None:
        self.engine.compute(tokens)

    @rule(others=st.integers(0, 400))
    def report(self, others: int) -> None:
        engine = self.engine
        engine.backlog.take_report(engine.backlog.sent + others, engine.steps)
        engine.window.reported(engine.now)
        assert engine.backlog.others == others
        engine.pump()

    @invariant()
    def no_more_than_two_budgets_unless_one_is_large(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        most = 2 * engine.budget
        left = sorted(prompt.credit.tokens for prompt in engine.there)
        assert sum(left) == engine.backlog.sent
        large = [prompt for prompt in engine.there if prompt.tokens > most]
        assert len(large) <= 1
        if large and large[0].credit.tokens > engine.budget:
            assert sum(left) - large[0].credit.tokens <= engine.budget
        else:
            assert sum(left) <= most

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        queued = [prompt for prompt in engine.asked if prompt.entry is not None]
        assert {prompt.entry for prompt in queued} == set(engine.queue.entries())
        assert len(engine.queue) == len(queued)
        tokens = sum(prompt.tokens for prompt in queued)
        assert engine.queue.tokens == engine.backlog.queued == tokens
        assert set(engine.queue.deficits) == {prompt.tenant for prompt in queued}
        if queued and not engine.there:
            assert engine.backlog.others, "an idle engine, and somebody waits"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for _ in range(100_000):
            if not engine.there and not len(engine.queue):
                break
            engine.compute(engine.budget)
        assert (len(engine.queue), engine.queue.tokens, engine.queue.deficits) == (0, 0, {})
        assert (engine.backlog.ours, engine.backlog.queued, engine.there) == (0, 0, [])


def test_queue_machine() -> None:
    run_machine(QueueMachine, 40)


@pytest.mark.slow
def test_queue_machine_full() -> None:
    run_machine(QueueMachine, int(os.environ.get("KAGARI_EXAMPLES", "3000")))
