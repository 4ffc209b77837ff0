"""The scheduler's known traps, one test each, named after the failure they forbid."""

from __future__ import annotations

import math
import subprocess
import sys
from array import array
from collections.abc import Callable

import pytest

from engine.schedule.events import (
    SequenceFailed,
    SequenceFinished,
    SequenceRefused,
)
from engine.schedule.pages import HoldKind, PageId
from engine.schedule.sequence import NewSequence, Sequence, State
from policies.contract.wire import Sampling, Usage
from tests.engine.arena_runner import alone
from tests.engine.scheduler_bench import PAGE_SIZE, ROOT, Bench, ids

# --- the prefix cache in the scheduler ------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 31])
def test_full_hit_still_computes_the_last_token(length: int) -> None:
    bench = Bench()
    bench.submit(1, ids(length))
    bench.drain()
    bench.submit(2, ids(length))
    bench.drain()
    assert bench.cached(2) == (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert bench.tokens(2) == bench.tokens(1) == alone(ids(length), 4)
    assert bench.end(2).usage == Usage(length, bench.cached(2), 4)


def test_the_next_turn_hits_what_the_last_one_generated() -> None:
    bench = Bench()
    bench.submit(1, ids(10), max_tokens=11)
    bench.drain()
    history = array("I", [*ids(10), *bench.tokens(1)])
    bench.submit(2, array("I", [*history, 7, 7]))
    bench.drain()
    assert bench.cached(2) == 20  # of 21: the last token was chosen and never computed


def test_pages_are_not_found_before_they_are_computed() -> None:
    bench = Bench(max_running=8)
    bench.submit(1, ids(16))
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    bench.submit(2, ids(16))
    assert bench.scheduler.cache.depth(Sequence(_new(3, ids(17)), 0.0).hit_keys(PAGE_SIZE)) == 0
    bench.scheduler.apply(bench.runner.execute(plan), 0.0)
    assert bench.scheduler.cache.depth(Sequence(_new(3, ids(17)), 0.0).hit_keys(PAGE_SIZE)) == 4


def test_an_identical_prompt_in_the_same_step_waits_one_step_and_hits() -> None:
    bench = Bench()
    bench.submit(1, ids(16))
    bench.submit(2, ids(16))
    first = bench.step()
    assert first is not None
    assert [row.sequence_id for row in first.rows] == [1]
    bench.drain()
    assert bench.cached(2) == 12
    assert bench.tokens(1) == bench.tokens(2)


def test_identical_sequences_in_flight_publish_once_and_keep_their_own_pages() -> None:
    bench = Bench()
    bench.submit(1, ids(6), max_tokens=20)
    bench.submit(2, ids(6), max_tokens=20)
    bench.drain()
    _, events = bench.scheduler.take_page_events()
    keys = [event.page_key for event in events if hasattr(event, "page_key")]
    assert len(keys) == len(set(keys)) == 25 // PAGE_SIZE
    assert bench.tokens(1) == bench.tokens(2) == alone(ids(6), 20)


def test_what_is_evicted_next_is_the_tail_and_found_at_once() -> None:
    bench = Bench()
    bench.submit(1, ids(17))
    bench.drain()
    order = list(bench.scheduler.pool.idle)
    assert len(order) == 5
    assert order == sorted(order, reverse=True), "pages were taken in order, so tails come first"


def test_another_tenant_finds_nothing() -> None:
    bench = Bench()
    bench.submit(1, ids(20))
    bench.drain()
    bench.submit(2, ids(20), root=b"s" * 32)
    bench.drain()
    assert bench.cached(2) == 0


def test_a_child_published_after_its_parent_was_evicted_brings_the_parent_back() -> None:
    bench = Bench(num_pages=20)
    bench.submit(1, ids(6), max_tokens=30)
    bench.submit(2, ids(6), max_tokens=30)
    while len(bench.tokens(2)) < 8:
        bench.step()
    # 2 computed copies of what 1 had published; 1 leaves and its pages are evicted.
    bench.scheduler.abort(1, bench.now)
    while bench.scheduler.cache.evict():
        pass
    while len(bench.tokens(2)) < 14:
        bench.step()
    keys = Sequence(_new(9, array("I", [*ids(6), *bench.tokens(2)])), 0.0).hit_keys(PAGE_SIZE)
    assert bench.scheduler.cache.depth(keys) >= 4


def _new(sequence_id: int, prompt: array[int]) -> NewSequence:
    return NewSequence(sequence_id, prompt, ROOT, Sampling(4))


# --- preemption -----------------------------------------------------------------------------------


def test_a_resumed_sequence_loses_no_history_and_runs_no_range_past_the_end() -> None:
    bench = Bench(num_pages=10, context_tokens=36)
    for sequence_id in (1, 2, 3):
        bench.submit(sequence_id, ids(7, seed=sequence_id), max_tokens=25)
    bench.drain()
    assert bench.scheduler.preemptions > 0
    for sequence_id in (1, 2, 3):
        assert bench.tokens(sequence_id) == alone(ids(7, seed=sequence_id), 25)
        assert bench.end(sequence_id).usage == Usage(7, 0, 25)


def test_the_victim_is_the_latest_admitted_and_the_oldest_is_never_preempted() -> None:
    bench = Bench(num_pages=10, context_tokens=36, step_tokens=64)
    for sequence_id in (1, 2, 3):
        bench.submit(sequence_id, ids(7, seed=sequence_id), max_tokens=25)
    gaps = 0
    while not any(isinstance(event, SequenceFinished) for event in bench.events):
        plan = bench.step()
        assert plan is not None
        rows = [row.sequence_id for row in plan.rows]
        assert len(rows) == len(set(rows))
        gaps += 1 not in rows
    assert gaps == 0


def test_a_prompt_waits_rather_than_be_preempted_half_computed() -> None:
    bench = Bench(num_pages=16, context_tokens=60)
    bench.submit(1, ids(28, seed=1), max_tokens=12)  # grows to 10 pages
    bench.step()
    bench.submit(2, ids(30, seed=2))  # needs the 8 pages that are free, and then 1 lacks one
    bench.drain()
    assert bench.scheduler.preemptions == 0
    assert bench.order() == [1, 2]


def test_prompts_that_starve_each_other_of_pages_do_not_stall() -> None:
    bench = Bench(num_pages=16, context_tokens=60, step_tokens=8, prefill_tokens_per_s=800.0)
    bench.submit(1, ids(40, seed=1))
    bench.step()
    bench.submit(2, ids(16, seed=2))
    bench.step()
    assert bench.scheduler.load().running_sequences == 2
    # A transfer takes the pages that both were promised.
    taken: list[PageId] = []
    while (page := bench.scheduler.pool.take(HoldKind.TRANSFER)) is not None:
        taken.append(page)
    plan = bench.step()
    assert plan is not None, "both half computed, and neither gave way"
    assert [row.sequence_id for row in plan.rows] == [1]
    while bench.step() is not None:
        pass
    bench.scheduler.pool.release(taken, HoldKind.TRANSFER)
    bench.drain()
    assert bench.tokens(1) == alone(ids(40, seed=1), 4)
    assert bench.tokens(2) == alone(ids(16, seed=2), 4)


def test_pages_held_elsewhere_make_work_wait_and_not_fail() -> None:
    bench = Bench(num_pages=8, context_tokens=30)
    taken: list[PageId] = []
    while (page := bench.scheduler.pool.take(HoldKind.TRANSFER)) is not None:
        taken.append(page)
    bench.submit(1, ids(9))
    assert bench.step() is None
    bench.scheduler.pool.release(taken, HoldKind.TRANSFER)
    bench.drain()
    assert bench.tokens(1) == alone(ids(9), 4)


# --- order and budget -----------------------------------------------------------------------------


def test_no_step_exceeds_the_token_budget_and_decoding_rows_come_first() -> None:
    bench = Bench(step_tokens=16)
    bench.submit(1, ids(5, seed=1), max_tokens=12)
    bench.step()
    bench.submit(2, ids(60, seed=2))
    mixed = 0
    for _ in range(6):
        plan = bench.step()
        assert plan is not None
        assert sum(len(row.token_ids) for row in plan.rows) <= 16
        if len(plan.rows) == 2:
            assert [len(row.token_ids) for row in plan.rows] in ([1, 15], [1, 1], [1, 60 - 45])
            mixed += 1
    assert mixed >= 4
    bench.drain()
    assert bench.tokens(2) == alone(ids(60, seed=2), 4)


def test_the_shortest_uncached_prompt_starts_first() -> None:
    bench = Bench(step_tokens=32, prefill_tokens_per_s=1.0)
    bench.submit(9, ids(48, seed=9))
    bench.drain()
    bench.events.clear()
    bench.submit(1, ids(40, seed=1))
    bench.submit(2, ids(20, seed=2))
    bench.submit(3, ids(49, seed=9))  # the longest, but only its last token is uncached
    bench.drain()
    assert bench.order() == [3, 2, 1]


@pytest.mark.parametrize("num_tokens", [28, 116])
@pytest.mark.parametrize("ages", [True, False])
def test_a_long_prompt_does_not_starve_under_endless_short_ones(
    num_tokens: int, ages: bool
) -> None:
    """Larger than the budget, and short ones arrive faster than they are served."""
    rate = 400.0 if ages else 1e-9
    bench = Bench(num_pages=32, step_tokens=16, max_running=4, prefill_tokens_per_s=rate)
    bench.scheduler.rates.record = lambda **_: None  # type: ignore[method-assign]
    bench.submit(1, ids(num_tokens, seed=1))
    for short in range(2, 400):
        bench.submit(short, ids(8, seed=short), max_tokens=2)
        if short % 3 == 0:
            bench.step()
    assert bench.order()[0] != 1
    assert bool(bench.tokens(1)) == ages, "without ageing it starves: the load is real"


def test_equal_submits_give_equal_plans() -> None:
    def plans() -> list[tuple[int, ...]]:
        bench = Bench(num_pages=16, context_tokens=60)
        for sequence_id in range(1, 7):
            bench.submit(sequence_id, ids(5 + sequence_id, seed=sequence_id % 3), max_tokens=9)
        bench.drain()
        return [tuple(row.sequence_id for row in plan.rows) for plan in bench.runner.plans]

    assert plans() == plans()


# --- ends -----------------------------------------------------------------------------------------


def test_the_stop_token_is_counted_and_sent() -> None:
    produced = alone(ids(6), 20)
    stop = produced[5]
    position = produced.index(stop) + 1
    bench = Bench()
    bench.submit(1, ids(6), max_tokens=20, stops=(stop,))
    bench.drain()
    assert bench.tokens(1) == produced[:position]
    end = bench.end(1)
    assert isinstance(end, SequenceFinished)
    assert (end.reason, end.usage.completion_tokens) == ("stop", position)


def test_a_stop_token_before_min_tokens_does_not_end() -> None:
    produced = alone(ids(6), 20)
    bench = Bench()
    bench.submit(1, ids(6), max_tokens=3, stops=(produced[0],), min_tokens=2)
    bench.drain()
    assert bench.tokens(1)[:1] == produced[:1]
    assert len(bench.tokens(1)) > 1


def test_the_context_limit_ends_with_length() -> None:
    bench = Bench(context_tokens=12)
    bench.submit(1, ids(9), max_tokens=100)
    bench.drain()
    end = bench.end(1)
    assert isinstance(end, SequenceFinished)
    assert (end.reason, end.usage) == ("length", Usage(9, 0, 3))


def test_a_stop_string_bills_only_what_it_keeps() -> None:
    bench = Bench()
    bench.submit(1, ids(9), max_tokens=50)
    for _ in range(7):
        bench.step()
    (end,) = bench.scheduler.finish(1, 3, bench.now)
    assert isinstance(end, SequenceFinished)
    assert (end.reason, end.usage.completion_tokens) == ("stop", 3)
    assert bench.scheduler.finish(1, 3, bench.now) == []
    bench.submit(2, ids(9), max_tokens=50)
    bench.step()
    (end,) = bench.scheduler.finish(2, 99, bench.now)
    assert isinstance(end, SequenceFinished)
    assert end.usage.completion_tokens == 1  # never more than was produced


def test_an_abort_while_the_step_runs_frees_pages_only_after_it() -> None:
    bench = Bench()
    bench.submit(1, ids(16))
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    bench.scheduler.abort(1, 0.0)
    assert bench.scheduler.pool.num_free == 64 - 4
    assert bench.scheduler.apply(bench.runner.execute(plan), 0.1) == []
    assert bench.scheduler.pool.num_free == 64
    assert len(bench.scheduler.cache) == 0, "an aborted step published"


def test_a_late_or_repeated_result_is_refused() -> None:
    bench = Bench()
    bench.submit(1, ids(16))
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    result = bench.runner.execute(plan)
    bench.scheduler.apply(result, 0.1)
    with pytest.raises(ValueError, match="not in flight"):
        bench.scheduler.apply(result, 0.2)


def test_a_second_plan_waits_for_the_first_result() -> None:
    bench = Bench()
    bench.submit(1, ids(16))
    bench.scheduler.plan(0.0)
    with pytest.raises(RuntimeError, match="still in flight"):
        bench.scheduler.plan(0.0)


def test_a_deadline_ends_waiting_and_running_alike() -> None:
    bench = Bench(max_running=1)
    for sequence_id in (1, 2):
        bench.scheduler.submit(
            NewSequence(sequence_id, ids(9, sequence_id), ROOT, Sampling(50), 5.0), 0.0
        )
        bench.runner.begin(sequence_id, ids(9, sequence_id))
    bench.step()
    assert bench.scheduler.expire(4.9) == []
    ends = bench.scheduler.expire(5.0)
    assert [end.code for end in ends if isinstance(end, SequenceFailed)] == [
        "deadline_exceeded"
    ] * 2
    assert not bench.scheduler.has_work
    assert bench.scheduler.pool.num_held == 0


# --- page integrity -------------------------------------------------------------------------------


def test_a_page_of_another_generation_ends_its_sequence_alone_and_is_not_served_again() -> None:
    bench = Bench()
    bench.submit(1, ids(17, seed=1), max_tokens=30)
    bench.submit(2, ids(17, seed=2), max_tokens=30)
    bench.step()
    plan = bench.step()
    assert plan is not None
    row = next(row for row in plan.rows if row.sequence_id == 1)
    bench.runner.tags[row.page_table[0][0]] += 1
    bench.drain()
    end = bench.end(1)
    assert isinstance(end, SequenceFailed)
    assert end.code == "page_integrity"
    assert bench.tokens(2) == alone(ids(17, seed=2), 30)
    bench.submit(3, ids(17, seed=1))
    bench.drain()
    assert bench.cached(3) == 0
    assert bench.tokens(3) == alone(ids(17, seed=1), 4)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "submit", "code", "words"),
    [
        ({"context_tokens": 20}, {}, "context_length_exceeded", ["30 tokens", "19"]),
        ({"num_pages": 7}, {}, "pool_too_small", ["30 tokens", "28 tokens", "--kv-device-tokens"]),
        ({}, {"max_tokens": 0}, "invalid_submit", ["max_tokens"]),
        ({"max_waiting": 0}, {}, "engine_full", ["waiting"]),
    ],
)
def test_what_can_never_run_is_refused_at_submit(
    limits: dict[str, int], submit: dict[str, int], code: str, words: list[str]
) -> None:
    bench = Bench(**limits)
    with pytest.raises(SequenceRefused) as refused:
        bench.submit(1, ids(30), **submit)
    assert refused.value.code == code
    for word in words:
        assert word in refused.value.message
    assert not bench.scheduler.has_work
    assert bench.scheduler.load().pages_free == bench.config.num_pages


def test_a_state_change_outside_the_table_is_an_error() -> None:
    sequence = Sequence(_new(1, ids(3)), 0.0)
    sequence.leave(State.FINISHED)
    with pytest.raises(ValueError, match="finished → running"):
        sequence.transition(State.RUNNING)


# --- load -----------------------------------------------------------------------------------------


def test_load_counts_uncached_tokens_and_every_page_once() -> None:
    bench = Bench(step_tokens=16, max_running=2)
    bench.submit(1, ids(40, seed=1))
    bench.submit(2, ids(30, seed=2))
    assert bench.scheduler.load().uncached_tokens == 70
    bench.step()
    load = bench.scheduler.load()
    assert load.uncached_tokens == 54
    assert (load.running_sequences, load.waiting_sequences) == (1, 1)
    bench.drain()
    load = bench.scheduler.load()
    assert (load.uncached_tokens, load.pages_held) == (0, 0)
    assert load.pages_free + load.pages_cached == load.pages_total == 64


def test_the_rate_is_measured_from_steps() -> None:
    bench = Bench(prefill_tokens_per_s=5.0)
    for sequence_id in range(30):
        bench.submit(sequence_id, ids(60, seed=sequence_id))
        bench.drain()  # each step: up to 32 tokens in 0.01 s
    assert math.isclose(bench.scheduler.load().prefill_tokens_per_s, 3200, rel_tol=0.1)
    assert math.isclose(bench.scheduler.load().decode_tokens_per_s, 100, rel_tol=0.1)


def test_a_warm_prompts_short_step_does_not_pass_for_the_rate() -> None:
    bench = Bench(prefill_tokens_per_s=3200.0)
    bench.submit(1, ids(5))
    bench.drain()  # 5 tokens in 0.01 s say what a step costs, not what a token costs
    assert bench.scheduler.load().prefill_tokens_per_s == 3200.0


def test_the_schedule_folder_imports_no_torch() -> None:
    code = "import sys, engine.schedule.scheduler, engine.script, engine.engine, engine.process"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_every_state_has_a_way_out_but_the_last() -> None:
    moves: list[Callable[[Sequence], object]] = [
        lambda s: s.admit([], [], num_computed=0, num_sealed=0),
        lambda s: s.leave(State.WAITING),
        lambda s: s.admit([], [], num_computed=0, num_sealed=0),
        lambda s: s.leave(State.FINISHED),
    ]
    sequence = Sequence(_new(1, ids(3)), 0.0)
    seen = []
    for move in moves:
        move(sequence)
        seen.append(sequence.state)
    assert seen == [State.RUNNING, State.WAITING, State.RUNNING, State.FINISHED]


def test_waiting_for_room_is_no_use_of_the_pages_that_were_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(num_pages=8)
    uses: list[float] = []
    use = bench.scheduler.cache.use

    def counted(keys: list[bytes], now: float, *, retain_until: float = 0.0) -> None:
        uses.append(now)
        use(keys, now, retain_until=retain_until)

    monkeypatch.setattr(bench.scheduler.cache, "use", counted)
    bench.submit(1, ids(9), max_tokens=1)
    bench.drain()
    bench.submit(2, ids(20, seed=3), max_tokens=8)
    bench.step()
    uses.clear()
    bench.submit(3, ids(9) + ids(8, seed=1), max_tokens=1)
    bench.step()
    bench.step()
    assert not uses, "it waits"
    bench.drain()
    assert len(uses) == 1
