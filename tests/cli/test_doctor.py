"""The doctor: each check finds the illness it is for and names a remedy."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.cli.doctor import (
    check_clock,
    check_cores,
    check_home,
    check_kernels,
    check_memory,
    check_models,
    check_port,
    findings,
)
from policies.cores import Cores

Kagari = Callable[..., subprocess.CompletedProcess[str]]


def test_memory_that_does_not_suffice(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900000 kB\nMemAvailable: 1000000 kB\n")
    assert check_memory(meminfo).verdict == "bad"
    meminfo.write_text("MemAvailable: 9000000 kB\n")
    assert check_memory(meminfo).verdict == "ok"
    assert check_memory(tmp_path / "absent").verdict == "note"


def test_cores_and_what_they_mean_for_engines() -> None:
    assert (
        check_cores(Cores(8)).found == "8, no cgroup limit; threads of an engine: 8, of two: 4 each"
    )
    finding = check_cores(Cores(64, 1.5))
    assert (finding.verdict, "cgroup limit 1.5" in finding.found) == ("note", True)
    assert finding.found.endswith("threads of an engine: 1, of two: 1 each")


@pytest.mark.parametrize(
    ("program", "verdict", "found"),
    [
        ("print('/x/kernels.so (avx2)')", "ok", "instruction set avx2"),
        ("print('/x/kernels.so (avx2; avx512 f')", "note", "instruction set avx2; avx512 f"),
        ("sys.exit('No C++ compiler.')", "note", "No C++ compiler."),
        ("sys.stderr.write('KAGARI_X: found y'); sys.exit(2)", "bad", "KAGARI_X: found y"),
        ("os.kill(os.getpid(), 9)", "note", "its command ended with -9"),
        ("time.sleep(60)", "note", "not compiled in 2 s"),
    ],
)
def test_kernels_or_why_torch_serves(program: str, verdict: str, found: str) -> None:
    command = [sys.executable, "-c", f"import os, sys, time; {program}"]
    finding = check_kernels(command, patience_s=2.0)
    assert (finding.verdict, finding.found) == (verdict, found)
    assert (finding.verdict == "ok") == (finding.remedy == "")


def test_home_that_others_can_read(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert check_home(home).verdict == "ok"
    home.mkdir(mode=0o755)
    assert check_home(home).verdict == "bad"
    home.chmod(0o700)
    key = home / "api.key"
    key.touch(mode=0o644)
    finding = check_home(home)
    assert finding.verdict == "bad"
    assert finding.remedy == f"chmod 600 {key}"
    key.chmod(0o600)
    assert check_home(home).verdict == "ok"


def test_models_and_clock_and_port(tmp_path: Path) -> None:
    assert check_models(tmp_path).remedy == "kagari models pull smollm2-135m"
    (tmp_path / "some.gguf").touch()
    assert check_models(tmp_path).found == "some.gguf"
    assert check_clock(0.0).verdict == "bad"
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert check_port(server.getsockname()[1]).verdict == "note"


def test_what_is_not_well_has_a_remedy(tmp_path: Path) -> None:
    for finding in findings(port=8000, home=tmp_path, models=tmp_path):
        assert (finding.verdict == "ok") == (finding.remedy == "")


def test_json_and_exit_code(kagari: Kagari, tmp_path: Path) -> None:
    told = kagari("doctor", "--json")
    report = json.loads(told.stdout)
    bad = [finding for finding in report if finding["verdict"] == "bad"]
    assert told.returncode == (1 if bad else 0)
    assert {"python", "torch", "cores", "cpu kernels", "memory", "disk", "clock"} <= {
        f["check"] for f in report
    }
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o755)
    assert kagari("doctor", "--json").returncode == 1
    assert "chmod 700" in kagari("doctor").stdout.replace("\n", " ")
