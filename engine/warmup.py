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

_ROUNDS = 3  # at most; the best counts
_ENOUGH_S = 0.2  # of work: what runs later corrects the rate


def work_clock(threads: int) -> Callable[[], float]:
    """Seconds that each of an engine's threads has computed, for a rate that busy cores do not cut.

    A rate measured too low in a busy moment keeps work away from a node, and so stays: only work
    corrects it.
    """
    return lambda: time.process_time() / threads


def measure_prefill(runner: Runner, config: ScheduleConfig, clock: Callable[[], float]) -> float:
    """Prefill tokens per second of one full step; its pages are reassigned later like any other."""
    most = min(config.context_tokens, config.num_pages * config.page_size) - 1
    prompt = array("I", [0]) * max(1, min(config.step_tokens, most))
    sampling = Sampling(max_tokens=1, temperature=0.0)
    best, started = 0.0, clock()
    for _ in range(_ROUNDS):
        scheduler = Scheduler(config)
        scheduler.submit(NewSequence(0, prompt, bytes(KEY_BYTES), sampling), clock())
        runner.begin(0, prompt)
        plan = scheduler.plan(clock())
        assert plan is not None, "an empty pool holds one step"
        begun = clock()
        scheduler.apply(runner.execute(plan), clock())
        runner.end(0)
        best = max(best, len(prompt) / max(clock() - begun, 1e-9))
        if clock() - started > _ENOUGH_S:
            break
    return best
