"""An engine beside programs that never rest: it says the same, and its books balance."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.execute.kernels.cpu import library
from engine.execute.runner import ModelRunner, RunnerConfig, load_runner
from policies.contract.wire import Sampling, Usage, pack_ids
from tests.engine.engine_bench import EngineBench
from tests.engine.execute.conftest import Spec

PROMPTS = [array("I", range(first, first + length)) for first, length in
           ((500, 100), (40, 3), (900, 70))]  # fmt: skip
TOKENS = 8
BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@contextmanager
def busy_loops() -> Iterator[None]:
    """One for each core that we may use; gone at the end, by themselves if we are killed."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def answers(runner: ModelRunner) -> list[list[int]]:
    """Greedy tokens of all prompts together, and the engine's word that it is at rest."""
    bench = EngineBench(
        runner,
        vocab_size=runner.vocab_size,
        num_pages=32,
        page_size=64,
        context_tokens=1024,
        step_tokens=128,
    )
    for lane, prompt in enumerate(PROMPTS):
        bench.submit(1, (lane,), prompt=pack_ids(prompt), sampling=Sampling(TOKENS, temperature=0))
    bench.drain()
    assert bench.failures() == []
    usages = {record.lane: record.usage for record in bench.records}
    assert usages == {at: Usage(len(ids), 0, TOKENS) for at, ids in enumerate(PROMPTS)}
    load = bench.engine.scheduler.load()
    assert (load.waiting_sequences, load.running_sequences, load.uncached_tokens) == (0, 0, 0)
    assert (load.preemptions, load.pages_held, load.pages_free + load.pages_cached) == (0, 0, 32)
    assert load.prefill_tokens_per_s > 0
    assert load.decode_tokens_per_s > 0
    return [bench.tokens[1, lane] for lane in range(len(PROMPTS))]


def test_busy_neighbours_change_nothing_but_the_time(model_path: Path) -> None:
    """More threads than free cores: one that is descheduled inside a kernel must not stop it."""
    if library.load(threads=1) is None:
        pytest.skip(f"torch's threads wait for each other: {library.why_absent()}")
    config = RunnerConfig(num_pages=32, page_size=64, device="cpu", threads=2, step_tokens=128)
    runner = load_runner(Spec(str(model_path)), config)
    quiet = answers(runner)
    with busy_loops():
        beside = answers(runner)
    assert beside == quiet
