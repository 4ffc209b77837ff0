"""Idempotency keys over the death of a real gateway process: nothing is run or billed twice."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.verify import verify

ROOT = Path(__file__).resolve().parents[3]
KEY = "process-key-0123456789"
CHAT = "/v1/chat/completions"


@contextmanager
def scripted_gateway(home: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """`python -m gateway` with a scripted node on its link; killed at the end."""
    ports = ["--port", "0", "--link-port", "0", "--admin-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--home", str(home), "--api-key", KEY, *ports],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready: dict[str, Any] = {"event": ""}
        while ready["event"] != "ready":
            ready = json.loads(process.stdout.readline())
        node = sys.modules["scripted_node"].ScriptedNode("n1")
        token = (home / "join.token").read_text().strip()
        with (
            in_thread(node.run(ready["link_url"], token)),
            httpx.Client(
                base_url=ready["url"],
                headers={"authorization": f"Bearer {KEY}"},
                timeout=20,
                trust_env=False,
            ) as client,
        ):
            wait_for(lambda: client.get("/readyz").status_code == 200)
            yield process, client
    finally:
        process.kill()
        process.communicate(timeout=10)


@contextmanager
def in_thread(work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Runs until the block ends."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        ended = asyncio.Event()
        task = asyncio.create_task(work)
        started.set_result((asyncio.get_running_loop(), ended))
        await ended.wait()
        task.cancel()
        await asyncio.wait((task,))

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    loop, ended = started.result(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def body_of(script: dict[str, Any], **fields: Any) -> bytes:
    messages = [{"role": "user", "content": json.dumps(script)}]
    return json.dumps({"model": "tiny", "messages": messages, **fields}).encode()


def statuses(home: Path) -> list[str]:
    connection = sqlite3.connect(f"file:{home / LEDGER_NAME}?mode=ro", uri=True)
    try:
        found = connection.execute("SELECT status FROM requests ORDER BY sequence")
        return [row[0] for row in found]
    finally:
        connection.close()


def test_gateway_killed_with_answers_given_and_running(tmp_path) -> None:
    given = body_of({"say": "given"})
    cut = body_of({"say": "x" * 2000, "delay_s": 0.02}, stream=True)
    again = body_of({"say": "short"})
    with scripted_gateway(tmp_path) as (process, client):
        first = client.post(CHAT, content=given, headers={"idempotency-key": "given"})
        assert first.status_code == 200
        with client.stream("POST", CHAT, content=cut, headers={"idempotency-key": "cut"}) as reply:
            assert next(reply.iter_bytes())
            wait_for(lambda: statuses(tmp_path) == ["ok", "open"])
            process.kill()
            process.wait(10)
    assert statuses(tmp_path) == ["ok", "open"]
    with scripted_gateway(tmp_path) as (_, client):
        gone = client.post(CHAT, content=given, headers={"idempotency-key": "given"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (409, "idempotent_answer_gone")
        assert first.headers["x-request-id"] in gone.json()["error"]["found"]
        assert gone.headers["x-should-retry"] == "false"
        # The one that was cut was billed nothing, so its key is free; the body may even differ.
        retried = client.post(CHAT, content=again, headers={"idempotency-key": "cut"})
        assert retried.status_code == 200
        wait_for(lambda: statuses(tmp_path) == ["ok", "orphaned", "ok"])
    assert verify(tmp_path / LEDGER_NAME).problems == ()
