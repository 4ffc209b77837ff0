"""Forks in the scheduler: what they share with their leader, and what becomes of them without."""

from __future__ import annotations

from array import array

import pytest

from engine.schedule.events import (
    PromptTold,
    SequenceFailed,
)
from engine.schedule.pages import HoldKind, PageId
from engine.schedule.plan import StepPlan
from tests.engine.arena_runner import alone
from tests.engine.scheduler_bench import PAGE_SIZE, Bench, ids


def _lead_and_fork(bench: Bench, length: int, *, max_tokens: int = 9) -> StepPlan:
    """The plan in flight in which 2 forks from 1."""
    bench.submit(1, ids(length), max_tokens=max_tokens)
    bench.submit(2, ids(length), max_tokens=max_tokens, fork_of=1, seed=1)
    first = bench.step()
    assert first is not None
    assert [row.sequence_id for row in first.rows] == [1], "a fork waits for its leader"
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    assert [(row.sequence_id, len(row.token_ids)) for row in plan.rows] == [(1, 1), (2, 1)]
    return plan


def _apply(bench: Bench, plan: StepPlan) -> None:
    bench.events += bench.scheduler.apply(bench.runner.execute(plan), bench.now)


@pytest.mark.parametrize(("length", "copies"), [(2, 1), (4, 1), (5, 0), (8, 1), (9, 0), (11, 1)])
def test_a_fork_writes_into_no_page_of_its_leader(length: int, copies: int) -> None:
    """Its last prompt token is computed again: never in a shared page, full or not."""
    bench = Bench()
    plan = _lead_and_fork(bench, length)
    assert len(plan.copies) == copies
    leader, fork = (row.page_table[0] for row in plan.rows)
    whole = (length - 1) // PAGE_SIZE
    assert fork[:whole] == leader[:whole]
    assert not set(fork[whole:]) & set(leader)
    _apply(bench, plan)
    bench.drain()
    assert bench.tokens(1) == alone(ids(length), 9)
    assert bench.tokens(2) == alone(ids(length), 9, seed=1)
    assert bench.cached(2) == length - 1


def test_the_source_of_a_copy_is_not_given_away_while_the_step_runs() -> None:
    bench = Bench()
    plan = _lead_and_fork(bench, 7)
    (copy,) = plan.copies
    bench.events += bench.scheduler.abort(1, bench.now)
    assert bench.scheduler.pool.holds(PageId(copy.source), HoldKind.STEP)
    _apply(bench, plan)
    assert not bench.scheduler.pool.holds(PageId(copy.source), HoldKind.STEP)
    bench.drain()
    assert bench.tokens(2) == alone(ids(7), 9, seed=1)
    load = bench.scheduler.load()
    assert load.pages_free + load.pages_cached == load.pages_total


def test_a_copy_of_a_page_of_another_generation_fails_the_fork_too() -> None:
    bench = Bench()
    plan = _lead_and_fork(bench, 7)
    bench.runner.tags[plan.copies[0].source] += 1
    _apply(bench, plan)
    assert [type(bench.end(at)) for at in (1, 2)] == [SequenceFailed, SequenceFailed]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_forks_of_a_leader_that_left_go_their_own_way(steps: int) -> None:
    """It left before its prompt was begun, half computed, or just computed."""
    bench = Bench(step_tokens=16)
    bench.submit(1, ids(30))
    for fork in (2, 3):
        bench.submit(fork, ids(30), fork_of=1, seed=fork)
    for _ in range(steps):
        bench.step()
    bench.events += bench.scheduler.abort(1, bench.now)
    bench.drain()
    for fork in (2, 3):
        assert bench.tokens(fork) == alone(ids(30), 4, seed=fork)


def test_a_preempted_fork_with_tokens_resumes_its_own_history() -> None:
    bench = Bench(num_pages=9)
    bench.submit(1, ids(9), max_tokens=20)
    for fork in (2, 3):
        bench.submit(fork, ids(9), max_tokens=20, fork_of=1, seed=fork)
    bench.drain()
    assert bench.scheduler.preemptions > 0
    assert bench.tokens(1) == alone(ids(9), 20)
    for fork in (2, 3):
        assert bench.tokens(fork) == alone(ids(9), 20, seed=fork)


def test_the_copied_page_is_found_once_it_seals() -> None:
    bench = Bench()
    _apply(bench, _lead_and_fork(bench, 7, max_tokens=2))
    bench.drain()
    bench.submit(3, array("I", [*ids(7), *bench.tokens(2), 5]))
    bench.drain()
    assert bench.cached(3) == 8


def test_a_resumed_prompt_reads_no_cached_page_that_it_has_yet_to_tell_of() -> None:
    bench = Bench(step_tokens=7, max_running=4)
    bench.submit(1, ids(30))
    bench.drain()
    bench.submit(2, ids(30), prompt_logprobs=0)
    bench.step()  # told of tokens 1 to 7; token 8 is told by the last token of the second page
    bench.scheduler._preempt(bench.scheduler._running[2], set())
    bench.drain()
    told = [event for event in bench.events if isinstance(event, PromptTold)]
    positions = [at for part in told for at in range(part.start, part.start + len(part.entries))]
    assert positions == list(range(1, 30))
    starts = [row.start for plan in bench.runner.plans for row in plan.rows if row.sequence_id == 2]
    assert starts[:2] == [0, 4], "the page before what is told may be read"


def test_waiting_forks_count_one_token_of_load() -> None:
    bench = Bench()
    bench.submit(1, ids(30))
    bench.submit(2, ids(30), fork_of=1)
    bench.submit(3, ids(30), fork_of=1)
    assert bench.scheduler.load().uncached_tokens == 32
