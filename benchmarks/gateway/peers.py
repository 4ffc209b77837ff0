"""Other gateways, each a process on the gateway's core, before one scripted upstream."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.children import end_with_parent, stop
from benchmarks.gateway.processes import GATEWAY_CORE, KEY, OTHER_CORE, USABLE
from benchmarks.gateway.rows import Bench
from benchmarks.gateway.scripted_nodes import MODEL
from benchmarks.peers.catalogue import Present

START_LIMIT_S = 120.0  # LiteLLM imports for ten seconds on an idle core


@contextmanager
def upstream(bench: Bench, *, tick_s: float = 0.0) -> Iterator[tuple[int, int, Path]]:
    """Its process's number, its port, and what it sent when, whole when the block has ended."""
    log = bench.folder / f"upstream-{time.monotonic_ns()}.json"
    command = [sys.executable, "-m", "benchmarks.gateway.scripted_upstream"]
    command += ["--core", str(OTHER_CORE), "--tick-s", str(tick_s), "--log", str(log)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline()), log
    finally:
        stop(process, 10)


@contextmanager
def vllm_router(
    bench: Bench, found: Present, policy: str, upstream_port: int
) -> Iterator[tuple[int, int]]:
    """Its process's number and port."""
    port = _free_port()
    command = [str(found.program("vllm-router")), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{upstream_port}", "--policy", policy]
    command += ["--prometheus-port", str(_free_port()), "--log-level", "error"]
    health = f"http://127.0.0.1:{port}/health"
    with _running(bench, found.peer.name, command, {}, health) as pid:
        yield pid, port


@contextmanager
def litellm(bench: Bench, found: Present, upstream_port: int) -> Iterator[tuple[int, int]]:
    """Without a database; a master key is what it insists on. Its process's number and port."""
    port = _free_port()
    route = {
        "model": f"openai/{MODEL}",
        "api_base": f"http://127.0.0.1:{upstream_port}/v1",
        "api_key": "none",
    }
    configuration = bench.folder / f"litellm-{port}.yaml"
    configuration.write_text(  # JSON is YAML
        json.dumps(
            {
                "model_list": [{"model_name": MODEL, "litellm_params": route}],
                "litellm_settings": {"telemetry": False},
                "general_settings": {"master_key": KEY},
            }
        )
    )
    command = [str(found.program("litellm")), "--config", str(configuration)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    command += ["--keepalive_timeout", "600"]  # connections rest while others have their turn
    environment = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the network for prices
    }
    health = f"http://127.0.0.1:{port}/health/liveliness"
    with _running(bench, found.peer.name, command, environment, health) as pid:
        yield pid, port


class NotUp(Exception):
    """A peer's process does not answer."""


@contextmanager
def _running(
    bench: Bench, name: str, command: list[str], environment: dict[str, str], health: str
) -> Iterator[int]:
    log_path = bench.folder / f"{name}-{time.monotonic_ns()}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            # Pinned before it starts: a router makes as many threads as it sees cores.
            ["taskset", "--cpu-list", str(GATEWAY_CORE), *command] if len(USABLE) > 1 else command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=bench.folder,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            _wait_for(health, process, log_path)
            yield process.pid
        finally:
            stop(process, 15)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    state = "answers nothing" if process.poll() is None else f"ended with {process.returncode}"
    raise NotUp(f"it {state}: {log.read_text(errors='replace')[-300:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
