"""Two nodes of one machine: a killed node's pages serve the other from the memory they share."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cluster_store.sessions import say
from gateway.demo.stack import Stack
from tests.cluster.test_cluster_store import PAGE, opening, wait_stored
from tests.engine.test_shared_host_process import arena_files

Balanced = Callable[[Stack], list[dict[str, Any]]]


def test_a_killed_nodes_pages_are_found_by_its_neighbour(
    tmp_path: Path, balanced: Balanced
) -> None:
    flags = ("--nodes", "2", "--port", "0", "--kv-host-mb", "64", "--kv-disk-mb", "0")
    with Stack(tmp_path / "home", *flags, "--kv-device-tokens", "4096") as stack:
        first = say(stack, opening("one"), 1)
        wait_stored(stack, first.prompt_tokens // PAGE)
        os.kill(stack.ready["pids"][first.node], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while {node["node_id"]: node["state"] for node in stack.nodes()}[first.node] == "ready":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        second = say(stack, opening("one"), 1)
        assert second.node != first.node
        assert (second.text, second.cached_tokens) == (
            first.text,
            first.prompt_tokens // PAGE * PAGE,
        )
        deadline = time.monotonic() + 30  # it comes back, to the same memory
        while [node["state"] for node in stack.nodes()] != ["ready", "ready"]:
            assert time.monotonic() < deadline, stack.warnings()
            time.sleep(0.1)
        (arena,) = {
            engine["info"]["host_arena"] for node in stack.nodes() for engine in node["engines"]
        }
        assert len(arena_files(arena)) == 1
        row = balanced(stack)[-1]
        assert row["tiers"] == {"host": second.cached_tokens}
    assert arena_files(arena) == [], f"the last to leave removes it; told: {stack.warnings()}"
