"""`kagari serve`: a gateway and its nodes on this machine, from the first stage to the drain.

One thread, one selector: it reads the children's stage lines, notices a child's end and our own
signals, and asks the gateway until every node can answer. The first Ctrl-C drains, in the order
gateway then nodes, because what runs needs its node until the gateway has sent the last byte; the
second kills.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from gateway.cli.children import Child, python_module, start_child
from gateway.cli.client import HttpError, Server, call
from gateway.cli.problem import FAILED, Problem
from gateway.cli.serve_plan import (
    Launch,
    ServeOptions,
    ServePlan,
    free_ports,
    plan_serve,
    require_free_port,
)
from gateway.cli.stages import Fault, StageScreen, read_fault, read_stage

SILENCE_S = 600.0  # of all children, before the first start is given up; a pull tells its bytes
DRAIN_S = 20.0
NODE_STOP_S = 5.0  # after the gateway's drain nothing runs on a node
ASK_EVERY_S = 0.2
RESTART_AFTER_S = 1.0
MAX_RESTART_AFTER_S = 30.0
STEADY_S = 60.0  # a node that ran this long starts again without a growing wait
QUESTION = "What is the capital of France?"
BEGINNING = "The capital of France is"  # for a model that cannot chat


class Serve:
    """Owns the children of one `kagari serve`; all methods run in the main thread."""

    def __init__(self, plan: ServePlan, *, home: Path, secret: str, console: Console) -> None:
        self._plan = plan
        self._home = home
        self._api = Server(plan.api_url, secret)
        self._screen = StageScreen(console, read_last_start(home))
        self._children: dict[str, Child] = {}
        self._faults: dict[str, Fault] = {}  # of each child, the last it told
        self._restart_at: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._signals = 0
        self._heard_at = 0.0
        self.models: list[str] = []
        self.can_chat = True  # with the first of them

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self._children.items()}

    def start(self) -> bool:
        """Start all and wait until every node serves. False: a signal came first."""
        began = self._heard_at = time.monotonic()
        launches = (self._plan.gateway, *self._plan.nodes)
        for launch in launches:
            self._start(launch)
        self._screen.begin(f"starting {', '.join(launch.name for launch in launches)}")
        try:
            while not self._is_serving():
                if self._signals:
                    return False
                if time.monotonic() - self._heard_at > SILENCE_S:
                    raise self._too_slow()
                for child in self._watch(ASK_EVERY_S):
                    raise ended_early(child, self._faults.get(child.name))
        finally:
            self._screen.end()
        write_last_start(self._home, time.monotonic() - began)
        return True

    def run(self) -> None:
        """Until the first signal. A node agent that ends is started again; the gateway is not."""
        while not self._signals:
            for child in self._watch(0.5):
                if child.name == self._plan.gateway.name:
                    raise ended_early(child, self._faults.get(child.name))
                self._plan_restart(child)
            self._restart_due()

    def drain(self) -> bool:
        """Let the gateway finish what runs (at most DRAIN_S), then end the nodes.

        False: a second signal or the deadline came first.
        """
        in_time = True
        seen = self._signals
        self._screen.say(f"draining, at most {DRAIN_S:.0f} s; Ctrl-C again to end at once")
        gateway = [child for child in self._children.values() if child.name == "gateway"]
        nodes = [child for child in self._children.values() if child.name != "gateway"]
        for group, patience_s in ((gateway, DRAIN_S + 1), (nodes, NODE_STOP_S)):
            for child in group:
                child.signal(signal.SIGTERM)
            deadline = time.monotonic() + patience_s
            while any(child.is_running() for child in group):
                if self._signals > seen:
                    self._screen.say("ending at once")
                    return False
                if time.monotonic() > deadline:
                    slow = ", ".join(child.name for child in group if child.is_running())
                    self._screen.say(f"{slow} did not end in {patience_s:.0f} s and is killed")
                    in_time = False
                    break
                self._watch(0.1)
        return in_time

    def kill_all(self) -> None:
        """Nothing of ours is left: an engine ends at once when its agent's socket closes."""
        for child in self._children.values():
            child.kill()
        deadline = time.monotonic() + 2.0
        for child in self._children.values():
            child.wait(deadline)
        self._selector.close()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Count SIGINT, SIGTERM and SIGHUP instead of dying of them, and wake the selector."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._selector.register(reader, selectors.EVENT_READ, None)

        def count(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            reader.close()
            writer.close()

    def _start(self, launch: Launch) -> None:
        log = self._home / "logs" / f"{launch.name}.log"
        child = start_child(launch.name, python_module(launch.module, *launch.arguments), log=log)
        self._children[launch.name] = child
        self._selector.register(child.fd, selectors.EVENT_READ, child)

    def _watch(self, timeout_s: float) -> list[Child]:
        """Wait for something to happen; returns the children that have closed their stdout."""
        ended: list[Child] = []
        for key, _ in self._selector.select(timeout_s):
            child: Child | None = key.data
            if child is None:
                os.read(key.fd, 64)
                continue
            lines = child.read_lines()
            if lines is None:
                self._selector.unregister(child.fd)
                child.wait(time.monotonic() + 1.0)
                ended.append(child)
                continue
            for line in lines:
                stage = read_stage(line)
                if stage is not None:
                    self._heard_at = time.monotonic()
                    self._screen.show(child.name, stage)
                elif (fault := read_fault(line)) is not None:
                    self._faults[child.name] = fault
        return ended

    def _is_serving(self) -> bool:
        """Every node is ready and all its engines' models answer, as the gateway itself says."""
        try:
            models = call(self._api, "GET", "/v1/models", timeout_s=2)
            nodes = call(self._admin(), "GET", "/admin/v1/nodes", timeout_s=2)
        except (OSError, HttpError, http.client.HTTPException):
            return False
        ready = [node for node in nodes["nodes"] if node["state"] == "ready"]
        self.models = [model["id"] for model in models["data"]]
        self.can_chat = all([model["kagari"]["chat"] for model in models["data"][:1]])
        engines = [engine for node in ready for engine in node["engines"]]
        for engine in engines:
            if engine["bundle"] not in ("loaded", "waiting"):
                raise unfit_bundle(engine)
        return (
            bool(self.models)
            and len(ready) >= len(self._plan.nodes)
            and len(engines) >= len(self._plan.nodes) * self._plan.num_models
            and {engine["info"]["model"] for engine in engines} <= set(self.models)
        )

    def _admin(self) -> Server:
        token = self._home / "admin.token"
        return Server(self._plan.admin_url, token.read_text().strip() if token.exists() else "")

    def _plan_restart(self, child: Child) -> None:
        child.kill()
        lived_s = time.monotonic() - child.started_at
        count = 0 if lived_s > STEADY_S else self._restarts.get(child.name, 0)
        wait_s = min(MAX_RESTART_AFTER_S, RESTART_AFTER_S * 2**count)
        self._restarts[child.name] = count + 1
        self._restart_at[child.name] = time.monotonic() + wait_s
        code = child.process.poll()
        self._screen.say(f"{child.name} ended (exit {code}); starting it again in {wait_s:.0f} s")

    def _restart_due(self) -> None:
        for launch in self._plan.nodes:
            if self._restart_at.get(launch.name, float("inf")) <= time.monotonic():
                del self._restart_at[launch.name]
                self._start(launch)

    def _too_slow(self) -> Problem:
        names = ", ".join(self._children)
        return Problem(
            "serve",
            found=f"not every node is ready, and for {SILENCE_S:.0f} s no process said a word",
            allowed=f"{names} ready",
            remedy=f"read the logs in {self._home / 'logs'} and run kagari doctor",
            exit_code=FAILED,
        )


def ended_early(child: Child, fault: Fault | None) -> Problem:
    """What the child itself said of its end, else what its log ends with."""
    if fault is not None:
        return Problem(
            f"{child.name}: {fault.field}",
            found=fault.found,
            allowed=fault.allowed,
            remedy=fault.remedy,
            exit_code=FAILED,
        )
    words = child.last_words().replace("\n", "\n    ")
    return Problem(
        child.name,
        found=f"the process ended with exit {child.process.poll()}; its last words:\n    {words}",
        allowed="a process that keeps running",
        remedy=f"read {child.log}; kagari doctor checks the machine",
        exit_code=FAILED,
    )


def unfit_bundle(engine: dict[str, Any]) -> Problem:
    """The gateway will not load it: waiting would bring nothing."""
    return Problem(
        f"--model {engine['info']['model']}",
        found=f"a tokenizer that the gateway refuses: {engine['bundle']}",
        allowed="a tokenizer.json or GGUF vocabulary that text can be served with",
        remedy="pull the model again, or name another one",
        exit_code=FAILED,
    )


def read_last_start(home: Path) -> float | None:
    try:
        return float((home / "last_start_s").read_text())
    except (OSError, ValueError):
        return None


def write_last_start(home: Path, seconds: float) -> None:
    (home / "last_start_s").write_text(f"{seconds:.2f}\n")


def essentials(plan: ServePlan, *, secret: str, model: str, can_chat: bool, home: Path) -> str:
    """What a newcomer needs, and a curl to paste."""
    path, asked = (
        ("chat/completions", {"messages": [{"role": "user", "content": QUESTION}]})
        if can_chat
        else ("completions", {"prompt": BEGINNING})
    )
    body = json.dumps({"model": model, **asked, "max_tokens": 32, "temperature": 0})
    return (
        f"ready {plan.api_url}/v1\n"
        f"key   {secret}\n"
        f"home  {home}\n\n"
        f"curl {plan.api_url}/v1/{path} \\\n"
        f"  -H 'Authorization: Bearer {secret}' \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"  -d '{body}'\n"
    )


def serve(options: ServeOptions, *, secret: str, as_json: bool) -> None:
    """Run until a signal. Raises Problem when it cannot start or the gateway ends, SystemExit(1)
    when what ran was not let finish."""
    asked = {
        "--port": options.port,
        "--link-port": options.link_port,
        "--admin-port": options.admin_port,
    }
    for flag, port in asked.items():
        if port:
            require_free_port(options.host, port, flag)
    drawn = free_ports(options.host, len(asked))
    ports = [port or free for port, free in zip(asked.values(), drawn, strict=True)]
    plan = plan_serve(options, port=ports[0], link_port=ports[1], admin_port=ports[2])
    running = Serve(plan, home=options.home, secret=secret, console=Console(stderr=True))
    with running.signals():
        try:
            if running.start():
                announce(running, plan, options=options, secret=secret, as_json=as_json)
                running.run()
            in_time = running.drain()
        finally:
            running.kill_all()
    if not in_time:
        raise SystemExit(FAILED)


def announce(
    running: Serve, plan: ServePlan, *, options: ServeOptions, secret: str, as_json: bool
) -> None:
    if not as_json:
        text = essentials(
            plan,
            secret=secret,
            model=running.models[0],
            can_chat=running.can_chat,
            home=options.home,
        )
        sys.stdout.write("\n" + text)
        sys.stdout.flush()
        return
    ready: dict[str, Any] = {
        "ready": True,
        "url": f"{plan.api_url}/v1",
        "admin_url": plan.admin_url,
        "api_key": secret,
        "home": str(options.home),
        "models": running.models,
        "pids": running.pids,
    }
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
