"""`serve` with small fakes for its children: stages, essentials, restart, drain, kill, orphans.

The fakes are modules named `gateway` and `node_agent` on a path of their own; `serve` itself runs
from this checkout by its file, so that only its children find the fakes first.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_gone

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0  # with whatever is to come, on a machine that is busy

GATEWAY = """
import argparse, http.server, json, os, signal, sys, threading, time
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("host", "port", "link-port", "admin-port", "home", "api-key-file", "join-token-file"):
    parser.add_argument("--" + flag)
options, _ = parser.parse_known_args()
home = Path(options.home)
mode = (home / "mode").read_text() if (home / "mode").exists() else ""
print(json.dumps({"stage": "open the ledger", "seconds": 0.01}), flush=True)
if mode == "broken":
    sys.exit("the ledger is half migrated")
(home / "admin.token").write_text("operator\\n")

def named(file):
    return (home / file).read_text().split() if (home / file).exists() else ["fake"]

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        served = named("served")
        engines = [
            {"info": {"model": name}, "bundle": "no vocabulary" if mode == "unfit" else "loaded"}
            for name in named("engines")
        ]
        nodes = [
            {"node_id": p.stem, "state": "ready", "engines": engines} for p in home.glob("*.node")
        ]
        models = [{"id": name, "kagari": {"chat": True}} for name in served]
        body = {"/v1/models": {"data": models}, "/admin/v1/nodes": {"nodes": nodes}}
        data = json.dumps(body[self.path]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

def stop(*_):
    (home / "gateway.drained").write_text(str(time.monotonic()))
    if mode != "stubborn":
        os._exit(0)

signal.signal(signal.SIGTERM, stop)
for port in (options.port, options.admin_port):
    server = http.server.ThreadingHTTPServer((options.host, int(port)), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(1)
"""

NODE = """
import argparse, json, os, signal, subprocess, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--node-id")
parser.add_argument("--home")
options, _ = parser.parse_known_args()
home = Path(options.home)
mode = (home / "mode").read_text()
for done in range(36 if mode == "pulling" else 0):
    print(json.dumps({"event": "progress", "stage": "download", "bytes": done}), flush=True)
    time.sleep(0.1)
while mode == "silent":
    time.sleep(1)

def stop(*_):
    (home / (options.node_id + ".stopped")).write_text(str(time.monotonic()))
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
print(json.dumps({"stage": "load weights", "seconds": 1.5, "detail": "fake"}), flush=True)
(home / (options.node_id + ".node")).write_text(str(os.getpid()))
with (home / "starts").open("a") as file:
    file.write(options.node_id + "\\n")
while True:
    time.sleep(1)
"""


class Served:
    """A running `serve` on fakes."""

    def __init__(
        self, tmp_path: Path, *flags: str, mode: str = "", silence_s: float = 60.0
    ) -> None:
        fakes = tmp_path / "fakes"
        fakes.mkdir()
        for name, source in (("gateway", GATEWAY), ("node_agent", NODE)):
            (fakes / name).mkdir()
            (fakes / name / "__main__.py").write_text(source)
        self.home = tmp_path / "home"
        self.home.mkdir(mode=0o700)
        (self.home / "mode").write_text(mode)
        starter = (
            f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); import gateway.cli.main as m; "
            f"import gateway.cli.serve as s; s.SILENCE_S = {silence_s}; "
            f"os.environ['PYTHONPATH'] = {str(fakes)!r}; m.main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", starter, "serve", "--home", str(self.home), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def wait_for(self, name: str) -> Path:
        path = self.home / name
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            assert time.monotonic() < deadline, f"{name} did not come"
            time.sleep(0.02)
        return path

    def wait_until_ready(self) -> None:
        self.wait_for("last_start_s")

    def node_pid(self, name: str = "n1") -> int:
        return int(self.wait_for(f"{name}.node").read_text())

    def pids(self) -> list[int]:
        """Of all its children."""
        own = self.process.pid
        return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def served(tmp_path: Path, free_port: int) -> Iterator[Served]:
    running = Served(tmp_path, "--nodes", "2", "--port", str(free_port))
    yield running
    if running.process.poll() is None:
        running.process.kill()
    running.process.communicate()


def test_stages_essentials_and_a_drain_in_order(served: Served, free_port: int) -> None:
    served.wait_until_ready()
    pids = served.pids()
    assert len(pids) == 3
    served.process.send_signal(signal.SIGINT)
    code, out, err = served.end()
    assert code == 0
    assert out.lstrip().startswith(f"ready http://127.0.0.1:{free_port}/v1\n")
    secret = (served.home / "api.key").read_text().strip()
    assert f"key   {secret}\n" in out
    assert "What is the capital of France?" in out
    assert "load weights" in err
    assert "1.50s" in err
    gateway = float((served.home / "gateway.drained").read_text())
    for name in ("n1", "n2"):
        assert float((served.home / f"{name}.stopped").read_text()) >= gateway
    wait_gone(pids, PATIENCE_S)


def test_every_child_has_a_process_group_of_its_own(served: Served) -> None:
    served.wait_until_ready()
    groups = {os.getpgid(pid) for pid in served.pids()}
    assert groups == set(served.pids())
    assert served.process.pid not in groups


def test_children_end_with_a_killed_parent(served: Served) -> None:
    served.wait_until_ready()
    pids = served.pids()
    assert len(pids) == 3
    served.process.kill()
    wait_gone(pids, PATIENCE_S)


def test_a_node_that_dies_is_started_again(served: Served) -> None:
    served.wait_until_ready()
    os.kill(served.node_pid("n2"), signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while (served.home / "starts").read_text().split().count("n2") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    served.process.send_signal(signal.SIGTERM)
    code, _, err = served.end()
    assert code == 0
    assert "n2 ended" in err


def test_the_gateways_end_ends_all_with_its_last_words(served: Served) -> None:
    served.wait_until_ready()
    pids = served.pids()
    gateway = next(pid for pid in pids if pid not in (served.node_pid("n1"), served.node_pid("n2")))
    os.kill(gateway, signal.SIGKILL)
    code, _, err = served.end()
    assert code == 1
    assert "error: gateway" in err
    wait_gone(pids, PATIENCE_S)


def test_a_second_signal_kills(tmp_path: Path, free_port: int) -> None:
    served = Served(tmp_path, "--port", str(free_port), mode="stubborn")
    served.wait_until_ready()
    pids = served.pids()
    served.process.send_signal(signal.SIGINT)
    served.wait_for("gateway.drained")
    assert served.process.poll() is None
    served.process.send_signal(signal.SIGINT)
    code, _, err = served.end()
    assert code == 1
    assert "ending at once" in err
    wait_gone(pids, PATIENCE_S)


def test_a_gateway_that_cannot_start_says_why(tmp_path: Path, free_port: int) -> None:
    served = Served(tmp_path, "--port", str(free_port), mode="broken")
    code, out, err = served.end()
    assert code == 1
    assert out == ""
    assert "the ledger is half migrated" in err
    assert "remedy:" in err


def test_a_busy_port_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        served = Served(tmp_path, "--port", str(server.getsockname()[1]))
        code, _, err = served.end()
    assert code == 2
    assert "in use by another process" in err
    assert not (served.home / "starts").exists()


def test_json_is_one_object_for_a_script(tmp_path: Path) -> None:
    served = Served(tmp_path, "--port", "0", "--json")
    assert served.process.stdout is not None
    ready = json.loads(served.process.stdout.readline())
    assert ready["ready"] is True
    assert ready["models"] == ["fake"]
    assert set(ready["pids"]) == {"gateway", "n1"}
    assert ready["url"].startswith("http://127.0.0.1:")
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 0


def test_a_pull_that_goes_on_is_not_given_up(tmp_path: Path) -> None:
    served = Served(tmp_path, "--port", "0", mode="pulling", silence_s=3.0)
    served.wait_until_ready()
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 0


def test_a_start_without_a_word_is_given_up_with_the_logs_named(tmp_path: Path) -> None:
    served = Served(tmp_path, "--port", "0", mode="silent", silence_s=1.0)
    code, _, err = served.end()
    assert code == 1
    assert "for 1 s no process said a word" in err
    assert str(served.home / "logs") in err


def test_ready_means_that_every_model_answers(tmp_path: Path) -> None:
    served = Served(tmp_path, "--port", "0", "--model", "fake", "--model", "late")
    served.wait_for("n1.node")
    time.sleep(0.6)  # it asks every 0.2 s; the second engine is not there
    assert not (served.home / "last_start_s").exists()
    (served.home / "engines").write_text("fake late")
    time.sleep(0.6)  # the gateway still reads the second one's tokenizer
    assert not (served.home / "last_start_s").exists()
    (served.home / "served").write_text("fake late")
    served.wait_until_ready()
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 0


def test_a_tokenizer_that_the_gateway_refuses_ends_the_start(tmp_path: Path) -> None:
    served = Served(tmp_path, "--port", "0", mode="unfit")
    code, _, err = served.end()
    assert code == 1
    assert "error: --model fake" in err
    assert "no vocabulary" in err
