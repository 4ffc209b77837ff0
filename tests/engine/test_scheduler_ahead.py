"""Planning one step ahead: when it is done, and what becomes of rows computed in vain."""

from __future__ import annotations

from array import array

import pytest

from engine.schedule.events import SequenceFailed, SequenceFinished, TokensProduced
from engine.schedule.pages import HoldKind
from engine.schedule.plan import StepPlan, StepResult
from policies.contract.wire import Usage
from tests.engine.arena_runner import alone
from tests.engine.scheduler_bench import PAGE_SIZE, Bench, ids


class AheadBench(Bench):
    """Keeps one step in flight, so that the next can be planned ahead of its result."""

    def take_off(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        return plan

    def ahead(self) -> StepPlan | None:
        plan = self.scheduler.plan_ahead(self.now)
        self.scheduler.invariants()
        return plan

    def land(self, plan: StepPlan, following: StepPlan | None = None) -> StepResult:
        """Compute a step, tell the one behind it, apply."""
        result = self.runner.execute(plan)
        if following is not None:
            following.follow(result)
        self.now += 0.01
        self.events += self.scheduler.apply(result, self.now)
        self.scheduler.invariants()
        return result


def rows(plan: StepPlan | None) -> list[int] | None:
    return None if plan is None else [row.sequence_id for row in plan.rows]


def test_a_prompts_first_token_and_those_after_it_are_computed_ahead() -> None:
    bench = AheadBench()
    bench.submit(1, ids(6), max_tokens=9)
    plan: StepPlan | None = bench.take_off()
    follows = []
    while plan is not None:
        following = bench.ahead()
        bench.land(plan, following)
        plan = following
        follows.append(plan and plan.follows)
    assert bench.tokens(1) == alone(ids(6), 9)
    assert bench.end(1).usage == Usage(6, 0, 9)
    assert follows == [(0,)] * 8 + [None], "the last token is known to be the last"
    assert not bench.scheduler.has_work
    assert bench.scheduler.pool.num_held == 0


def test_what_ends_by_its_length_has_no_row_and_the_others_go_on() -> None:
    bench = AheadBench()
    for sequence_id, most in ((1, 2), (2, 9), (3, 2), (4, 9)):
        bench.submit(sequence_id, ids(5, sequence_id), max_tokens=most)
    plan = bench.take_off()
    following = bench.ahead()
    assert following is not None
    assert following.follows == (0, 1, 2, 3)
    bench.land(plan, following)
    last = bench.ahead()
    assert last is not None
    assert rows(last) == [2, 4]
    assert last.follows == (1, 3)
    bench.land(following, last)
    bench.land(last)
    bench.drain()
    assert bench.tokens(3) == alone(ids(5, 3), 2)
    assert bench.tokens(4) == alone(ids(5, 4), 9)


def test_what_fills_its_context_has_no_row() -> None:
    bench = AheadBench(context_tokens=8)
    bench.submit(1, ids(5), max_tokens=20)
    plan = bench.take_off()
    for _ in range(2):
        following = bench.ahead()
        assert rows(following) == [1]
        bench.land(plan, following)
        assert following is not None
        plan = following
    assert bench.ahead() is None
    bench.land(plan)
    assert bench.tokens(1) == alone(ids(5), 3)
    assert not bench.scheduler.has_work


def test_a_row_behind_a_stop_token_is_computed_in_vain_on_pages_still_held() -> None:
    produced = alone(ids(7), 20)
    stop = next(token for token in produced[1:] if produced.index(token) == 1)
    bench = AheadBench()
    bench.submit(1, ids(7), max_tokens=20, stops=(stop,))
    plan = bench.take_off()
    second = bench.ahead()
    bench.land(plan, second)
    third = bench.ahead()
    assert second is not None
    assert third is not None
    bench.land(second, third)  # tells the stop token
    end = bench.end(1)
    assert isinstance(end, SequenceFinished)
    assert (end.reason, end.usage) == ("stop", Usage(7, 0, 2))
    (pages,) = third.rows[0].page_table
    assert len(pages) == 3, "the token in vain opened a page"
    assert [bench.scheduler.pool.holds(page, HoldKind.STEP) for page in pages] == [1, 1, 1]
    said = len(bench.events)
    bench.land(third)
    assert len(bench.events) == said
    assert bench.tokens(1) == produced[:2]
    assert bench.scheduler.pool.num_held == 0
    assert len(bench.scheduler.cache) == 2, "the tokens in vain were published"


@pytest.mark.parametrize("ended", ["abort", "finish", "expire"])
@pytest.mark.parametrize("launched", [True, False])
def test_an_end_beside_two_steps_in_flight_frees_pages_after_both(
    ended: str, launched: bool
) -> None:
    bench = AheadBench()
    bench.submit(1, ids(7), max_tokens=20)
    plan = bench.take_off()
    following = bench.ahead()
    assert following is not None
    if launched:
        bench.land(plan, following)
    match ended:
        case "abort":
            bench.events += bench.scheduler.abort(1, bench.now)
        case "finish":
            bench.events += bench.scheduler.finish(1, 0, bench.now)
        case _:
            bench.events += bench.scheduler.expire(float("inf"))
    bench.scheduler.invariants()
    pages = following.rows[0].page_table[0]
    if not launched:
        bench.land(plan, following)
    assert all(bench.scheduler.pool.holds(page, HoldKind.STEP) for page in pages)
    bench.land(following)
    assert bench.scheduler.pool.num_held == 0
    assert len(bench.tokens(1)) == launched
    assert bench.end(1).usage.completion_tokens == (launched and ended != "finish")


def test_a_corrupt_row_ends_its_sequence_alone_and_what_follows_it_is_in_vain() -> None:
    bench = AheadBench()
    bench.submit(1, ids(9, 1), max_tokens=20)
    bench.submit(2, ids(9, 2), max_tokens=20)
    bench.step()
    plan = bench.take_off()
    following = bench.ahead()
    assert following is not None
    bench.runner.tags[plan.rows[0].page_table[0][0]] += 1
    assert bench.land(plan, following).corrupt == (0,)
    end = bench.end(1)
    assert isinstance(end, SequenceFailed)
    assert end.code == "page_integrity"
    bench.land(following)
    bench.drain()
    assert bench.tokens(1) == alone(ids(9, 1), 1)
    assert bench.tokens(2) == alone(ids(9, 2), 20)


# --- when the result must come first --------------------------------------------------------------


def test_a_waiting_sequence_that_could_start_stops_the_planning_ahead() -> None:
    bench = AheadBench(max_running=3)
    for sequence_id in (1, 2):
        bench.submit(sequence_id, ids(5, sequence_id), max_tokens=20)
    plan = bench.take_off()
    bench.submit(3, ids(5, 3), max_tokens=20)
    assert bench.ahead() is None
    bench.land(plan)
    plan = bench.take_off()
    assert rows(plan) == [1, 2, 3]
    bench.submit(4, ids(5, 4), max_tokens=20)
    following = bench.ahead()
    assert rows(following) == [1, 2, 3], "there is no room for the fourth"
    bench.land(plan, following)
    bench.scheduler.abort(2, bench.now)
    assert bench.ahead() is None, "now there is"
    assert following is not None
    bench.land(following)
    bench.drain()
    for sequence_id in (1, 3, 4):
        assert bench.tokens(sequence_id) == alone(ids(5, sequence_id), 20)


def test_room_that_is_sure_to_come_stops_the_planning_ahead() -> None:
    bench = AheadBench(max_running=2)
    bench.submit(1, ids(5, 1), max_tokens=1)
    bench.submit(2, ids(5, 2), max_tokens=20)
    bench.submit(3, ids(5, 3), max_tokens=20)
    plan = bench.take_off()
    assert bench.ahead() is None
    bench.land(plan)
    assert rows(bench.take_off()) == [2, 3]


def test_a_half_computed_prompt_stops_the_planning_ahead() -> None:
    bench = AheadBench(step_tokens=8)
    bench.submit(1, ids(20), max_tokens=4)
    plan = bench.take_off()
    assert bench.ahead() is None
    bench.land(plan)
    bench.land(bench.take_off())
    plan = bench.take_off()  # the prompt's end
    assert rows(bench.ahead()) == [1]


def test_a_prompt_that_got_no_room_in_the_step_stops_the_planning_ahead() -> None:
    bench = AheadBench(step_tokens=8, prefill_tokens_per_s=1.0)
    bench.submit(1, ids(20, 1), max_tokens=4)
    bench.step()
    bench.submit(2, ids(7, 2), max_tokens=4)
    bench.submit(3, ids(1, 3), max_tokens=4)
    plan = bench.take_off()
    assert rows(plan) == [3, 2], "the shorter ones fill the step"
    assert bench.ahead() is None
    bench.land(plan)
    bench.drain()


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_a_penalty_needs_the_history_and_stops_the_planning_ahead(penalty: str) -> None:
    bench = AheadBench()
    bench.submit(1, ids(5), max_tokens=3, **{penalty: 1})
    plan = bench.take_off()
    assert bench.ahead() is None
    bench.land(plan)
    bench.drain()


def test_pages_that_only_a_preemption_would_give_stop_the_planning_ahead() -> None:
    bench = AheadBench(num_pages=4, context_tokens=16)
    bench.submit(1, ids(8, 1), max_tokens=8)
    bench.step()
    plan = bench.take_off()  # of the third page
    taken = bench.scheduler.pool.take(HoldKind.TRANSFER)
    assert taken is not None
    for _ in range(3):
        following = bench.ahead()
        assert following is not None
        bench.land(plan, following)
        plan = following
    assert bench.ahead() is None
    bench.scheduler.pool.release([taken], HoldKind.TRANSFER)
    following = bench.ahead()
    assert rows(following) == [1]
    bench.land(plan, following)
    assert bench.scheduler.preemptions == 0


def test_idle_pages_are_evicted_for_a_step_ahead() -> None:
    bench = AheadBench(num_pages=6, context_tokens=24)
    bench.submit(1, ids(15, 1), max_tokens=2)
    bench.drain()
    assert bench.scheduler.pool.num_cached == 4
    bench.submit(2, ids(7, 2), max_tokens=9)
    plan: StepPlan | None = bench.take_off()
    while plan is not None:
        following = bench.ahead()
        bench.land(plan, following)
        plan = following
    assert bench.tokens(2) == alone(ids(7, 2), 9)
    assert bench.end(2).usage.completion_tokens == 9
    assert bench.scheduler.preemptions == 0


def test_at_most_two_steps_are_in_flight() -> None:
    bench = AheadBench()
    bench.submit(1, ids(5), max_tokens=9)
    with pytest.raises(RuntimeError, match="0 steps are in flight"):
        bench.scheduler.plan_ahead(0.0)
    bench.take_off()
    assert bench.ahead() is not None
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        bench.scheduler.plan_ahead(0.0)
    with pytest.raises(RuntimeError, match="still in flight"):
        bench.scheduler.plan(0.0)


def test_results_are_applied_in_order() -> None:
    bench = AheadBench()
    bench.submit(1, ids(5), max_tokens=9)
    plan, following = bench.take_off(), bench.ahead()
    assert following is not None
    following.follow(bench.runner.execute(plan))
    with pytest.raises(ValueError, match="not next"):
        bench.scheduler.apply(bench.runner.execute(following), 0.0)


def test_a_token_that_is_not_due_cannot_be_followed() -> None:
    bench = AheadBench()
    bench.submit(1, ids(5), max_tokens=9)
    plan, following = bench.take_off(), bench.ahead()
    assert following is not None
    bench.runner.not_due = {1}
    with pytest.raises(ValueError, match="chose no token"):
        following.follow(bench.runner.execute(plan))


# --- equality -------------------------------------------------------------------------------------


def test_tokens_and_usages_are_those_of_steps_planned_one_by_one() -> None:
    def run(overlaps: bool) -> tuple[dict[int, list[int]], dict[int, object]]:
        bench = AheadBench(num_pages=24, context_tokens=60, step_tokens=16, max_running=4)
        stops = tuple(range(0, 50, 9))
        for sequence_id in range(1, 13):
            prompt = ids(3 + 2 * sequence_id, sequence_id % 3)
            bench.submit(sequence_id, prompt, max_tokens=3 * sequence_id, stops=stops)
        num_ahead = 0
        plan = bench.scheduler.plan(bench.now)
        while plan is not None:
            following = bench.ahead() if overlaps else None
            num_ahead += following is not None
            bench.land(plan, following)
            plan = following or bench.scheduler.plan(bench.now)
        assert overlaps == (num_ahead > 10)
        tokens: dict[int, list[int]] = {}
        for event in bench.events:
            if isinstance(event, TokensProduced):
                tokens.setdefault(event.sequence_id, []).extend(event.tokens)
        return tokens, {key: (bench.end(key).usage.completion_tokens) for key in tokens}

    assert run(True) == run(False)


def test_rows_in_flight_keep_their_lists_while_a_sequence_grows() -> None:
    bench = AheadBench()
    bench.submit(1, array("I", ids(PAGE_SIZE)), max_tokens=9)
    plan = bench.take_off()
    following = bench.ahead()
    assert following is not None
    assert len(plan.rows[0].page_table[0]) == len(plan.rows[0].generations[0]) == 1
    assert len(following.rows[0].page_table[0]) == len(following.rows[0].generations[0]) == 2
