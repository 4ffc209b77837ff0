"""`python -m gateway` as a process: its lines on stdout, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
KEY = "process-key-0123456789"


@contextmanager
def gateway_process(home: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The process and its ready line; killed at the end if it still runs."""
    ports = ["--port", "0", "--link-port", "0", "--admin-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--home", str(home), "--api-key", KEY, *ports, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready: Any = None
        stages = []
        while ready is None:
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            event = json.loads(line)
            if event["event"] == "ready":
                ready = {**event, "stages": stages}
            else:
                stages.append(event)
        yield process, ready
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_stage_lines_then_ready_with_real_ports_then_a_clean_end(tmp_path) -> None:
    with gateway_process(tmp_path) as (process, ready):
        assert [s["stage"] for s in ready["stages"]] == [
            "home",
            "keys",
            "ledger",
            "fleet",
            "listen",
        ]
        assert all(s["seconds"] >= 0 for s in ready["stages"])
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(ready["url"] + "/v1/models", headers=headers, trust_env=False).json() == {
            "object": "list",
            "data": [],
        }
        assert httpx.get(ready["admin_url"] + "/livez", trust_env=False).text == "ok\n"
        assert ready["link_url"].startswith("ws://127.0.0.1:")
        assert ready["link_url"].endswith("/link/v1")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
        assert process.returncode == 0, err
        assert json.loads(out)["event"] == "draining"
        assert "Traceback" not in err


def test_second_signal_ends_at_once(tmp_path) -> None:
    with gateway_process(tmp_path, "--drain-s", "60") as (process, ready):
        port = int(ready["url"].rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9\r\n"
                b"Expect: 100-continue\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"
            )
            assert sock.recv(4096).startswith(b"HTTP/1.1 100 ")  # it is under way
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "draining"
            time.sleep(0.5)
            assert process.poll() is None  # it waits for the one that is under way
            process.send_signal(signal.SIGINT)  # two at a time would be one
            assert process.wait(30) == 1  # a clean end is 0


def test_taken_port_is_an_error_in_words(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "gateway", "--home", str(tmp_path), "--port", port],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
        )
    assert done.returncode == 1
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flags", [["--api-key", "short"], ["--routing", "nowhere"]])
def test_wrong_flag_exits_2(tmp_path, flags) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--home", str(tmp_path), "--port", "0", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
