"""Money over real processes: choices and prompts, clients that leave, nodes that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.demo.stack import Stack
from policies.contract.wire import Usage
from policies.pricing import Rates, charge_nano_usd

Balanced = Callable[..., list[dict[str, Any]]]


@dataclass
class Told:
    """What clients were told, by the id of the request that ran."""

    usages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    replayed: int = 0


def body_of(dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    body: dict[str, Any] = {
        "model": model,
        "stream": dice.random() < 0.6,
        "n": dice.choice([1, 2, 3, 5]),
        "max_tokens": dice.choice([1, 7, 30, 200]),
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if dice.random() < 0.4:
        body["usage"] = {"include": True}
    if dice.random() < 0.4:
        body["stop"] = dice.choice(["3", "Y", "1 2"])
    word = dice.choice(
        ["slowly", "quick", "quick", "quick", "plain"] + ["fatal"] * (dice.random() < 0.2)
    )
    text = "pad " * dice.choice([0, 0, 100, 300]) + word
    if dice.random() < 0.5:
        body["messages"] = [{"role": "user", "content": text + "."}]
        if dice.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": 1}
        return "/chat/completions", body
    body["prompt"] = [f"{text} {number}." for number in range(dice.choice([1, 2, 7]))]
    if dice.random() < 0.5:
        body["logprobs"] = 1
    if dice.random() < 0.5:
        body["echo"] = True
        body["max_tokens"] = dice.choice([0, body["max_tokens"]])
    return "/completions", body


def read(reply: httpx.Response, told: Told, *, until: float) -> None:
    """All of an answer, unless its reader has left by then; what it says of its usage."""
    replayed = "x-kagari-original-request-id" in reply.headers
    request_id = reply.headers["x-kagari-original-request-id" if replayed else "x-request-id"]
    data = b""
    for piece in reply.iter_bytes():
        data += piece
        if time.monotonic() > until:
            return
    told.replayed += replayed
    if reply.status_code != 200:
        told.failed.add(request_id)
        return
    if reply.headers["content-type"].startswith("application/json"):
        told.usages.append((request_id, json.loads(data)["usage"]))
        return
    pieces = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    if pieces[-1] == "[DONE]":
        told.usages.append((request_id, json.loads(pieces[-2])["usage"]))
    else:
        assert "error" in json.loads(pieces[-1]), "it ended without an end"
        told.failed.add(request_id)


def visit(stack: Stack, seed: int, told: Told) -> None:
    """One request. With a key it may be sent at the same instant over another protocol, and again
    when all is over."""
    dice = random.Random(seed)
    path, body = body_of(dice, stack.model)
    headers = {"authorization": f"Bearer {stack.api.secret}"}
    has_key = dice.random() < 0.4
    if has_key:
        headers["idempotency-key"] = f"key {seed}"

    def once(http2: bool, patience_s: float = 60.0) -> None:
        until = time.monotonic() + patience_s
        with (
            suppress(httpx.TransportError),  # its own time-out is how a client leaves
            httpx.Client(
                base_url=stack.ready["url"],
                headers=headers,
                timeout=httpx.Timeout(60, read=patience_s),
                http1=not http2,
                http2=http2,
                trust_env=False,
            ) as client,
            client.stream("POST", path, json=body) as reply,
        ):
            read(reply, told, until=until)

    copies = 2 if has_key and dice.random() < 0.5 else 1
    patience = [dice.choice([60.0, 60.0, 0.02, 0.1, 0.4]) for _ in range(copies)]
    first = dice.randrange(2)
    with ThreadPoolExecutor(copies) as pool:
        list(pool.map(once, [bool(first), not first], patience))
    if has_key:
        once(bool(dice.randrange(2)))


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def node_pids(stack: Stack) -> list[int]:
    """Agents and engines that run now, but not the gateway."""
    agents = [
        pid
        for pid in children_of(stack.process.pid)
        if b"node_agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return agents + [engine for agent in agents for engine in children_of(agent)]


def kill_now_and_then(stack: Stack, dice: random.Random, over: threading.Event) -> None:
    while not over.wait(dice.uniform(0.5, 3)):
        with suppress(FileNotFoundError, ProcessLookupError):
            if pids := node_pids(stack):
                os.kill(dice.choice(pids), signal.SIGKILL)


def run_visits(stack: Stack, seeds: range, told: Told) -> None:
    over = threading.Event()
    killer = threading.Thread(target=kill_now_and_then, args=(stack, random.Random(1), over))
    killer.start()
    try:
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda seed: visit(stack, seed, told), seeds))
    finally:
        over.set()
        killer.join()


@pytest.mark.parametrize(
    ("first_seed", "visits"), [(1, 30), pytest.param(1000, 1500, marks=pytest.mark.slow)]
)
def test_what_clients_were_told_is_what_the_book_says_once(
    tmp_path: Path, script: Path, balanced: Balanced, first_seed: int, visits: int
) -> None:
    told = Told()
    flags = ("--nodes", "3", "--port", "0", "--script", str(script))
    with Stack(tmp_path / "home", *flags) as stack:
        run_visits(stack, range(first_seed, first_seed + visits), told)
        rows = balanced(stack, within_s=60)  # a killed node comes back first
    row_by_id = {row["request_id"]: row for row in rows}
    assert len(row_by_id) == len(rows)
    for row in rows:
        rates = Rates(**row["rates"])
        counted = Usage(row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
        assert row["charge_nano_usd"] == charge_nano_usd(counted, rates)
    for request_id, usage in told.usages:
        row = row_by_id[request_id]
        assert row["status"] == "ok"
        assert row["prompt_tokens"] == usage["prompt_tokens"]
        assert row["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert row["completion_tokens"] == usage["completion_tokens"]
        if "cost_details" in usage:
            assert row["charge_nano_usd"] == usage["cost_details"]["charge_nano_usd"]
    for request_id in told.failed & row_by_id.keys():  # what was refused has no row
        assert (row_by_id[request_id]["status"], row_by_id[request_id]["charge_nano_usd"]) == (
            "failed",
            0,
        )
    outcomes = Counter(row["status"] for row in rows)
    assert outcomes["ok"] > 0
    assert told.replayed > 0
