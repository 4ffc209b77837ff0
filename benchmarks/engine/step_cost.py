"""Rows about our own steps: what is not spent in kernels, what overlap, mixing prompts in and pages
that sequences share do."""

from __future__ import annotations

from statistics import median

from benchmarks.beside import Beside, Figure, compared
from benchmarks.engine.bench import SUFFIXES, Bench

OVERHEAD, MIXED, SHARED = "step_overhead_b1", "mixed_step", "shared_prefix_step"
OVERHEAD_LIMIT = 0.10  # of a step at batch 1
OVERLAPS = (("overlap_b1", 1, 64), ("overlap_b8", 8, 24))  # name, batch, steps of a round
DECODES, CHUNK, CONTEXT = 31, 256, 256
AGENTS, PREFIX, END = 24, 1280, 64  # of SHARED; tokens


def add_rows(bench: Bench) -> None:
    if bench.wants(OVERHEAD):
        _add_overhead(bench)
    for name, batch, count in OVERLAPS:
        if bench.wants(name):
            _add_overlap(bench, name, batch, count)
    if bench.wants(MIXED):
        _add_mixed(bench)
    if bench.wants(SHARED):
        _add_shared(bench)


def _add_overhead(bench: Bench) -> None:
    for compute, ours in bench.ours.items():
        name = f"{OVERHEAD}{SUFFIXES[compute]}"
        ours.start_decoding([bench.prompt(32)])
        steps: list[list[float]] | None = ours.call("kernel_shares", 40 if bench.quick else 200)
        ours.stop_decoding()
        if steps is None:
            bench.leave_out(name, "no compiled kernels serve here: g++ brings them")
            continue
        share = median(1 - kernels / whole for whole, kernels in steps)
        whole_s, kernels_s = (median(column) for column in zip(*steps, strict=True))
        detail = f"{(whole_s - kernels_s) * 1e6:.0f} µs of {whole_s * 1e6:.0f} outside kernels"
        bench.add_row(
            compared(
                name,
                share,
                {"allowed": OVERHEAD_LIMIT},
                "share of a step",
                more_is_better=False,
                detail=detail,
            )
        )


def _add_overlap(bench: Bench, name: str, batch: int, count: int) -> None:
    """Planned while the step before computes, beside one after the other, as served by default."""
    for compute, ours in bench.ours.items():
        bench.neighbours.cores()
        ours.start_decoding(bench.prompts(batch, CONTEXT))
        rounds: list[tuple[float, float]] = []
        for _ in range(bench.rounds()):
            overlapped = median(ours.call("steps_with_overlap", count))
            rounds.append((overlapped, ours.step(count).s))
        ours.stop_decoding()
        on, off = (median(column) for column in zip(*rounds, strict=True))
        ratio = median(without / overlapped for overlapped, without in rounds)
        bench.add_row(
            Beside(
                f"{name}{SUFFIXES[compute]}",
                on,
                "s",
                more_is_better=False,
                peers={"without overlap": Figure(off, ratio)},
                detail=f"neighbours {bench.neighbours.cores():.1f} cores",
            )
        )


def _add_mixed(bench: Bench) -> None:
    """A step of decoding sequences and a chunk of a prompt, beside a step of each alone."""
    for compute, ours in bench.ours.items():
        bench.neighbours.cores()
        ours.call("prepare_mixed", bench.prompts(DECODES, CONTEXT), bench.prompt(CHUNK))
        rounds = [ours.call("mixed_steps") for _ in range(bench.rounds(full=11, quick=5))]
        mixed, decodes, chunk = (median(column) for column in zip(*rounds, strict=True))
        ratio = median((apart + alone) / one for one, apart, alone in rounds)
        peers = {"its parts alone": Figure(decodes + chunk, ratio)}
        detail = (
            f"{DECODES} decodes {decodes * 1e3:.1f} ms, {CHUNK} tokens of a prompt "
            f"{chunk * 1e3:.1f} ms, neighbours {bench.neighbours.cores():.1f} cores"
        )
        name = f"{MIXED}{SUFFIXES[compute]}"
        bench.add_row(Beside(name, mixed, "s", more_is_better=False, peers=peers, detail=detail))


def _add_shared(bench: Bench) -> None:
    """A step of sequences that begin alike, as agents' do, beside one of as many in own pages."""
    for compute, ours in bench.ours.items():
        bench.neighbours.cores()
        ours.call("prepare_shared", bench.prompt(PREFIX), bench.prompts(AGENTS, END))
        rounds = [ours.call("shared_steps") for _ in range(bench.rounds(full=21, quick=11))]
        shared, apart = (median(column) for column in zip(*rounds, strict=True))
        ratio = median(alone / together for together, alone in rounds)
        detail = (
            f"{AGENTS} decodes, {PREFIX} tokens of {PREFIX + END} the same, "
            f"neighbours {bench.neighbours.cores():.1f} cores"
        )
        peers = {"in pages of their own": Figure(apart, ratio)}
        name = f"{SHARED}{SUFFIXES[compute]}"
        bench.add_row(Beside(name, shared, "s", more_is_better=False, peers=peers, detail=detail))
