"""Faults on real processes: what the client sees, what comes back, and that the books balance."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.children import python_module
from gateway.cli.client import HttpError, Server, StreamFailed, call, sse_data
from gateway.demo.stack import Stack
from tests.processes import wait_gone

Balanced = Callable[[Stack], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def stack(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two scripted nodes that every fault of this module is done to, one after the other."""
    home = tmp_path_factory.mktemp("faults") / "home"
    flags = ("--nodes", "2", "--port", "0", "--script", str(script))
    with Stack(home, *flags) as running:
        yield running


class Streaming:
    """A chat completion being read in a thread of its own."""

    def __init__(
        self, stack: Stack, text: str, *, session: str = "", max_tokens: int = 200
    ) -> None:
        self.events: list[Any] = []
        self.node = ""
        self.status = 0
        self.failure: BaseException | None = None
        self._body = {
            "model": stack.model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "max_tokens": max_tokens,
        }
        self._headers = {"x-session-affinity": session} if session else {}
        self._server = stack.api
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._connection = self._server.connect(60)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(self._body),
                self._server.headers(self._headers),
            )
            with self._connection.getresponse() as response:
                self.status = response.status
                self.node = response.headers.get("x-kagari-node", "")
                for event in sse_data(response):
                    with self._changed:
                        self.events.append(event)
                        self._changed.notify_all()
        except (OSError, http.client.HTTPException, StreamFailed) as error:  # cut under the reader
            self.failure = error
        finally:
            self._connection.close()

    def wait_for_text(self, within_s: float = 60) -> None:
        """Until some text has come."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.text != "", within_s), self.events

    def end(self, within_s: float = 60) -> None:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the stream hangs"

    def leave(self) -> None:
        """The client goes away in the middle."""
        self._connection.sock.shutdown(socket.SHUT_RDWR)

    @property
    def text(self) -> str:
        return "".join(
            choice["delta"].get("content") or ""
            for event in self.events
            for choice in event.get("choices", ())
        )

    @property
    def error(self) -> dict[str, Any] | None:
        errors = [event["error"] for event in self.events if event.get("error")]
        assert len(errors) <= 1
        return errors[0] if errors else None

    @property
    def finish_reasons(self) -> list[str]:
        reasons = [
            choice.get("finish_reason")
            for event in self.events
            for choice in event.get("choices", ())
        ]
        return [reason for reason in reasons if reason]


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in found.split()]


def agent_pid(stack: Stack, node: str) -> int:
    """The living agent of this node; `serve` may have started it again."""
    for pid in children(stack.process.pid):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"node_agent" in arguments and node.encode() in arguments:
            return pid
    raise AssertionError(f"no agent of {node}")


def engine_pid(stack: Stack, node: str) -> int:
    (pid,) = children(agent_pid(stack, node))
    return pid


def answer(stack: Stack, text: str) -> str:
    body = {"model": stack.model, "messages": [{"role": "user", "content": text}]}
    reply = call(stack.api, "POST", "/v1/chat/completions", body, timeout_s=30)
    content: str = reply["choices"][0]["message"]["content"]
    return content


def row_of(rows: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """The newest row with this status."""
    return next(row for row in reversed(rows) if row["status"] == status)


def test_both_nodes_serve_and_the_books_balance(stack: Stack, balanced: Balanced) -> None:
    assert answer(stack, "What is the capital of France?") == "The capital of France is Paris."
    rows = balanced(stack)
    assert [row["status"] for row in rows] == ["ok"]
    assert {node["node_id"] for node in stack.nodes()} == {"n1", "n2"}


def test_a_wrong_key_and_an_unknown_model_open_no_row(stack: Stack, balanced: Balanced) -> None:
    before = len(stack.requests())
    stranger = Server(stack.api.url, "kg-0123456789abcdef")
    for server, model, status in ((stranger, stack.model, 401), (stack.api, "smollm", 404)):
        body = {"model": model, "messages": [{"role": "user", "content": "Hello."}]}
        with pytest.raises(HttpError) as caught:
            call(server, "POST", "/v1/chat/completions", body)
        assert caught.value.status == status
        assert set(json.loads(caught.value.body)["error"]) >= {"message", "type", "param", "code"}
    assert len(balanced(stack)) == before


def test_a_client_that_leaves_stops_its_stream(stack: Stack, balanced: Balanced) -> None:
    stream = Streaming(stack, "Count slowly.")
    stream.wait_for_text()
    stream.leave()
    stream.end()
    row = balanced(stack)[-1]
    assert row["status"] == "client_left"
    assert 0 < row["completion_tokens"] < 60
    assert row["charge_nano_usd"] > 0


def test_an_engine_killed_mid_stream_ends_it_in_an_error_and_comes_back(
    stack: Stack, balanced: Balanced
) -> None:
    stream = Streaming(stack, "Count slowly.", session="killed")
    stream.wait_for_text()
    pid = engine_pid(stack, stream.node)
    os.kill(pid, signal.SIGKILL)
    stream.end()
    assert stream.error is not None
    assert stream.finish_reasons == []
    rows = balanced(stack)  # waits until the node is ready again
    failed = row_of(rows, "failed")
    assert (failed["charge_nano_usd"], failed["completion_tokens"]) == (0, 0)
    assert engine_pid(stack, stream.node) != pid
    assert answer(stack, "Are you back.") == "Yes."


def test_an_engine_that_dies_by_itself_is_an_error_too(stack: Stack, balanced: Balanced) -> None:
    stream = Streaming(stack, "Something fatal.")
    stream.end()
    assert stream.error is not None
    assert stream.finish_reasons == []
    assert row_of(balanced(stack), "failed")["charge_nano_usd"] == 0


def test_a_frozen_engine_fails_its_stream_and_others_go_on(
    stack: Stack, balanced: Balanced
) -> None:
    stream = Streaming(stack, "Count slowly.", session="frozen")
    stream.wait_for_text()
    pid = engine_pid(stack, stream.node)
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        stream.end()
        assert stream.error is not None
        assert time.monotonic() - began > 1
        assert answer(stack, "Are you there.") == "Yes."
    finally:
        os.kill(pid, signal.SIGCONT)
    assert row_of(balanced(stack), "failed")["charge_nano_usd"] == 0


def test_an_agent_killed_mid_stream_is_node_lost_and_starts_again(
    stack: Stack, balanced: Balanced
) -> None:
    stream = Streaming(stack, "Count slowly.", session="lost")
    stream.wait_for_text()
    agent, engine = agent_pid(stack, stream.node), engine_pid(stack, stream.node)
    os.kill(agent, signal.SIGKILL)
    stream.end()
    assert stream.error is not None
    assert stream.error["code"] == "node_lost"
    wait_gone([engine], 30)
    assert row_of(balanced(stack), "failed")["charge_nano_usd"] == 0
    assert agent_pid(stack, stream.node) != agent


def test_a_node_lost_before_the_first_token_is_not_seen(stack: Stack, balanced: Balanced) -> None:
    before = len(balanced(stack))
    stream = Streaming(stack, "Say it later.", session="early")
    node = busy_node(stack)
    os.kill(agent_pid(stack, node), signal.SIGKILL)
    stream.end()
    assert (stream.status, stream.error, stream.text) == (200, None, "At last.")
    assert stream.finish_reasons == ["stop"]
    rows = balanced(stack)
    assert len(rows) == before + 1
    assert rows[-1]["status"] == "ok"
    assert rows[-1]["node"] != node


def busy_node(stack: Stack) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for node in stack.nodes():
            if node["in_flight"]:
                name: str = node["node_id"]
                return name
        time.sleep(0.05)
    raise AssertionError("no node has the request")


def test_ctrl_c_drains_and_leaves_nothing(script: Path, tmp_path: Path, balanced: Balanced) -> None:
    with Stack(tmp_path / "home", "--port", "0", "--script", str(script)) as stack:
        pids = [*children(stack.process.pid), engine_pid(stack, "n1")]
        assert len(pids) == 3
        stream = Streaming(stack, "Count slowly.", max_tokens=60)
        stream.wait_for_text()
        stack.interrupt()
        stream.end()
        assert stream.error is None
        assert stream.finish_reasons in (["stop"], ["length"])
        assert stack.wait(60) == 0, stack.said()
        wait_gone(pids, 30)
    rows = stack.requests()
    assert [row["status"] for row in rows] == ["ok"]
    assert stack.kagari("ledger", "verify").returncode == 0


def test_a_killed_serve_takes_all_with_it_and_the_next_boot_settles(
    script: Path, tmp_path: Path, balanced: Balanced
) -> None:
    flags = ("--port", "0", "--script", str(script))
    with Stack(tmp_path / "home", *flags) as stack:
        key = stack.ready["api_key"]
        pids = [*children(stack.process.pid), engine_pid(stack, "n1")]
        stream = Streaming(stack, "Count slowly.")
        stream.wait_for_text()
        stack.process.kill()
        wait_gone(pids, 30)
        stream.end()
        assert stack.wait(30) is not None
    with Stack(tmp_path / "home", *flags) as again:
        assert again.ready["api_key"] == key
        assert [row["status"] for row in balanced(again)] == ["orphaned"]


def test_the_printed_curl_works(script: Path, tmp_path: Path) -> None:
    """Everything from `curl` on, as it stands on stdout, pasted into a shell."""
    process = subprocess.Popen(
        python_module(
            "gateway.cli.main",
            "serve",
            *("--home", str(tmp_path / "home"), "--port", "0", "--script", str(script)),
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        said = ""
        while "\n  -d " not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        done = subprocess.run(
            ["sh", "-c", said[said.index("curl ") :]],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert said.lstrip().startswith("ready http://127.0.0.1:")
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"], done.stderr
    assert process.returncode == 0


def test_compute_fast_reaches_the_engine_and_both_sides_keys(script: Path, tmp_path: Path) -> None:
    """What the gateway expects to be resident is what the engine then says it holds."""
    flags = ("--port", "0", "--script", str(script), "--compute", "fast")
    with Stack(tmp_path / "home", *flags) as stack:
        (model, *_) = call(stack.api, "GET", "/v1/models")["data"]
        assert model["kagari"]["compute"] == "fast"
        answer(stack, "Once. " * 200)
        deadline = time.monotonic() + 30
        while True:  # what is cached is told by a report, what is resident by events
            (engine,) = stack.nodes()[0]["engines"]
            if engine["resident_pages"] == (engine["report"] or {}).get("pages_cached", 0) > 1:
                break
            assert time.monotonic() < deadline, engine
            time.sleep(0.1)
        assert (engine["info"]["compute"], engine["info"]["identity"][-5:]) == ("fast", "+fast")
