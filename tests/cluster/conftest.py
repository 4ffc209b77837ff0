"""Whole Kagaris on loopback: real processes, scripted engines or the embedded model."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.children import python_module
from gateway.demo.stack import Stack
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.verify import verify

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"

Counted = Callable[[Stack], list[dict[str, Any]]]


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Children find the packages of this checkout, and the model is here before any test."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    subprocess.run(
        python_module("node_agent", "models", "pull", MODEL),
        check=True,
        timeout=600,
        stdout=subprocess.DEVNULL,
    )
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replies for scripted engines, chosen by a word in the prompt."""
    counting = " ".join(str(number) for number in range(60))
    replies = [
        {"if": "slowly", "say": counting, "delay_ms": 30},
        {"if": "later", "say": "At last.", "delay_ms": 1500},
        {"if": "fatal", "say": counting, "delay_ms": 20, "die_after": 50},
        {"if": "capital of France", "say": "The capital of France is Paris."},
        {"if": ".", "say": "Yes."},
    ]
    path = tmp_path_factory.mktemp("script") / "replies.json"
    path.write_text(json.dumps(replies))
    return path


@pytest.fixture(scope="session")
def balanced() -> Counted:
    """A function that waits until a stack is at rest, asserts that its books are, gives the rows.

    At rest every page is free or cached, nothing is open, and the ledger verifies.
    """

    def check(stack: Stack, *, within_s: float = 60.0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + within_s
        while True:
            rows = stack.requests()
            unrest = [*unsettled(rows), *astray(stack.nodes())]
            if not unrest:
                break
            assert time.monotonic() < deadline, unrest
            time.sleep(0.2)
        assert verify(stack.home / LEDGER_NAME).problems == ()
        return rows

    return check


def unsettled(rows: list[dict[str, Any]]) -> list[str]:
    return [f"open row {row['request_id']}" for row in rows if row["status"] == "open"]


def astray(nodes: list[dict[str, Any]]) -> list[str]:
    """What is wrong with any engine's pages or queue, or a node that is not ready."""
    wrong = []
    for node in nodes:
        if node["state"] != "ready" or not node["engines"]:
            wrong.append(f"{node['node_id']} is {node['state']}")
        for engine in node["engines"]:
            report = engine["report"]
            if report is None or report["state"] != "ready":
                wrong.append(f"{node['node_id']}: no ready engine")
                continue
            total = report["pages_free"] + report["pages_held"] + report["pages_cached"]
            if total != report["pages_total"] or report["pages_held"]:
                wrong.append(f"{node['node_id']}: pages {report}")
            if report["waiting_sequences"] or report["running_sequences"] or node["in_flight"]:
                wrong.append(f"{node['node_id']}: still at work {report}")
    return wrong
