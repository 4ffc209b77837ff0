"""Run a loaded runner once before it serves, to know its prefill rate from the first request."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from engine.config import ScheduleConfig
from engine.schedule.plan import Runner
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from policies.contract.page_keys import KEY_BYTES
from policies.contract.wire import Sampling

_COMPLETION_TOKENS = 4


def measure_prefill(runner: Runner, config: ScheduleConfig, clock: Callable[[], float]) -> float:
    """Prefill tokens per second of one full step; its pages are reassigned later like any other."""
    most = min(config.context_tokens, config.num_pages * config.page_size) - _COMPLETION_TOKENS
    prompt = array("I", [0]) * max(1, min(config.step_tokens, most))
    sampling = Sampling(max_tokens=_COMPLETION_TOKENS, temperature=0.0)
    scheduler = Scheduler(config)
    scheduler.submit(NewSequence(0, prompt, bytes(KEY_BYTES), sampling), clock())
    runner.begin(0, prompt)
    while (plan := scheduler.plan(clock())) is not None:
        scheduler.apply(runner.execute(plan), clock())
    runner.end(0)
    return scheduler.rates.prefill_tokens_per_s
