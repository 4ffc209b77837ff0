"""Rows of decoding, a token for each sequence a step; and what a busy neighbour takes of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from benchmarks.children import end_with_parent, stop
from benchmarks.engine.bench import Bench, Measured
from benchmarks.peers.driven import Spent

ROWS = (  # name, batch, context, its CPU row
    ("decode_b1", 1, 32, "cpu_per_token_b1"),
    ("decode_b1_2048", 1, 2048, None),
    ("decode_b8", 8, 256, None),
    ("decode_b32", 32, 256, "cpu_per_token_b32"),
)
BUSY_ROW, BUSY_ROUNDS = "decode_b1_busy", 5


def add_rows(bench: Bench) -> None:
    for name, batch, context, cpu_name in ROWS:
        has_busy_row = name == "decode_b1" and bench.wants(BUSY_ROW)
        if not has_busy_row and not bench.wants(name, cpu_name or name):
            continue
        prompts = bench.prompts(batch, context)
        bench.of_all(lambda engine, prompts=prompts: engine.start_decoding(prompts))  # type: ignore[misc]
        count = _steps(bench, batch)
        measured = bench.measure(lambda engine, _, count=count: engine.step(count))  # type: ignore[misc]
        if bench.wants(name):
            floor = bench.floor(batch=batch, new=1, context=context)
            bench.add(name, measured, tokens=batch, floor=floor)
        if cpu_name is not None and bench.wants(cpu_name):
            bench.add_cpu(cpu_name, measured, tokens=batch)
        if has_busy_row:
            _add_busy(bench, measured, count)
        bench.of_all(lambda engine: engine.stop_decoding())


def _steps(bench: Bench, batch: int) -> int:
    if batch == 1:  # short ones
        return 16 if bench.quick else 32
    return 6 if bench.quick else 24


def _add_busy(bench: Bench, quiet: Measured, count: int) -> None:
    """Ours and the best peer beside one process that never rests."""
    medians = {name: median(spent.s for spent in spents) for name, spents in quiet.peers.items()}
    best = min(
        (name for name in medians if name in bench.peers),
        key=lambda name: medians[name],
        default=None,
    )
    peers = {} if best is None else {best: bench.peers[best]}
    with _busy_process():
        busy = bench.measure(
            lambda engine, _: engine.step(count),
            rounds=bench.rounds(full=BUSY_ROUNDS, quick=3),
            peers=peers,
        )
    kept = [
        f"ours {compute} keeps {_kept(quiet.ours[compute], busy.ours[compute])}"
        for compute in bench.ours
    ]
    kept += [f"{name} {_kept(quiet.peers[name], spents)}" for name, spents in busy.peers.items()]
    bench.add(
        BUSY_ROW,
        busy,
        tokens=1,
        floor=bench.floor(batch=1, new=1, context=32),
        detail="of its rate without that process " + ", ".join(kept),
    )


def _kept(quiet: list[Spent], busy: list[Spent]) -> str:
    return f"{median(spent.s for spent in quiet) / median(spent.s for spent in busy):.0%}"


@contextmanager
def _busy_process() -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"],
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        yield
    finally:
        stop(process, patience_s=2.0)
