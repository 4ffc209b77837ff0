"""`python -m benchmarks.gateway.probe OUT …`: the gateway, with each callback of its loop timed.

It runs on asyncio's own loop, whose callbacks go through one Python method; uvloop's cannot be
timed from outside. A hold is a callback's time less what the thread then waited for a core that
others had (/proc/…/schedstat), so that it is ours alone. SIGUSR1 begins anew; the longest are
written to OUT at the end, as Found in JSON.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import os
import signal
import sys
import time
from asyncio.events import Handle
from pathlib import Path
from types import SimpleNamespace

import msgspec

import gateway.__main__ as product

KEPT = 20
WORTH_KEEPING_S = 0.0001


class Hold(msgspec.Struct, order=True):
    """One callback. asleep_ms: neither computing nor waiting for a core (a lock, a disk)."""

    held_ms: float
    what: str
    computing_ms: float
    asleep_ms: float
    collecting_ms: float  # of garbage; part of computing_ms


class Found(msgspec.Struct):
    callbacks: int
    longest: list[Hold]


class Probe:
    def __init__(self) -> None:
        self.callbacks = 0
        self.longest: list[Hold] = []  # a heap
        self._run = Handle._run
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._collected_s = 0.0
        gc.callbacks.append(self._on_collection)

    def begin(self, *_: object) -> None:
        self.callbacks = 0
        self.longest.clear()

    def _on_collection(self, phase: str, _facts: dict[str, int]) -> None:
        now = time.perf_counter()
        self._collected_s += now if phase == "stop" else -now

    def _waited_s(self) -> float:
        """How long this thread was ready and had no core."""
        return int(os.pread(self._schedstat, 80, 0).split()[1]) / 1e9

    def timed(self, handle: Handle) -> None:
        what = handle._callback
        collected, waited = self._collected_s, self._waited_s()
        computed, began = time.thread_time(), time.perf_counter()
        self._run(handle)
        took = time.perf_counter() - began
        self.callbacks += 1
        if took < WORTH_KEEPING_S:
            return
        computing = time.thread_time() - computed
        held = took - (self._waited_s() - waited)
        figures = (computing, max(held - computing, 0.0), self._collected_s - collected)
        hold = Hold(held * 1e3, _name(what), *(one * 1e3 for one in figures))
        heapq.heappush(self.longest, hold)
        if len(self.longest) > KEPT:
            heapq.heappop(self.longest)

    def write(self, path: Path) -> None:
        found = Found(self.callbacks, sorted(self.longest, reverse=True))
        path.write_bytes(msgspec.json.encode(found))


def _name(callback: object) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return getattr(owner.get_coro(), "__qualname__", "?")
    return getattr(callback, "__qualname__", repr(callback))


if __name__ == "__main__":
    probe = Probe()
    signal.signal(signal.SIGUSR1, probe.begin)
    Handle._run = lambda handle: probe.timed(handle)  # type: ignore[method-assign]
    product.uvloop = SimpleNamespace(run=asyncio.run)  # type: ignore[assignment]
    try:
        code = product.main(sys.argv[2:])
    finally:
        probe.write(Path(sys.argv[1]))
    sys.exit(code)
