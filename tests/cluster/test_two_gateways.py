"""Two gateways over the same two nodes: each has its own book, and neither disturbs the other."""

from __future__ import annotations

import http.client
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.cli.children import python_module
from gateway.cli.client import HttpError, Server, call
from gateway.cli.serve_plan import free_ports
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.requests import requests

KEY = "kg-0123456789abcdef"
TOKEN = "token-of-both-gateways"
MODEL = "smollm2-135m"


class Gateway:
    """`kagari gateway` on ports of its own, which it keeps when it is started again."""

    def __init__(self, home: Path, join_token: Path) -> None:
        self.home = home
        home.mkdir(mode=0o700)
        key = home / "given.key"
        key.write_text(KEY)
        self.port, self.link_port, self.admin_port = free_ports("127.0.0.1", 3)
        self.api = Server(f"http://127.0.0.1:{self.port}", KEY)
        self._argv = python_module(
            "gateway.cli.main",
            "gateway",
            *("--port", str(self.port), "--link-port", str(self.link_port)),
            *("--admin-port", str(self.admin_port), "--home", str(home)),
            *("--api-key-file", str(key), "--join-token-file", str(join_token)),
        )
        self.start()

    def start(self) -> None:
        with (self.home / "said.log").open("ab") as said:
            self.process = subprocess.Popen(self._argv, stdout=said, stderr=said)

    def ready_nodes(self) -> list[str]:
        """Nodes that are ready and at rest, by what this gateway knows."""
        token = self.home / "admin.token"
        try:
            operator = Server(f"http://127.0.0.1:{self.admin_port}", token.read_text().strip())
            nodes = call(operator, "GET", "/admin/v1/nodes")["nodes"]
        except (OSError, HttpError, http.client.HTTPException):
            return []
        ready = [node for node in nodes if node["state"] == "ready" and not node["in_flight"]]
        return sorted(node["node_id"] for node in ready)

    def ask(self, text: str) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 90}
        reply = call(self.api, "POST", "/v1/chat/completions", body, timeout_s=30)
        return str(reply["choices"][0]["message"]["content"])

    def statuses(self) -> list[str]:
        """Of all rows; what is open is so for 3 s."""
        return [line.status for line in requests(self.home / LEDGER_NAME)]


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
        raise


@pytest.fixture
def gateways(tmp_path: Path, script: Path) -> Iterator[tuple[Gateway, Gateway]]:
    join_token = tmp_path / "join.token"
    join_token.write_text(TOKEN)
    with ExitStack() as ending:
        made = []
        for name in ("g1", "g2"):
            made.append(gateway := Gateway(tmp_path / name, join_token))
            ending.callback(lambda gateway=gateway: end(gateway.process))
        for node in ("n1", "n2"):
            argv = python_module(
                "gateway.cli.main",
                "node",
                *(f"--gateway=ws://127.0.0.1:{gateway.link_port}" for gateway in made),
                *("--join-token-file", str(join_token), "--node-id", node),
                *("--home", str(tmp_path / node), "--script", str(script), "--exit-with-parent"),
            )
            with (tmp_path / f"{node}.log").open("wb") as said:
                process = subprocess.Popen(argv, stdout=said, stderr=said)
            ending.callback(lambda process=process: end(process))
        for gateway in made:
            eventually(lambda gateway=gateway: gateway.ready_nodes() == ["n1", "n2"], 60)
        yield made[0], made[1]


def test_a_killed_gateway_comes_back_to_its_nodes_and_the_other_never_notices(
    gateways: tuple[Gateway, Gateway],
) -> None:
    killed, other = gateways
    counted = " ".join(str(number) for number in range(60))
    with ThreadPoolExecutor(8) as pool:
        lost = [pool.submit(killed.ask, "Count slowly.") for _ in range(4)]
        kept = [pool.submit(other.ask, "Count slowly.") for _ in range(4)]
        eventually(lambda: killed.statuses().count("open") == 4)
        killed.process.kill()
        killed.process.wait(5)
        for answer in lost:
            with pytest.raises((OSError, http.client.HTTPException)):
                answer.result(30)
        killed.start()
        eventually(lambda: killed.ready_nodes() == ["n1", "n2"])
        assert all(answer.result(30).startswith(counted[:40]) for answer in kept)
    assert killed.ask("Are you back.") == other.ask("Are you there.") == "Yes."
    eventually(lambda: killed.statuses() == ["orphaned"] * 4 + ["ok"])
    eventually(lambda: other.statuses() == ["ok"] * 5)
    eventually(lambda: killed.ready_nodes() == other.ready_nodes() == ["n1", "n2"])
