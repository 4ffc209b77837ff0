"""What a step pays for integrity: the tags of all pages that it read, and a look at tiers' news."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.beside import Beside, Figure
from benchmarks.steps import Steps
from benchmarks.tiers.first_token import model_spec
from engine.config import ModelSpec
from engine.execute.page_memory import page_memory
from engine.execute.runner import RunnerConfig, load_runner
from engine.store.guard import Guard
from engine.store.host import HostTier
from engine.store.tiered import TieredStore

STREAMS = 8
CONTEXT_TOKENS = 1000
_RESAMPLES = 2000


def check_rows(name: str, *, steps: int) -> list[Beside]:
    spec = msgspec.convert(model_spec(name), ModelSpec)
    num_pages = STREAMS * (CONTEXT_TOKENS + steps + 64) // spec.page_size + STREAMS
    runner = load_runner(spec, RunnerConfig(num_pages=num_pages, page_size=64, step_tokens=512))
    layout = runner.arena.layout
    store = TieredStore([Guard(HostTier(layout, 8))], page_memory(runner.arena))
    chance = random.Random(1)
    driver = Steps(runner)
    streams = [
        driver.stream(chance.randrange(1000, 9000) for _ in range(CONTEXT_TOKENS))
        for _ in range(STREAMS)
    ]
    driver.generate(streams, 2, chunks=(64,))
    checked_s: list[float] = []
    bare_s: list[float] = []
    checks_s: list[float] = []
    check = runner._corrupt_rows  # what the step calls once its rows are read

    def timed(*arguments: object) -> set[int]:
        began = time.perf_counter()
        corrupt = check(*arguments)  # type: ignore[arg-type]
        store.take()
        checks_s.append(time.perf_counter() - began)
        return corrupt

    def step(check: Callable[..., set[int]]) -> float:
        runner._corrupt_rows = check  # type: ignore[method-assign]
        began = time.perf_counter()
        driver.step([(stream, 1) for stream in streams])
        return time.perf_counter() - began

    for at in range(steps // 2):
        for is_checked in (True, False) if at % 2 else (False, True):  # both orders, alike often
            (checked_s if is_checked else bare_s).append(
                step(timed if is_checked else lambda *_: set())
            )
    store.close(1.0)
    step_s, check_s = statistics.median(bare_s), statistics.median(checks_s)
    ratios = [checked / bare for checked, bare in zip(checked_s, bare_s, strict=True)]
    low, high = _interval(ratios, chance)
    return [
        Beside(
            "check_share",
            check_s,
            "s",
            False,
            {"step": Figure(step_s, step_s / check_s)},
            f"{check_s / step_s:.4%} of a step of {STREAMS} streams of {CONTEXT_TOKENS} tokens; "
            f"with ÷ without, paired: median {statistics.median(ratios):.4f}, 95 % in "
            f"[{low:.4f}, {high:.4f}]",
        )
    ]


def _interval(values: Sequence[float], chance: random.Random) -> tuple[float, float]:
    """95 % of the median, by resampling."""
    medians = sorted(
        statistics.median(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    return medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40]
