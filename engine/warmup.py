"""Run a loaded runner before it serves, to know its prefill rate from the first request."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from engine.config import ScheduleConfig
from engine.schedule.plan import Runner
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from policies.contract.page_keys import KEY_BYTES
from policies.contract.wire import Sampling

_FIRST_TOKENS = 64
_WHOLE_STEPS = 3  # at most
_ENOUGH_S = 0.1  # of work: what runs later corrects the rate


def work_clock(threads: int) -> Callable[[], float]:
    """Seconds that each of an engine's threads has computed, for a rate that busy cores do not cut.

    A rate measured too low in a busy moment keeps work away from a node, and so stays: only work
    corrects it.
    """
    return lambda: time.process_time() / threads


def measure_prefill(runner: Runner, config: ScheduleConfig, clock: Callable[[], float]) -> float:
    """Prefill tokens per second: the best of steps that double up to a full one, until enough was
    measured. Their pages are reassigned later like any other.

    A CPU is as quick with its first 64 tokens as with a whole step of them; a GPU needs many.
    """
    most = min(config.context_tokens, config.num_pages * config.page_size) - 1
    whole = max(1, min(config.step_tokens, most))
    tokens, whole_steps = min(_FIRST_TOKENS, whole), 0
    best, started = 0.0, clock()
    while whole_steps < _WHOLE_STEPS and clock() - started < _ENOUGH_S:
        best = max(best, tokens / max(_prefill_s(runner, config, clock, tokens), 1e-9))
        whole_steps += tokens == whole
        tokens = min(2 * tokens, whole)
    return best


def _prefill_s(
    runner: Runner, config: ScheduleConfig, clock: Callable[[], float], tokens: int
) -> float:
    """Seconds of one step over a prompt of so many tokens."""
    prompt = array("I", [0]) * tokens
    scheduler = Scheduler(config)
    scheduler.submit(
        NewSequence(0, prompt, bytes(KEY_BYTES), Sampling(max_tokens=1, temperature=0.0)), clock()
    )
    runner.begin(0, prompt)
    plan = scheduler.plan(clock())
    assert plan is not None, "an empty pool holds one step"
    begun = clock()
    scheduler.apply(runner.execute(plan), clock())
    runner.end(0)
    return clock() - begun
