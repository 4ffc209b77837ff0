"""A page computed on one node is found by another through a real Mooncake Store, or computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster_store.sessions import say
from gateway.demo.scenario import Message, system_prompt
from gateway.demo.stack import Stack
from tests.engine.store.mooncake_cluster import Cluster, network, until

Balanced = Callable[[Stack], list[dict[str, Any]]]
PAGE = 64


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(network(), tmp_path, port=21091)
    yield cluster
    cluster.stop()


def test_pages_travel_between_nodes_until_their_store_is_killed(
    cluster: Cluster, tmp_path: Path, balanced: Balanced
) -> None:
    """Nodes are taken in turn, so that each question is asked of both."""
    master = cluster.master()
    flags = ("--nodes", "2", "--port", "0", "--kv-host-mb", "0", "--kv-disk-mb", "0")
    url = cluster.url.replace("segment_mb=0", "segment_mb=128")
    turns = {"KAGARI_ROUTING__POLICY": "round_robin"}
    with (
        network().inside(),
        Stack(
            tmp_path / "home",
            *flags,
            *("--kv-device-tokens", "8192", "--cluster-store", url),
            environment=turns,
        ) as stack,
    ):
        until(lambda: len(cluster.ask("/get_all_segments").split()) == 2)
        first = say(stack, opening("one"), 1)
        wait_stored(stack, first.prompt_tokens // PAGE)
        second = say(stack, opening("one"), 1)
        assert second.node != first.node
        assert second.text == first.text
        assert (first.cached_tokens, second.cached_tokens) == (
            0,
            first.prompt_tokens // PAGE * PAGE,
        )
        rows = balanced(stack)
        assert rows[-1]["request_id"] == second.request_id
        assert rows[-1]["tiers"] == {"cluster": second.cached_tokens}

        master.kill()
        lost = [say(stack, opening("two"), 2) for _ in range(2)]
        assert len({reply.node for reply in lost}) == 2
        assert len({reply.text for reply in lost}) == 1
        rows = balanced(stack)
        assert [row["tiers"] for row in rows[-2:]] == [{}, {}]
        assert [row["status"] for row in rows] == ["ok"] * len(rows)


def opening(word: str) -> list[Message]:
    return [
        {"role": "system", "content": f"Number {word}. {system_prompt()[:1600]}"},
        {"role": "user", "content": "What is the capital of France?"},
    ]


def wait_stored(stack: Stack, num_pages: int) -> None:
    deadline = time.monotonic() + 30
    while num_pages > sum(
        tier["stored_pages"]
        for node in stack.nodes()
        for engine in node["engines"]
        if engine["report"] is not None
        for tier in engine["report"]["tiers"]
    ):
        assert time.monotonic() < deadline, stack.warnings()
        time.sleep(0.1)
