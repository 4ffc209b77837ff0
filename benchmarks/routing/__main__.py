"""Choosing a node: the live policy beside published ones, on modelled nodes and a public trace.

Nodes are those of gateway/lab, with host memory and disk of their own; 16 and 64 of them serve 4
and 16 overlaid copies of the trace. Load 1 is 0.725 requests a second and node: a little more, and
even our queues grow for ever. Goodput is by the budget of an infinite cache
(gateway/lab/outcomes.py). Peers with settings take part with their defaults and with the best that
we know, cell by cell.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.beside import Beside, JsonRow, absent_rows, compared
from benchmarks.routing.published import (
    ApproximateRadix,
    KvEventCost,
    LeastRequests,
    RoundRobin,
    SessionHash,
)
from benchmarks.trace_file import TRACE, find_trace, read_or_exit
from gateway.lab.live_router import LiveRouter
from gateway.lab.nodes import DISK, HOST, NodeSpec
from gateway.lab.outcomes import Summary, summarise
from gateway.lab.run import Router, play
from gateway.lab.view import Told
from gateway.lab.workload import Request, TraceRow, from_rows, overlay, read_rows
from gateway.nodes.fleet import default_parameters

LOAD_1 = 0.725  # requests a second and node
LOADS = (0.7, 0.85)
LOST = 0.02  # of all page events

OURS = "kagari"
OURS_LOST = f"kagari, {LOST:.0%} of events lost"
NO_EVENTS = Told(is_on=False)

# name → (what makes a router, one for each setting, the default first; what events it is told)
Policies = dict[str, tuple[list[Callable[[], Router]], Told]]


@dataclass(frozen=True, slots=True)
class Fleet:
    """until_s: how much of the trace, at its pace here; quick_s: the same with --quick."""

    name: str
    speeds: Sequence[float]
    until_s: float
    quick_s: float


FLEETS = (
    Fleet("4 nodes", (1.0,) * 4, float("inf"), 1000.0),
    Fleet("16 nodes", (1.0,) * 16, 900.0, 300.0),
    Fleet("64 nodes", (1.0,) * 64, 400.0, 80.0),
    Fleet("16 nodes, rates 1:3", (0.5, 1.5) * 8, 900.0, 300.0),
)


def policies(*, quick: bool) -> Policies:
    """Settings beside the defaults: the match that a radix tree asks for, and how much a block to
    prefill weighs against one in use."""
    matches = (0.1,) if quick else (0.1, 0.25)
    scales = (16.0,) if quick else (4.0, 16.0, 64.0)
    parameters = default_parameters()

    def ours() -> Router:
        return LiveRouter(parameters)

    radix: list[Callable[[], Router]] = [ApproximateRadix]
    cost: list[Callable[[], Router]] = [KvEventCost]
    radix_best = radix + [partial(ApproximateRadix, match=match) for match in matches]
    cost_best = cost + [partial(KvEventCost, prefill_scale=scale) for scale in scales]
    return {
        "round robin": ([RoundRobin], NO_EVENTS),
        "least requests": ([LeastRequests], NO_EVENTS),
        "session hash": ([SessionHash], NO_EVENTS),
        "radix": (radix, NO_EVENTS),
        "radix, best": (radix_best, NO_EVENTS),
        "KV-event cost": (cost, Told()),
        "KV-event cost, best": (cost_best, Told()),
        OURS: ([ours], Told()),
        OURS_LOST: ([ours], Told(lost=LOST)),
    }


def run_cell(fleet: Fleet, requests: Sequence[Request], policies: Policies) -> dict[str, Summary]:
    """Each policy's summary, of its best setting in goodput."""
    specs = [NodeSpec(speed=speed, tiers=(HOST, DISK)) for speed in fleet.speeds]
    known: dict[object, Summary] = {}  # a setting is played once, though two names have it
    found: dict[str, Summary] = {}
    for name, (settings, told) in policies.items():
        for make in settings:
            if (make, told) not in known:
                outcome = play(requests, specs, make(), told)
                known[make, told] = summarise(outcome.works, outcome.nodes)
        found[name] = max([known[make, told] for make in settings], key=lambda one: one.goodput)
        print(f"  {name:28} {describe(found[name])}", flush=True)
    return found


def describe(one: Summary) -> str:
    return (
        f"goodput {one.goodput:.3f}, hits {one.hit:.3f}, first token p50 {one.ttft_p50_s:.2f} s"
        f" p90 {one.ttft_p90_s:.2f} s, uneven {one.uneven_work:.2f} (stay {one.uneven_stay:.2f})"
    )


def rows_of(cell: str, found: dict[str, Summary]) -> list[Beside]:
    ours, lost = found[OURS], found[OURS_LOST]
    peers = {name: one for name, one in found.items() if name not in (OURS, OURS_LOST)}
    made: list[Beside] = []
    for what, unit, more_is_better, value in (
        ("goodput", "of the requests", True, lambda one: one.goodput),
        ("hits", "of the prompt tokens", True, lambda one: one.hit),
        ("first token p90", "s", False, lambda one: one.ttft_p90_s),
        ("in-flight seconds", "greatest ÷ mean", False, lambda one: one.uneven_stay),
        ("prefill seconds", "greatest ÷ mean", False, lambda one: one.uneven_work),
    ):
        figures = {name: value(one) for name, one in peers.items()}
        made.append(
            compared(
                f"{what}, {cell}", value(ours), figures, unit, more_is_better=more_is_better,
                detail=describe(ours),
            )
        )  # fmt: skip
    exact = {"all events": ours.goodput}
    name = f"goodput with {LOST:.0%} of events lost, {cell}"
    made.append(compared(name, lost.goodput, exact, "of the requests", more_is_better=True))
    return made


def paced(rows: Sequence[TraceRow], fleet: Fleet, load: float, *, quick: bool) -> list[Request]:
    """As much traffic as this load means on these nodes."""
    copies = overlay(rows, max(1, len(fleet.speeds) // 4))
    span_s = (copies[-1].timestamp - copies[0].timestamp) / 1e3
    stretch = len(copies) / span_s / (load * LOAD_1 * len(fleet.speeds))
    until_s = fleet.quick_s if quick else fleet.until_s
    return [one for one in from_rows(copies, stretch=stretch) if one.at < until_s]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true", help="a part of the trace, fewer settings")
    flags.add_argument("--json", metavar="FILE", help="write the rows there")
    flags.add_argument("--trace", metavar="FILE", help=f"gzipped JSON lines (../{TRACE})")
    options = flags.parse_args()
    started = perf_counter()
    trace = find_trace(options.trace)
    rows: list[Beside] = []
    absent: dict[str, str] = {}
    if isinstance(trace, Path):
        lines = read_or_exit(trace, read_rows)
        for fleet in FLEETS:
            for load in LOADS:
                requests = paced(lines, fleet, load, quick=options.quick)
                cell = f"{fleet.name}, load {load:g}"
                print(f"{cell}: {len(requests)} requests", flush=True)
                rows += rows_of(cell, run_cell(fleet, requests, policies(quick=options.quick)))
        for row in rows:
            print(row)
    else:
        absent = {"routing on the trace": trace}
        print(f"absent: routing on the trace: {trace}")
    print(f"{perf_counter() - started:.0f} s")
    if options.json:
        made: list[JsonRow] = [json_row for row in rows for json_row in row.rows()]
        Path(options.json).write_text(json.dumps(made + absent_rows(absent), indent=1) + "\n")


if __name__ == "__main__":
    main()
