"""Splits whose pages come from slower tiers: disks and a cluster store over kills, and memory."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.children import children
from gateway.cli.client import call
from gateway.demo.stack import Stack
from tests.cluster.split_faults import words
from tests.cluster.test_split_cluster import PAGE, Answer, ask, eventually, operator
from tests.engine.store.mooncake_cluster import Cluster, network

Balanced = Callable[[Stack], list[dict[str, Any]]]
Tiers = dict[str, dict[str, Any]]

PREFILL, DECODE = "n1", "n2"
FLAGS = (
    *("--prefill", "1", "--decode", "1", "--split", "always", "--port", "0", "--threads", "1"),
    *("--kv-device-tokens", "4096", "--kv-disk-mb", "0"),
)
ON_DISK = (*FLAGS[:-1], "64", "--kv-host-mb", "0")
SETTLED_S = 0.5  # for what a turn leaves to be stored
TOLD_S = 1.5  # each engine tells of its tiers once a second
TRIES = 3


def tiers(stack: Stack) -> dict[str, Tiers]:
    """What each engine that serves last said of its slower tiers, by node and name."""
    return {
        node["node_id"]: {tier["tier"]: tier for tier in engine["report"]["tiers"]}
        for node in stack.nodes()
        for engine in node["engines"]
        if node["state"] == "ready" and engine["report"] is not None
    }


def wait_for(stack: Stack, holds: Callable[[Tiers], bool]) -> None:
    """Until it does on both nodes; each tells of its tiers once a second."""
    eventually(lambda: [holds(of) for of in tiers(stack).values()] == [True, True])


def kill_both(stack: Stack) -> None:
    """Agents and engines by SIGKILL, so that nothing is saved; returns when both serve again."""
    epochs = {node["node_id"]: node["epoch"] for node in stack.nodes()}
    agents = [
        pid
        for pid in children(stack.process.pid)
        if b"node_agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in [*(engine for agent in agents for engine in children(agent)), *agents]:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: all(node["epoch"] > epochs[node["node_id"]] for node in stack.nodes()))
    eventually(lambda: len(tiers(stack)) == 2)


class Talk:
    """Two turns by a split, the first of which is over."""

    def __init__(self, stack: Stack, seed: int = 1) -> None:
        question = words(340, seed)
        first = ask(stack, question)
        assert first.path == "split"
        self.num_pages = (first.usage["total_tokens"] - 1) // PAGE
        assert self.num_pages * PAGE > first.usage["prompt_tokens"], "one is in part decode's own"
        self._stack = stack
        self._said = (question, first.text, "And now?")

    def second(self) -> Answer:
        answer = ask(self._stack, *self._said)
        assert answer.path == "split"
        return answer

    def repeat(self) -> None:
        """The second turn, until all of the first one's pages were found: used twice, they go to
        disk."""
        eventually(lambda: self.second().cached == self.num_pages * PAGE)

    @functools.cached_property
    def cold(self) -> str:
        """The second answer by decode alone, to a tenant that has no page anywhere."""
        made = {"name": "cold", "tenant": "cold"}
        key = call(operator(self._stack), "POST", "/admin/v1/keys", made)["secret"]
        answer = ask(self._stack, *self._said, key=key, n=2)
        assert (answer.path, answer.cached) == ("bypass", 0)
        return answer.text

    def tiers_after_a_kill(self, balanced: Balanced) -> dict[str, int]:
        """Of the second turn's row, whose answer is the one that decode gives alone."""
        kill_both(self._stack)
        answer = self.second()
        row = balanced(self._stack)[-1]
        assert (row["path"], row["prefill_node"], row["node"]) == ("split", PREFILL, DECODE)
        assert row["cached_tokens"] == answer.cached
        assert answer.text == self.cold
        return row["tiers"]

    def found_after_a_kill(self, tier: str, balanced: Balanced) -> None:
        """Both halves find there all of the first turn. Not at the first kill perhaps: where a
        machine is busy a fetch may be late, and then its pages are computed, or sent."""
        wanted = self.num_pages * PAGE
        for _ in range(TRIES):
            told = self.tiers_after_a_kill(balanced)
            time.sleep(TOLD_S)
            found = hits(self._stack)
            if (told, found) == ({tier: wanted}, dict.fromkeys(found, self.num_pages)):
                return
        pytest.fail(f"never all of it from the {tier}: row {told}, hits {found}")


def hits(stack: Stack) -> dict[str, int]:
    """Pages that slower tiers gave in the present life of each engine."""
    return {
        node: sum(tier["hit_pages"] for tier in of.values()) for node, of in tiers(stack).items()
    }


def brought_home(stack: Stack, tier: str, balanced: Balanced) -> Talk:
    """Of the second turn prefill lacked the page that decode had a part in, and found it there."""
    for seed in range(1, 20):  # a cluster store is joined behind the start; a fetch may be late
        talk = Talk(stack, seed)
        time.sleep(SETTLED_S)
        talk.second()
        if balanced(stack)[-1]["tiers"].get(tier) == PAGE:
            return talk
    pytest.fail(f"what decode made of a turn never came to prefill from the {tier}")


def test_both_halves_find_on_disk_what_they_had_before_a_kill(
    tmp_path: Path, balanced: Balanced
) -> None:
    with Stack(tmp_path / "home", *ON_DISK) as stack:
        talk = Talk(stack)
        talk.repeat()
        wait_for(stack, lambda of: of["disk"]["pages_used"] >= talk.num_pages)
        talk.found_after_a_kill("disk", balanced)


def damage(file: Path) -> None:
    """A bit of each block that is not a page's header."""
    data = file.read_bytes()
    with file.open("r+b") as slots:
        for at in range(0, len(data), 4096):
            if data[at : at + 2] != b"KG" and any(data[at : at + 4096]):
                slots.seek(at)
                slots.write(bytes([data[at] ^ 1]))


@pytest.mark.slow
@pytest.mark.parametrize("node", [PREFILL, DECODE])
def test_a_disk_that_lies_costs_a_prefill_or_a_transfer_and_no_token(
    tmp_path: Path, balanced: Balanced, node: str
) -> None:
    with Stack(tmp_path / "home", *ON_DISK) as stack:
        talk = Talk(stack)
        talk.repeat()
        wait_for(stack, lambda of: of["disk"]["pages_used"] >= talk.num_pages)
        (file,) = (stack.home / "kv" / node).rglob("pages.slots")
        damage(file)
        told = talk.tiers_after_a_kill(balanced)
        assert told == ({} if node == PREFILL else {"disk": talk.num_pages * PAGE})
        eventually(lambda: tiers(stack)[node]["disk"]["corrupt_pages"] > 0)
        other = DECODE if node == PREFILL else PREFILL
        eventually(lambda: hits(stack) == {node: 0, other: talk.num_pages})


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a store whose memory belongs to neither node."""
    cluster = Cluster(network(), tmp_path, port=21111)
    cluster.master()
    cluster.owner(128)
    yield cluster.url
    cluster.stop()


@pytest.mark.slow
def test_both_halves_find_in_the_cluster_store_what_they_had_before_a_kill(
    tmp_path: Path, url: str, balanced: Balanced
) -> None:
    flags = (*FLAGS, "--kv-host-mb", "0", "--cluster-store", url)
    with network().inside(), Stack(tmp_path / "home", *flags) as stack:
        talk = brought_home(stack, "cluster", balanced)
        talk.found_after_a_kill("cluster", balanced)


@pytest.mark.slow
def test_decodes_answer_comes_home_by_the_memory_that_both_share(
    tmp_path: Path, balanced: Balanced
) -> None:
    with Stack(tmp_path / "home", *FLAGS, "--kv-host-mb", "64") as stack:
        talk = brought_home(stack, "host", balanced)
        assert talk.second().text == talk.cold
