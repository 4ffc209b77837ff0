"""Each engine of a Kagari on a core of its own; all others on those that are left, if any are."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.children import children
from gateway.demo.stack import Stack

NUM_ENGINES = 2
USABLE = sorted(os.sched_getaffinity(0))
ENGINE_CORES = USABLE[-NUM_ENGINES:]
OTHER_CORES = USABLE[:-NUM_ENGINES] or USABLE


def keep_off_engines() -> None:
    """This process, and what it starts from now on, as far as there are cores for that."""
    os.sched_setaffinity(0, OTHER_CORES)


def pin_engines(stack: Stack) -> list[int]:
    """Every thread of each engine to the engine's core; those it starts later follow. Their pids.

    Raises RuntimeError unless there are as many engines and cores as are measured.
    """
    engines = [
        pid
        for name, agent in sorted(stack.ready["pids"].items())
        if name != "gateway"
        for pid in children(agent)
    ]
    if len(engines) != NUM_ENGINES or len(ENGINE_CORES) != NUM_ENGINES:
        raise RuntimeError(f"engines {engines} on cores {ENGINE_CORES}: {NUM_ENGINES} of each")
    for pid, core in zip(engines, ENGINE_CORES, strict=True):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
    return engines


def told() -> str:
    shares = "shared by" if OTHER_CORES is USABLE else f"beside cores {OTHER_CORES} of"
    return f"engines of one thread on cores {ENGINE_CORES}, {shares} gateway and load generator"
