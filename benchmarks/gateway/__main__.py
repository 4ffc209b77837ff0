"""The gateway against its budgets, with scripted nodes on the real link.

Gateway on one core, nodes and client on another when there are two. A ratio of 1 or more means that
the must is met. What cannot be measured here is named at the end, with what brings it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import structlog
import uvloop
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks.beside import Beside, absent_rows
from benchmarks.children import leave_by_exit_on_terminate
from benchmarks.gateway.against import against_peers, streams_against_peers
from benchmarks.gateway.hold import longest_hold
from benchmarks.gateway.http_load import MARK
from benchmarks.gateway.link import frame_in, silent_node
from benchmarks.gateway.parts import CONTEXT_TOKENS, own_parts, own_work_per_token, turn_of_32k
from benchmarks.gateway.processes import GATEWAY_CORE, OTHER_CORE, pin, timer_lag_ms
from benchmarks.gateway.rows import Bench
from benchmarks.gateway.whole import (
    close_to_abort,
    first_token,
    json_requests,
    memory,
    streaming,
)
from gateway.text.model import TextModel
from policies.contract.bundle import decode_bundle, encode_bundle

DEFAULT_MODEL = "smollm2-135m"


def find_bundle(path: str | None) -> bytes:
    """The encoded bundle at path, else the default model's by its node's own command."""
    if path is not None:
        return Path(path).read_bytes()
    command = [sys.executable, "-m", "node_agent", "models", "spec", DEFAULT_MODEL, "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        sys.exit(
            f"no tokenizer: {' '.join(command[1:])} failed: {found.stderr.strip()[-300:]}\n"
            f"Run `kagari models pull {DEFAULT_MODEL}`, or give --bundle FILE."
        )
    return Path(json.loads(found.stdout)["bundle_path"]).read_bytes()


def show(bench: Bench) -> None:
    table = Table(title="gateway budgets: a ratio of 1 or more meets the must")
    for heading in ("what", "ours", "must", "good", "unit", "ratio", ""):
        table.add_column(heading, justify="left" if heading in ("what", "unit") else "right")
    for row in bench.rows:
        is_good = row.ours >= row.good if row.more_is_better else row.ours <= row.good
        verdict = "good" if is_good else "met" if row.ratio >= 1 else "MISSED"
        figures = (f"{row.ours:.3g}", f"{row.must:g}", f"{row.good:g}")
        table.add_row(row.name, *figures, row.unit, f"{row.ratio:.2f}", verdict)
    console = Console(width=max(Console().width, 150))
    console.print(table)
    if bench.besides:
        console.print(_beside_table(bench.besides))
    for name, why in bench.absent.items():
        console.print(f"absent: {name}: {why}")


def _beside_table(besides: list[Beside]) -> Table:
    peers = list(dict.fromkeys(name for one in besides for name in one.peers))
    table = Table(title="beside peers: figure and ratio; a ratio above 1 means ours is better")
    for heading in ("what", "unit"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ours", *peers):
        table.add_column(heading, justify="right")
    for one in besides:
        cells = [
            f"{figure.value:.3g} ({figure.ratio:.2f})" if figure is not None else "–"
            for figure in (one.peers.get(name) for name in peers)
        ]
        table.add_row(one.name, one.unit, f"{one.ours:.3g}", *cells)
    return table


def as_json(bench: Bench) -> list[dict[str, object]]:
    made: list[dict[str, object]] = [
        {
            "name": row.name,
            "ours": row.ours,
            "peer": row.must,
            "peer_name": "must budget",
            "good": row.good,
            "unit": row.unit,
            "ratio": row.ratio,
            "detail": row.detail,
        }
        for row in bench.rows
    ]
    made += [row for one in bench.besides for row in one.rows()]
    return made + absent_rows(bench.absent)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true", help="shorter runs, under 5 minutes")
    flags.add_argument("--json", metavar="FILE", help="write the rows there")
    flags.add_argument("--bundle", metavar="FILE", help=f"tokenizer bundle ({DEFAULT_MODEL}'s)")
    flags.add_argument("--only", metavar="PART", help="only parts whose name contains this")
    options = flags.parse_args()
    leave_by_exit_on_terminate()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    encoded = encode_bundle(
        replace(decode_bundle(find_bundle(options.bundle)), context_tokens=CONTEXT_TOKENS)
    )
    text = TextModel.load(decode_bundle(encoded))
    (mark_id,) = asyncio.run(text.raw_prompt(MARK.decode()))[-1:]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.quick, Path(folder), encoded, text, mark_id)
        parts = {
            "own work": lambda: own_work_per_token(bench),
            "parts 1 KB": lambda: uvloop.run(own_parts(bench, "1 KB", 1_000, 2, (80, 40))),
            "parts 8 KB": lambda: uvloop.run(own_parts(bench, "8 KB", 8_000, 8, (150, 70))),
            "parts 120 KB": lambda: uvloop.run(own_parts(bench, "120 KB", 120_000, 32, (500, 200))),
            "turn": lambda: uvloop.run(turn_of_32k(bench)),
            "frame in": lambda: uvloop.run(frame_in(bench)),
            "silent": lambda: uvloop.run(silent_node(bench)),
            "streaming 64": lambda: streaming(bench, 64, 200),
            "streaming 256": lambda: streaming(bench, 256, 200),
            "first token 64": lambda: first_token(bench, 64, 3, 2),
            "first token 256": lambda: first_token(bench, 256, 10, 6),
            "json": lambda: json_requests(bench),
            "close": lambda: close_to_abort(bench),
            "memory": lambda: memory(bench),
            "hold": lambda: longest_hold(bench),
            "peers": lambda: against_peers(bench),
            "peers streams": lambda: streams_against_peers(bench),
        }
        for what, core in (("gateway's", GATEWAY_CORE), ("nodes' and client's", OTHER_CORE)):
            p50, p99 = timer_lag_ms(core)
            print(f"machine: a 5 ms sleep on the {what} core ends {p50:.1f} ms late, p99 {p99:.1f}")
        whole_gateway_from = list(parts).index("streaming 64")
        for number, (name, part) in enumerate(parts.items()):
            if options.only is None or options.only in name:
                pin(os.getpid(), GATEWAY_CORE if number < whole_gateway_from else OTHER_CORE)
                part()
        show(bench)
        if options.json:
            Path(options.json).write_text(json.dumps(as_json(bench), indent=1) + "\n")


if __name__ == "__main__":
    main()
