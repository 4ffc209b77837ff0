"""Two nodes on a real Mooncake Store: does it matter where a session's next turn goes?

`python -m benchmarks.cluster_store [--quick] [--json FILE] [--model NAME]`, as root and with the
extra `mooncake`. The same sessions four times, each on a new Kagari of two nodes, of which neither
has room for all: pinned (a session stays on its node) and random (nodes in turn over a shuffled
order of sessions), with the store and without. The answers must be the same all times.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.beside import Beside, absent_rows, compared
from benchmarks.cluster_store.sessions import Turn, hit_ratio, moves, play
from benchmarks.mooncake import own_store
from gateway.demo.stack import Stack
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.requests import requests

ROW = "random_vs_pinned_hit_ratio"
PORT = 21081
SEGMENT_MB = 512  # of each node: all that the sessions compute
POOL_PAGES_PER_SESSION = 24  # over two nodes: a pool holds those that stay on it, not all
JOIN_S = 30.0
POLICY = {"pinned": "cost", "random": "round_robin"}


@dataclass(frozen=True, slots=True)
class Played:
    turns: list[Turn]
    cluster_tokens: int
    seconds: float

    @property
    def hit_ratio(self) -> float:
        return hit_ratio(self.turns)

    def __str__(self) -> str:
        ttft = median(one.reply.ttft_s for one in self.turns)
        return (
            f"hit ratio {self.hit_ratio:.3f}, {moves(self.turns):.0%} of later turns moved, "
            f"{self.cluster_tokens} tokens from the store, median time to first token {ttft:.3f} s"
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer sessions and turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue")
    options = parser.parse_args(arguments)
    num_sessions, num_turns = (6, 4) if options.quick else (10, 8)
    rows: list[Beside] = []
    absent: dict[str, str] = {}
    try:
        rows = measure(options.model, num_sessions, num_turns)
    except PermissionError as error:
        absent[ROW] = f"{error}: run it as root"
    for row in rows:
        print(row, row.detail, flush=True)
    for name, why in absent.items():
        print(f"{name:16} absent: {why}", flush=True)
    if options.json is not None:
        told = [json_row for row in rows for json_row in row.rows()] + absent_rows(absent)
        options.json.write_text(json.dumps(told, indent=1))
    return 0


def measure(model: str, num_sessions: int, num_turns: int) -> list[Beside]:
    """Raises AssertionError where the store changed an answer."""
    played: dict[tuple[str, str], Played] = {}
    for store in ("store", "alone"):
        for routing in POLICY:
            one = _run(model, routing, store == "store", num_sessions, num_turns)
            played[routing, store] = one
            print(f"{routing}, {store}: {one} ({one.seconds:.0f} s)", flush=True)
    answers = {tuple(turn.reply.text for turn in one.turns) for one in played.values()}
    assert len(answers) == 1, "the store or the routing changed an answer"
    pinned, random = played["pinned", "store"].hit_ratio, played["random", "store"].hit_ratio
    shape = f"{num_sessions} sessions of {num_turns} turns"
    return [
        compared(
            ROW,
            random,
            {"pinned": pinned},
            "of prompt tokens",
            more_is_better=True,
            detail=f"on one store, {shape}",
        ),
        *(
            compared(
                f"hit_ratio_{routing}",
                played[routing, "store"].hit_ratio,
                {"without a store": played[routing, "alone"].hit_ratio},
                "of prompt tokens",
                more_is_better=True,
                detail=str(played[routing, "store"]),
            )
            for routing in POLICY
        ),
    ]


def _run(model: str, routing: str, has_store: bool, num_sessions: int, num_turns: int) -> Played:
    """A Kagari and a store of its own, from nothing to nothing."""
    pool = max(32, num_sessions * POOL_PAGES_PER_SESSION // 2) * 64
    flags = [
        *("--nodes", "2", "--port", "0", "--model", model, "--kv-device-tokens", str(pool)),
        *("--kv-host-mb", "0", "--kv-disk-mb", "0"),
    ]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()), "home")
        if has_store:
            url = stack.enter_context(own_store(port=PORT, segment_mb=SEGMENT_MB))
            flags += ["--cluster-store", url]
        environment = {"KAGARI_ROUTING__POLICY": POLICY[routing]}
        with Stack(home, *flags, environment=environment) as kagari:
            if has_store:
                _wait_joined(2)
            began = time.monotonic()
            turns = play(kagari, num_sessions=num_sessions, num_turns=num_turns)
            seconds = time.monotonic() - began
        # Once it has ended, every row is written.
        lines = list(requests(home / LEDGER_NAME))
    return Played(turns, sum(line.tiers.get("cluster", 0) for line in lines), seconds)


def _wait_joined(num_nodes: int) -> None:
    """Until so many nodes give memory to the store."""
    deadline = time.monotonic() + JOIN_S
    while len(_segments()) < num_nodes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(_segments())} of {num_nodes} nodes joined in {JOIN_S:.0f} s")
        time.sleep(0.1)


def _segments() -> Sequence[str]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT + 1, timeout=5)
    try:
        connection.request("GET", "/get_all_segments")
        return connection.getresponse().read().decode().split()
    finally:
        connection.close()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1:]))
