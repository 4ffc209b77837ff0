"""`kagari doctor`: what this machine has, what that means, and what to type if it is not enough."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from gateway.cli.children import die_with_parent, python_module
from gateway.cli.home import home_folder, models_folder
from gateway.cli.problem import FAILED, Problem
from gateway.cli.serve_plan import own_cores, require_free_port
from policies.cores import Cores, threads_each

GIB = 1 << 30
MIN_MEMORY_BYTES = 2 * GIB
MIN_DISK_BYTES = 1 * GIB
KERNELS = "engine.execute.kernels.cpu"
OLDEST_CLOCK = 1_750_000_000.0  # a clock before mid-2025 was never set

Verdict = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `bad` must be mended before serving, `note` may be."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def check_python() -> Finding:
    """Only shown: an older Python could not have read this file."""
    return Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))


def check_torch() -> Finding:
    """By its metadata: importing torch takes seconds, and a gateway never does."""
    if importlib.util.find_spec("torch") is None:
        return Finding(
            "torch",
            "note",
            "absent: this machine can run a gateway, not a node",
            "pip install 'kagari[node]'",
        )
    try:
        return Finding("torch", "ok", version("torch"))
    except PackageNotFoundError:
        return Finding("torch", "bad", "no metadata", "reinstall: pip install 'kagari[node]'")


def check_cores(cores: Cores) -> Finding:
    """With the threads that `serve` gives an engine that is alone here, and each of two."""
    limit = "no cgroup limit" if cores.limit is None else f"cgroup limit {cores.limit:g}"
    one, two = threads_each(cores, 1), threads_each(cores, 2)
    found = f"{cores.allowed}, {limit}; threads of an engine: {one}, of two: {two} each"
    if cores.usable < 2:
        return Finding("cores", "note", found, "2 cores keep gateway and engine apart")
    return Finding("cores", "ok", found)


def check_kernels(command: Sequence[str] | None = None, patience_s: float = 20.0) -> Finding:
    """By the engine's own command, in a process of its own; it compiles what is not there yet."""
    name = "cpu kernels"
    if command is None and not all(map(importlib.util.find_spec, ("engine", "torch"))):
        return Finding(name, "note", "absent, as is an engine", "pip install 'kagari[node]'")
    with subprocess.Popen(
        command or python_module(KERNELS),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
        preexec_fn=die_with_parent(),
    ) as child:
        try:
            out, told = child.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)  # it ends its compiler
            return Finding(
                name, "note", f"not compiled in {patience_s:g} s", f"run python -m {KERNELS} once"
            )
    if child.returncode == 0:
        place, _, served = out.strip().removesuffix(")").rpartition(" (")
        if ";" in served:  # a better one computes wrongly here
            remedy = f"rm {place}; if it comes again, {served.partition(';')[0]} serves this CPU"
            return Finding(name, "note", f"instruction set {served}", remedy)
        return Finding(name, "ok", f"instruction set {served}")
    found = told.strip().removeprefix("error: ") or f"its command ended with {child.returncode}"
    if child.returncode == 2:
        return Finding(name, "bad", found, "correct or unset that variable")
    return Finding(
        name,
        "note",
        found,
        f"torch serves, but slower; else install g++ and run python -m {KERNELS}",
    )


def check_memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            text = f"{free / GIB:.1f} GiB available"
            if free < MIN_MEMORY_BYTES:
                return Finding(
                    "memory", "bad", text, "free 2 GiB, or pass a smaller --kv-device-tokens"
                )
            return Finding("memory", "ok", text)
    return Finding("memory", "note", "unknown on this system", "2 GiB are enough for the default")


def check_disk(folder: Path) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / GIB:.1f} GiB free in {there}"
    if free < MIN_DISK_BYTES:
        return Finding("disk", "bad", text, "free 1 GiB, or set KAGARI_HOME and KAGARI_MODELS")
    return Finding("disk", "ok", text)


def check_port(port: int) -> Finding:
    try:
        require_free_port("127.0.0.1", port, "--port")
    except Problem as problem:
        return Finding(f"port {port}", "note", problem.found, problem.remedy)
    return Finding(f"port {port}", "ok", "free")


def check_home(home: Path) -> Finding:
    if not home.exists():
        return Finding("home", "ok", f"{home} will be created by the first start")
    if not os.access(home, os.W_OK | os.X_OK):
        return Finding("home", "bad", f"{home} cannot be written", f"chown it to you: {home}")
    mode = home.stat().st_mode & 0o777
    if mode & 0o077:
        return Finding(
            "home", "bad", f"{home} has mode {mode:o}: others see it", f"chmod 700 {home}"
        )
    shown = [file for file in home.glob("*.key") if file.stat().st_mode & 0o077]
    shown += [file for file in home.glob("*.token") if file.stat().st_mode & 0o077]
    if shown:
        names = " ".join(str(file) for file in shown)
        return Finding("home", "bad", f"others may read {names}", f"chmod 600 {names}")
    return Finding("home", "ok", str(home))


def check_models(folder: Path) -> Finding:
    files = sorted(folder.rglob("*.gguf")) if folder.exists() else []
    if not files:
        return Finding("models", "note", f"none in {folder}", "kagari models pull smollm2-135m")
    return Finding("models", "ok", ", ".join(file.name for file in files))


def check_clock(now: float) -> Finding:
    text = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(now))
    if now < OLDEST_CLOCK:
        return Finding("clock", "bad", text, "set the clock: bills carry its time")
    return Finding("clock", "ok", text)


def check_loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return Finding("loopback", "bad", str(error), "allow connections to 127.0.0.1")
    return Finding("loopback", "ok", "127.0.0.1 answers")


def check_upstreams(home: Path) -> list[Finding]:
    """As a gateway that runs with this home sees its foreign servers; nothing where none runs."""
    from gateway.cli.admin_call import find_admin

    try:
        admin = find_admin(home=home, url=None, token=None, token_file=None)
        servers = admin.ask("GET", "/upstreams")["upstreams"]
    except Problem:
        return []
    return [
        Finding(f"upstream {one['name']}", "ok", f"up, {len(one['models'])} models")
        if one["state"] == "up"
        else Finding(
            f"upstream {one['name']}",
            "note",
            f"{one['state']}: {one['problem'] or 'its last requests failed'}",
            "start it, or mend its table in [[upstreams]]",
        )
        for one in servers
    ]


def findings(*, port: int, home: Path, models: Path) -> list[Finding]:
    checks: list[Callable[[], Finding]] = [
        check_python,
        check_torch,
        lambda: check_cores(own_cores()),
        check_kernels,
        check_memory,
        lambda: check_disk(home),
        check_loopback,
        lambda: check_port(port),
        lambda: check_home(home),
        lambda: check_models(models),
        lambda: check_clock(time.time()),
    ]
    return [*[check() for check in checks], *check_upstreams(home)]


def run_doctor(*, port: int, home: Path | None, as_json: bool) -> None:
    """Print the report; raises SystemExit(1) when something must be mended."""
    report = findings(port=port, home=home_folder(home), models=models_folder())
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in report]) + "\n")
    else:
        print_report(report)
    if any(finding.verdict == "bad" for finding in report):
        raise SystemExit(FAILED)


def print_report(report: list[Finding]) -> None:
    from gateway.cli.tables import plain_table, print_table

    marks = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad[/red]"}
    table = plain_table("check", "", "found", "remedy")
    for finding in report:
        table.add_row(finding.check, marks[finding.verdict], finding.found, finding.remedy)
    print_table(table, markup=True)
