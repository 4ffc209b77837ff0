"""The backlog of an engine that computes, reports late and is asked by several gateways."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from policies.backlog import Backlog, Credit
from tests.state_machines import run_machine


def test_progress_of_a_running_prompt_is_no_backlog() -> None:
    backlog = Backlog()
    credit = backlog.open(4000)
    backlog.advance(credit, 3488, step=1)
    assert backlog.tokens == 3488
    backlog.take_report(4000, step=0)  # made before that step: the same work, not another's
    assert (backlog.ours, backlog.others) == (3488, 0)
    backlog.take_report(3988, step=1)
    assert (backlog.ours, backlog.others) == (3488, 500)
    backlog.answer(credit, step=8)
    assert backlog.tokens == 500


def test_a_smaller_hit_than_expected_is_more_work() -> None:
    backlog = Backlog()
    credit = backlog.open(100)
    backlog.advance(credit, 900, step=1)
    assert backlog.tokens == 900
    backlog.close(credit)
    backlog.advance(credit, 800, step=2)  # a late frame of what was given up
    assert backlog.tokens == 0


def test_what_was_left_before_its_next_step_is_not_anothers() -> None:
    backlog = Backlog()
    credit = backlog.open(1000)
    backlog.advance(credit, 900, step=7)
    backlog.close(credit)
    backlog.take_report(900, step=7)  # the engine had not heard of it
    assert backlog.tokens == 0


@dataclass
class Prompt:
    """As the engine sees it; gone from its books when tokens_left is 0 or its abort arrives."""

    tokens_left: int
    credit: Credit
    is_closed: bool = False


@dataclass
class Engine:
    step: int = 0
    prompts: list[Prompt] = field(default_factory=list)
    others_tokens: int = 0


class Told(RuleBasedStateMachine):
    """One gateway's book beside an engine: steps in order, reports as late as they like.

    alone: it is the only gateway and knows every hit, so nothing counts as another's but prompts
    that were left before the engine heard of it, and these until the next report.
    """

    @initialize(alone=st.booleans())
    def start(self, alone: bool) -> None:
        self.alone = alone
        self.backlog = Backlog()
        self.engine = Engine()
        self.report = 0, 0
        self.unheard_tokens = 0  # in that report, of prompts that are left by now
        self.most_of_others = 0

    @rule(tokens=st.integers(1, 5000), guess=st.integers(1, 5000))
    def dispatch(self, tokens: int, guess: int) -> None:
        credit = self.backlog.open(tokens if self.alone else guess)
        self.engine.prompts.append(Prompt(tokens, credit))

    @precondition(lambda self: not self.alone)
    @rule(tokens=st.integers(1, 3000))
    def another_gateway_asks(self, tokens: int) -> None:
        self.engine.others_tokens += tokens

    @precondition(lambda self: self.engine.prompts or self.engine.others_tokens)
    @rule(pick=st.integers(0, 99), budget=st.sampled_from([1, 64, 512, 4000]))
    def step(self, pick: int, budget: int) -> None:
        engine = self.engine
        engine.step += 1
        engine.others_tokens = max(0, engine.others_tokens - budget)
        engine.prompts = [one for one in engine.prompts if not one.is_closed]
        if engine.prompts:
            prompt = engine.prompts[pick % len(engine.prompts)]
            prompt.tokens_left = max(0, prompt.tokens_left - budget)
            if prompt.tokens_left:
                self.backlog.advance(prompt.credit, prompt.tokens_left, engine.step)
                assert prompt.credit.tokens == prompt.tokens_left
            else:
                engine.prompts.remove(prompt)
                self.backlog.answer(prompt.credit, engine.step)

    @precondition(lambda self: self.engine.prompts)
    @rule(pick=st.integers(0, 99))
    def the_client_leaves(self, pick: int) -> None:
        prompt = self.engine.prompts[pick % len(self.engine.prompts)]
        if not prompt.is_closed:
            self.unheard_tokens += prompt.tokens_left
        prompt.is_closed = True  # the engine hears of it before its next step
        self.backlog.close(prompt.credit)
        self.backlog.close(prompt.credit)

    @rule()
    def a_report_is_made(self) -> None:
        ours = sum(one.tokens_left for one in self.engine.prompts)
        closed = [one for one in self.engine.prompts if one.is_closed]
        self.unheard_tokens = sum(one.tokens_left for one in closed)
        self.report = self.engine.others_tokens + ours, self.engine.step

    @rule()
    def it_comes(self) -> None:
        self.backlog.take_report(*self.report)
        self.most_of_others = self.unheard_tokens

    @invariant()
    def ours_is_what_is_open(self) -> None:
        if not hasattr(self, "backlog"):
            return
        assert self.backlog.ours == sum(one.credit.tokens for one in self.engine.prompts)
        assert self.backlog.others >= 0
        assert not self.alone or self.backlog.others <= self.most_of_others

    def teardown(self) -> None:
        if not hasattr(self, "backlog"):
            return
        for prompt in self.engine.prompts:
            self.backlog.close(prompt.credit)
        self.backlog.take_report(0, self.engine.step)
        assert self.backlog.tokens == 0


def test_backlog_machine() -> None:
    run_machine(Told, 60)


@pytest.mark.slow
def test_backlog_machine_full() -> None:
    run_machine(Told, int(os.environ.get("KAGARI_EXAMPLES", "3000")))
