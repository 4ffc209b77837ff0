"""Thousands of requests to nodes that are processes: clients leave, engines and agents are killed
and stopped, prompts are split. Each is answered rightly or told why not, and nothing of it is left:
no credit, reservation, lane, leg, row or page.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.cli.children import python_module
from gateway.config import GatewayConfig, LimitsConfig, RoutingConfig, ServerConfig
from policies.contract.bundle import encode_bundle
from policies.pairing import SplitMode
from tests.engine.small_bundle import small_bundle

PATIENCE_S = 600.0  # of a client that stays, on a machine that stands still for minutes
CONFIG = GatewayConfig(
    server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=5.0),
    limits=LimitsConfig(request_deadline_s=PATIENCE_S / 2),
    routing=RoutingConfig(split=SplitMode.ALWAYS),
)
COUNTING = " ".join(str(number) for number in range(20))
SAYS = {"plain": "Yes.", "slowly": COUNTING, "later": "Late.", "fatal": COUNTING}
WORDS = ("plain",) * 12 + ("slowly",) * 4 + ("later",) * 2
REPLIES = [
    {"if": "slowly", "say": SAYS["slowly"], "delay_ms": 8},
    {"if": "later", "say": SAYS["later"], "delay_ms": 150},
    {"if": "fatal", "say": SAYS["fatal"], "die_after": 6},
    {"if": "plain", "say": SAYS["plain"]},
]
REST_LOOKS = 450, 0.2  # and seconds between two, for nodes to come back and what runs to end
UNLUCKY = {429, 503}  # what a client tries again
FAILED = {502, 504}  # it ran, and was given up
MOST_TRIES = 400  # two minutes of them: a node may take long to come back
STOPPED_S = (0.2, 9.0)  # lost after 7


# --- nodes ----------------------------------------------------------------------------------------


class Node:
    """An agent with one scripted engine, started again whenever it has ended. It looks itself
    whether we live: a signal at our death would come with that of the thread that started it."""

    def __init__(self, role: str, name: str, arguments: tuple[str, ...], log: Path) -> None:
        self.name = name
        self._argv = python_module("node_agent", *arguments, "--node-id", name, "--role", role)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def keep_up(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self.starts += 1
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                )

    def pids(self) -> list[int]:
        """The agent's, and its engine's where it has one."""
        assert self._process is not None
        pid = self._process.pid
        with suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [pid, *map(int, children)]
        return [pid]

    def end(self) -> None:
        if self._process is not None:
            for pid in self.pids():
                send(pid, signal.SIGCONT)
                send(pid, signal.SIGKILL)
            self._process.wait(10)


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass
class Faults:
    """In a thread: once it begins, somebody is killed or stopped now and then; at the end all
    run."""

    nodes: list[Node]
    begins: Callable[[], bool]
    pause_s: tuple[float, float]
    dice: random.Random
    done: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.begins():
            if self.over.wait(0.01):
                return
        while True:
            self.strike(self.dice.choice(self.nodes))
            for node in self.nodes:
                node.keep_up()
            if self.over.wait(self.dice.uniform(*self.pause_s)):
                return

    def strike(self, node: Node) -> None:
        at, pid = self.dice.choice(list(enumerate(node.pids())))
        whose = "engine" if at else "agent"
        if self.dice.random() < 0.5:
            self.done[f"{whose} killed"] += 1
            send(pid, signal.SIGKILL)
        else:
            self.done[f"{whose} stopped"] += 1
            send(pid, signal.SIGSTOP)
            self.over.wait(self.dice.uniform(*STOPPED_S))
            send(pid, signal.SIGCONT)


@contextmanager
def nodes_of(gateway: Any, roles: dict[str, str], folder: Path) -> Iterator[list[Node]]:
    script, bundle = folder / "script.json", folder / "bytes.bundle"
    script.write_text(json.dumps(REPLIES))
    bundle.write_bytes(encode_bundle(small_bundle()))
    arguments = (
        *("--gateway", gateway.addresses.link_url, "--model", "tiny", "--home", str(folder)),
        *("--join-token", gateway.services.home.join_token, "--threads", "1"),
        *("--script", str(script), "--bundle", str(bundle), "--kv-device-tokens", "4096"),
        *("--kv-host-mb", "0", "--kv-disk-mb", "0", "--exit-with-parent"),
    )
    nodes = [Node(role, name, arguments, folder / f"{name}.log") for name, role in roles.items()]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.end()


# --- clients --------------------------------------------------------------------------------------


@dataclass
class Visitor:
    """Clients of their own event loop, a few dozen at a time."""

    gateway: Any
    dice: random.Random
    ends: Counter[str] = field(default_factory=Counter)

    async def run(self, requests: int, at_once: int) -> None:
        left = iter(range(requests))

        async def one_after_the_other() -> None:
            for number in left:
                self.ends[await self.visit(number)] += 1

        await asyncio.gather(*[one_after_the_other() for _ in range(at_once)])

    async def visit(self, number: int) -> str:
        """What became of it; while no node can take it, it comes again."""
        dice = self.dice
        word = "fatal" if dice.random() < 0.004 else dice.choice(WORDS)
        family = dice.randrange(8)
        prompt = f"{family} " * dice.choice([4, 40, 200, 400]) + f"{number % 97} {word}"
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 80,
            "stream": dice.random() < 0.6,
            "n": dice.choice([1] * 9 + [2]),
        }
        patience_s = dice.choice([PATIENCE_S] * 7 + [dice.uniform(0.0, 0.4)])
        for _ in range(MOST_TRIES):
            status, data = await self.ask(body, patience_s)
            if status is None:
                return "left"
            if status == 200:
                return self.told(data, is_stream=bool(body["stream"]), says=SAYS[word])
            if status in FAILED:
                return "failed"
            assert status in UNLUCKY, (status, data)
            await asyncio.sleep(dice.uniform(0.1, 0.6))
        return "not served"

    async def ask(self, body: dict[str, Any], patience_s: float) -> tuple[int | None, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        writer.write(
            self.gateway.raw(
                json.dumps(body).encode(), path="/v1/completions", extra="Connection: close\r\n"
            )
        )
        try:
            async with asyncio.timeout(patience_s):
                data = await reader.read(-1)
        except TimeoutError:
            assert patience_s < 1.0, "it stands still"
            writer.transport.abort()
            return None, b""
        writer.close()
        head, _, rest = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), rest

    def told(self, data: bytes, *, is_stream: bool, says: str) -> str:
        """An answer is whole and right, or ends in an error event."""
        if not is_stream:
            texts = [choice["text"] for choice in json.loads(_unchunked(data))["choices"]]
            assert set(texts) == {says}
            return "ok"
        lines = [line[6:] for line in _unchunked(data).split(b"\n") if line.startswith(b"data: ")]
        if lines[-1] != b"[DONE]":
            assert "error" in json.loads(lines[-1]), lines[-1]
            return "broken off"
        said: dict[int, str] = {}
        for line in lines[:-1]:
            for choice in json.loads(line)["choices"]:
                said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
        assert set(said.values()) == {says}
        return "ok"


def _unchunked(data: bytes) -> bytes:
    """The body of an answer that came in chunks, or as it is."""
    body = b""
    while True:
        size, _, rest = data.partition(b"\r\n")
        try:
            count = int(size, 16)
        except ValueError:
            return body or data
        if data[:1] == b"{" or not rest:
            return body or data
        body += rest[:count]
        data = rest[count + 2 :]
        if not count:
            return body


# --- what is left ---------------------------------------------------------------------------------


def left(gateway: Any, names: set[str]) -> dict[str, Any]:
    """Whatever is not zero, in the gateway and on its nodes. In the gateway's loop."""
    services = gateway.services
    found: dict[str, Any] = {name: count for name, count in gateway._left().items() if count}
    known = {view.node_id: view for view in services.fleet.nodes()}
    for name in names:
        view, node = known.get(name), services.fleet._node_by_id.get(name)
        if view is None or node is None or view.state != "ready" or len(view.engines) != 1:
            found[name] = "is not ready" if view is None else view.state
            continue
        session, (engine,) = node.session, node.engine_by_index.values()
        report = engine.report
        if report is None or report.state != "ready":
            found[name] = "has no ready engine"
            continue
        counts = {
            "live": len(session.live),
            "legs": len(session.legs),
            "ending": len(session.ending),
            "lanes": session._num_lanes - len(set(session._free)),
            "outbox": session.outbox.size_bytes,
            "credits": engine.backlog.ours,
            "backlog": engine.backlog.tokens,
            "seated": engine.seated_tokens,
            "held": report.pages_held,
            "astray": report.pages_total - report.pages_free - report.pages_cached,
            "waiting": report.waiting_sequences,
            "running": report.running_sequences,
            "uncached": report.uncached_tokens,
        }
        found |= {f"{name} {what}": count for what, count in counts.items() if count}
    return found


def at_rest(gateway: Any, nodes: list[Node]) -> None:
    looks, pause_s = REST_LOOKS
    names = {node.name for node in nodes}
    for _ in range(looks):
        for node in nodes:
            node.keep_up()
        found = gateway.call(lambda: left(gateway, names))
        if not found:
            return
        time.sleep(pause_s)
    raise AssertionError(found)


FEW = {"p1": "prefill", "d1": "decode"}
MANY = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


@pytest.mark.parametrize(
    ("requests", "at_once", "roles", "pause_s"),
    [
        pytest.param(60, 8, FEW, (0.8, 2.0), id="60"),
        pytest.param(10_000, 24, MANY, (0.5, 4.0), id="10000", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_requests_that_clients_leave_and_nodes_fail(
    start: Callable[..., Any],
    tmp_path: Path,
    requests: int,
    at_once: int,
    roles: dict[str, str],
    pause_s: tuple[float, float],
) -> None:
    config = msgspec.structs.replace(CONFIG, home=str(tmp_path / "gateway"))
    folder = tmp_path / "nodes"
    folder.mkdir()
    with (
        start(tmp_path / "gateway", config, nodes=0) as gateway,
        nodes_of(gateway, roles, folder) as nodes,
    ):
        at_rest(gateway, nodes)
        visitor = Visitor(gateway, random.Random(requests))
        faults = Faults(
            nodes,
            lambda: sum(visitor.ends.values()) > requests // 5,
            pause_s,
            random.Random(1),
        )
        struck = threading.Thread(target=faults.run)
        began = time.monotonic()
        struck.start()
        try:
            asyncio.run(visitor.run(requests, at_once))
        finally:
            faults.over.set()
            struck.join()
        seconds = time.monotonic() - began
        at_rest(gateway, nodes)
        gateway.wait_settled()
        splits = gateway.call(lambda: dict(gateway.services.fleet.pairs.outcomes))
        print(f"{seconds:.0f} s: {dict(visitor.ends)}, {dict(faults.done)}, {splits}")
    assert sum(visitor.ends.values()) == requests
    assert visitor.ends["ok"] > requests // 3
    assert not visitor.ends["not served"]
    assert faults.done
    assert splits
