"""Requests per second beside vllm-router: same client, same bodies, turn by turn in one run.

The router stands before a server that answers at once, as the gateway stands before nodes that do.
Gateway and router share a core, turn by turn; client, nodes and server have the other one. Where
that other core is full, or the one that is measured is not, requests are counted per second of CPU
of the process under test, on both sides; the row's unit says which.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gateway.bodies import conversation
from benchmarks.gateway.http_load import Answer, Load, post
from benchmarks.gateway.processes import (
    GATEWAY_CORE,
    KEY,
    OTHER_CORE,
    USABLE,
    cpu_s,
    gateway,
    nodes,
)
from benchmarks.gateway.rows import Bench, Pair
from benchmarks.gateway.scripted_nodes import MODEL

PEERS = Path(os.environ.get("PEERS") or Path.home() / ".cache/kagari/peers")
AT_A_TIME = 16
FULL = 0.9  # of a core: what bounds the rate
CASES = (  # name, characters, messages; (must, good) warm, and with one new message each
    ("1kb", 1_000, 2, (0.18, 0.38), (0.13, 0.22)),
    ("8kb", 8_000, 8, (0.18, 0.33), (0.11, 0.16)),
    ("120kb", 120_000, 32, (0.15, 0.35), (0.10, 0.16)),
)
NEW = "########"  # a number's place


def requests(chars: int, messages: int, *, fresh: bool) -> Iterator[bytes]:
    """For ever; fresh: the last message of each is new, by its first word."""
    turns = conversation(messages, chars // messages)
    turns[-1]["content"] = NEW + turns[-1]["content"]
    body = json.dumps({"model": MODEL, "messages": turns, "max_tokens": 40}).encode()
    before, _, after = post(body, KEY).partition(NEW.encode())
    for number in itertools.count():
        yield b"%b%08d%b" % (before, number if fresh else 0, after)


@dataclass
class Side:
    """One of the two under test: its client, and what it did so far in this case."""

    name: str
    pid: int
    load: Load
    helpers: tuple[int, ...]  # processes on the other core, beside our own
    idle: list[socket.socket | None] = field(default_factory=lambda: [None] * AT_A_TIME)
    answered: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    other_cpu_s: float = 0.0

    def forget(self) -> None:
        self.answered, self.wall_s, self.cpu_s, self.other_cpu_s = 0, 0.0, 0.0, 0.0

    def run(self, bodies: Iterator[bytes], seconds: float) -> None:
        """AT_A_TIME requests at a time for so long; ends with none under way."""
        before = (time.monotonic(), cpu_s(self.pid), self._other_cpu_s())
        end = before[0] + seconds
        connections, self.idle = self.idle, []

        def again(answer: Answer) -> None:
            self.answered += 1
            if time.monotonic() < end:
                self.load.send(next(bodies), answer.socket)
            else:
                self.idle.append(answer.socket)

        for connection in connections:
            self.load.send(next(bodies), connection)
        self.load.run(lambda: len(self.idle) == AT_A_TIME, again)
        self.wall_s += time.monotonic() - before[0]
        self.cpu_s += cpu_s(self.pid) - before[1]
        self.other_cpu_s += self._other_cpu_s() - before[2]

    def _other_cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in (os.getpid(), *self.helpers))

    @property
    def is_bound_by_itself(self) -> bool:
        return self.cpu_s / self.wall_s >= FULL and self.other_cpu_s / self.wall_s < FULL

    def __str__(self) -> str:
        return (
            f"{self.name} {self.answered / self.wall_s:.0f}/s,"
            f" {self.cpu_s / self.answered * 1e6:.0f} µs each, its core"
            f" {self.cpu_s / self.wall_s:.2f}, the other {self.other_cpu_s / self.wall_s:.2f}"
        )


def against_vllm_router(bench: Bench) -> None:
    program = PEERS / "vllm-router/bin/vllm-router"
    if not program.exists():
        for name, *_ in CASES:
            for kind in ("", "_new"):
                bench.leave_out(f"rps_vs_vllm_router_{name}{kind}", "`make peers` brings it")
        return
    with ExitStack() as stack:
        served = stack.enter_context(gateway(bench))
        ours, _ = stack.enter_context(nodes(bench, served.link_url))
        upstream, port = stack.enter_context(_upstream())
        router, router_port = stack.enter_context(_router(bench, program, port))
        served.wait_for_model()
        sides = []
        for name, pid, at, helper in (
            ("ours", served.process.pid, served.port, ours.pid),
            ("vllm-router", router.pid, router_port, upstream.pid),
        ):
            load = Load("127.0.0.1", at)
            stack.callback(load.end)
            sides.append(Side(name, pid, load, (helper,)))
        for name, chars, messages, warm, fresh in CASES:
            _compare(
                bench,
                f"rps_vs_vllm_router_{name}",
                sides,
                requests(chars, messages, fresh=False),
                warm,
            )
            _compare(
                bench,
                f"rps_vs_vllm_router_{name}_new",
                sides,
                requests(chars, messages, fresh=True),
                fresh,
            )


def _compare(
    bench: Bench, name: str, sides: list[Side], bodies: Iterator[bytes], budget: Pair
) -> None:
    for side in sides:
        side.run(bodies, 0.5)  # caches, connections
        side.forget()
    for _ in range(3 if bench.quick else 6):
        for side in sides:
            side.run(bodies, 0.7 if bench.quick else 2.0)
    ours, peer = sides
    if all(side.is_bound_by_itself for side in sides):
        unit, rates = "of its requests/s", [side.answered / side.wall_s for side in sides]
    else:
        unit, rates = "of its requests per CPU-s", [side.answered / side.cpu_s for side in sides]
    bench.add(
        name, rates[0] / rates[1], *budget, unit, more_is_better=True, detail=f"{ours}; {peer}"
    )


@contextmanager
def _upstream() -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "benchmarks.gateway.scripted_upstream"]
    command += ["--core", str(OTHER_CORE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def _router(
    bench: Bench, program: Path, upstream_port: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """With its default policy, which routes by prefix as we do (round robin costs it half)."""
    port, metrics_port = _free_port(), _free_port()
    command = [str(program), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{upstream_port}"]
    command += ["--prometheus-port", str(metrics_port), "--log-level", "error"]
    log_path = bench.folder / "router.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            # Pinned before it starts: it makes as many threads as it sees cores.
            ["taskset", "--cpu-list", str(GATEWAY_CORE), *command] if len(USABLE) > 1 else command,
            stdout=log,
            stderr=log,
        )
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process, log_path)
            yield process, port
        finally:
            process.terminate()
            process.wait(15)


def _wait_for(
    url: str, process: subprocess.Popen[bytes], log: Path, deadline_s: float = 60.0
) -> None:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise TimeoutError(f"vllm-router did not come up: {log.read_text()[-500:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
