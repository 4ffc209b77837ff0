"""The processes of a measurement, each on its core: a gateway, scripted nodes, a peer's router."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import cpu_s, end_with_parent, stop
from benchmarks.gateway.rows import Bench, percentile

TOKEN = "benchmark-join-token"
KEY = "sk-benchmark-0123456789abcdef"
USABLE = sorted(os.sched_getaffinity(0))  # before anything is pinned
GATEWAY_CORE, OTHER_CORE = USABLE[0], USABLE[-1]


def pin(pid: int, core: int) -> None:
    if len(USABLE) > 1:
        os.sched_setaffinity(pid, {core})


def timer_lag_ms(core: int) -> tuple[float, float]:
    """How late a 5 ms sleep on a core ends, p50 and p99: what others on this machine cost us."""
    pin(os.getpid(), core)
    late: list[float] = []
    for _ in range(200):
        began = time.monotonic()
        time.sleep(0.005)
        late.append((time.monotonic() - began - 0.005) * 1e3)
    return percentile(late, 0.5), percentile(late, 0.99)


@contextmanager
def nodes(bench: Bench, url: str, **flags: Any) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Scripted nodes in a process of their own; its log is whole when the block has ended."""
    bundle = bench.folder / "bundle"
    bundle.write_bytes(bench.bundle)
    log = bench.folder / f"nodes-{time.monotonic_ns()}.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gateway.scripted_nodes",
        "--url",
        url,
        "--token",
        TOKEN,
    ]
    command += ["--bundle", str(bundle), "--log", str(log), "--token-ids", str(bench.mark_id)]
    command += ["--core", str(OTHER_CORE)]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent)
    try:
        yield process, log
    finally:
        process.send_signal(signal.SIGCONT)
        stop(process, 10)


@dataclass
class Gateway:
    """A real `python -m gateway` process."""

    process: subprocess.Popen[str]
    home: Path
    url: str
    link_url: str
    admin_url: str

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        return int(kib) / 1024

    def wait_for_model(self, deadline_s: float = 60.0) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/models", headers={"Authorization": f"Bearer {KEY}"}
        )
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            with urllib.request.urlopen(request, timeout=10) as answer:
                if json.load(answer)["data"]:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"no node was ready within {deadline_s:.0f} s")


@contextmanager
def gateway(folder: Path, *, module: tuple[str, ...] = ("gateway",)) -> Iterator[Gateway]:
    """folder: where it gets a home. module: what `python -m` is given, with what stands before the
    gateway's own flags."""
    home = Path(tempfile.mkdtemp(dir=folder))
    token_file = home / "token"
    token_file.write_text(TOKEN)
    errors = (home / "stderr").open("w")
    command = [sys.executable, "-m", *module, "--home", str(home), "--api-key", KEY]
    command += ["--port", "0", "--link-port", "0", "--admin-port", "0"]
    command += ["--join-token-file", str(token_file)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,
        env=os.environ
        | {"KAGARI_ROUTING__MAX_IN_FLIGHT_PER_NODE": "1024", "KAGARI_SERVER__DRAIN_S": "1"},
    )
    pin(process.pid, GATEWAY_CORE)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            ready = json.loads(line)
            if ready.get("event") == "ready":
                urls = [ready[name] for name in ("url", "link_url", "admin_url")]
                yield Gateway(process, home, *urls)
                break
        else:
            raise RuntimeError(f"the gateway did not start: {(home / 'stderr').read_text()}")
    finally:
        stop(process, 15)
        errors.close()
