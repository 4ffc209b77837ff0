"""Engine: messages of several links in, frames of each link out, one usage record an end."""

from __future__ import annotations

import time
from array import array

import pytest

from engine.config import ScheduleConfig
from engine.engine import Engine
from engine.schedule.plan import StepPlan, StepResult
from engine.schedule.scheduler import Scheduler
from policies.contract import wire
from policies.contract.wire import Abort, Drain, FinishLane, Sampling, Submit, pack_ids
from tests.engine.arena_runner import VOCAB, alone
from tests.engine.engine_bench import PROMPT, SALT, BreakingRunner, EngineBench, engine_info


def test_each_link_gets_its_own_frame_and_the_agent_the_usage() -> None:
    bench = EngineBench()
    bench.submit(1, (7,))
    bench.submit(3, (7,), prompt=pack_ids(PROMPT[3:]))
    bench.drain()
    assert bench.tokens[1, 7] == alone(PROMPT, 6)
    assert bench.tokens[3, 7] == alone(PROMPT[3:], 6)
    assert [type(rare).__name__ for channel, rare in bench.rare if channel == 1] == [
        "Started",
        "Finished",
    ]
    assert {(r.request_id, r.usage.completion_tokens) for r in bench.records} == {
        ("r1-(7,)", 6),
        ("r3-(7,)", 6),
    }
    assert not bench.runner.live


def test_many_lanes_share_the_prompt_through_the_cache() -> None:
    bench = EngineBench()
    bench.submit(1, (1, 2, 3))
    bench.drain()
    started = [rare.cached_tokens for _, rare in bench.rare if isinstance(rare, wire.Started)]
    assert started == [0, 8, 8]
    assert len({tuple(tokens) for tokens in bench.tokens.values()}) == 1
    seeds = {row.sequence_id: row.sampling.seed for p in bench.runner.plans for row in p.rows}
    assert sorted(seeds.values()) == [0, 1, 2], "equal noise would make n equal answers"


def test_a_repeated_submit_runs_once() -> None:
    bench = EngineBench()
    bench.submit(1, (1,), request_id="same")
    bench.submit(1, (1,), request_id="same")
    bench.drain()
    bench.submit(1, (1,), request_id="same")
    bench.drain()
    assert len(bench.records) == 1
    bench.submit(1, (1,), request_id="same", attempt=1)
    bench.drain()
    assert len(bench.records) == 2


def test_an_abort_of_an_unknown_lane_is_no_error() -> None:
    bench = EngineBench()
    bench.engine.handle(1, Abort((5,)))
    bench.engine.handle(1, FinishLane(5, 3))
    bench.engine.handle(1, Abort(()))
    assert bench.step() == []


def test_a_link_cut_aborts_all_streams_of_that_link_only() -> None:
    bench = EngineBench()
    bench.submit(1, (1, 2))
    bench.submit(2, (1,))
    bench.step()
    bench.engine.handle(1, Abort(()))
    bench.drain()
    reasons = {
        (channel, rare.lane): rare.reason
        for channel, rare in bench.rare
        if isinstance(rare, wire.Finished)
    }
    assert reasons == {(1, 1): "abort", (1, 2): "abort", (2, 1): "length"}
    assert bench.engine.scheduler.load().pages_held == 0


def test_a_lane_is_free_again_after_its_end() -> None:
    bench = EngineBench()
    bench.submit(1, (1,), request_id="a")
    bench.drain()
    bench.submit(1, (1,), request_id="b")
    bench.drain()
    assert [record.request_id for record in bench.records] == ["a", "b"]
    assert bench.failures() == []


def test_a_busy_lane_ends_both_who_claim_it() -> None:
    bench = EngineBench()
    bench.submit(1, (1,), request_id="a")
    bench.step()
    bench.submit(1, (1,), request_id="b")
    bench.drain()
    assert bench.failures() == [(1, 1, "lane_in_use")]
    assert [(r.request_id, r.reason) for r in bench.records] == [("a", "abort"), ("b", "error")]


def test_a_stop_string_ends_with_what_is_kept() -> None:
    bench = EngineBench()
    bench.submit(1, (4,))
    for _ in range(3):
        bench.step()
    bench.engine.handle(1, FinishLane(4, 2))
    bench.drain()
    (finished,) = [rare for _, rare in bench.rare if isinstance(rare, wire.Finished)]
    assert finished == wire.Finished(4, "stop", wire.Usage(10, 0, 2))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": b""}, "invalid_submit"),
        ({"prompt": b"123"}, "invalid_submit"),
        ({"prompt": pack_ids(array("I", [VOCAB]))}, "invalid_submit"),
        ({"salt": b"short"}, "invalid_submit"),
        ({"deadline_s": float("nan")}, "invalid_submit"),
        ({"prompt": pack_ids(array("I", [1] * 200))}, "context_length_exceeded"),
        ({"role": "prefill"}, "unsupported"),
        ({"grammar": "{}"}, "unsupported"),
        ({"transfer": b"x"}, "unsupported"),
        ({"deadline_s": -1.0}, "deadline_exceeded"),
    ],
)
def test_a_bad_submit_fails_its_lanes_and_nothing_else(fields: dict, code: str) -> None:
    bench = EngineBench()
    bench.submit(1, (1,))
    bench.submit(2, (8, 9), **fields)
    bench.drain()
    assert bench.failures() == [(2, 8, code), (2, 9, code)]
    assert bench.tokens == {(1, 1): alone(PROMPT, 6)}
    assert len(bench.records) == 3
    assert not bench.runner.live


def test_a_full_engine_refuses() -> None:
    bench = EngineBench(max_waiting=1)
    bench.submit(1, (1, 2))
    bench.drain()
    assert bench.failures() == [(1, 2, "engine_full")]


def test_a_draining_engine_takes_nothing_new_and_finishes_what_runs() -> None:
    bench = EngineBench()
    bench.submit(1, (1,))
    bench.step()
    bench.engine.handle(0, Drain())
    bench.submit(1, (2,))
    bench.drain()
    assert bench.failures() == [(1, 2, "draining")]
    assert bench.tokens[1, 1] == alone(PROMPT, 6)
    bench.engine.handle(0, Drain(drain=False))
    bench.submit(1, (3,))
    bench.drain()
    assert bench.tokens[1, 3] == alone(PROMPT, 6)


def test_a_deadline_passes_while_it_runs() -> None:
    bench = EngineBench()
    bench.submit(1, (1,), deadline_s=5.0)
    bench.step()
    bench.now += 5.0
    bench.drain()
    assert bench.failures() == [(1, 1, "deadline_exceeded")]
    assert bench.records[0].usage.completion_tokens == 1


def test_a_broken_runner_fails_every_sequence_and_leaves_no_page_held() -> None:
    bench = EngineBench(BreakingRunner(64, 4))
    bench.submit(1, (1,))
    bench.submit(2, (1,), prompt=pack_ids(PROMPT[3:]))
    bench.step()
    bench.step()
    with pytest.raises(ArithmeticError):
        bench.step()
    bench.read(bench.engine.fail("engine_error", "it broke"))
    assert bench.failures() == [(1, 1, "engine_error"), (2, 1, "engine_error")]
    assert not bench.engine.has_work


def test_news_tell_load_and_page_events_once() -> None:
    bench = EngineBench()
    bench.submit(1, (1,))
    bench.drain()
    news = [wire.decode_from_engine(bench.engine.news()[1]) for _ in range(2)]
    first, second = news
    assert isinstance(first, wire.EngineNews)
    assert isinstance(second, wire.EngineNews)
    assert first.first_event == 0
    assert [type(event).__name__ for event in first.events] == ["CacheCleared"] + ["PageStored"] * 3
    assert (second.first_event, second.events) == (4, [])
    report = first.report
    assert (report.engine, report.pages_held, report.pages_cached) == (2, 0, 3)
    assert report.pages_free + report.pages_cached == report.pages_total == 64
    assert report.rss_bytes > 1 << 20


class InstantRunner:
    """Costs nothing, so that a step's time is the engine's own."""

    def begin(self, sequence_id: int, prompt: array[int]) -> None: ...

    def end(self, sequence_id: int) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, tuple(9 if row.samples else None for row in plan.rows))


def test_a_step_of_32_rows_costs_little_beside_the_model() -> None:
    config = ScheduleConfig(
        num_pages=1024, page_size=64, context_tokens=4096, step_tokens=512, max_running=32
    )
    scheduler, runner = Scheduler(config), InstantRunner()
    engine = Engine(engine_info(), scheduler, runner, vocab_size=VOCAB, clock=time.monotonic)
    for lane in range(32):
        prompt = array("I", [lane] * 500)
        sampling = Sampling(400, stop_token_ids=(2, 3))
        engine.handle(1, Submit(f"{lane}", 0, 2, (lane,), pack_ids(prompt), SALT, sampling, 60.0))
    while scheduler.load().uncached_tokens:
        engine.step()
    best = 1.0
    for _ in range(150):
        started = time.perf_counter()
        engine.step()
        best = min(best, time.perf_counter() - started)
    assert best < 600e-6, f"{best * 1e6:.0f} µs a step"  # about 110 µs on an idle core
