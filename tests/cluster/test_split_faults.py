"""Engines of a split are killed, stopped and cut off from each other at every state it passes.

The answer is right, or its error is clean; nobody else is disturbed; afterwards every page is free
or cached on both sides, no row is open and both nodes serve. The mover's own states are brought
about one by one in tests/engine/transfer/; here everything is real, and a state is reached by
stopping one side until the other waits for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.client import ChatReply
from gateway.demo.stack import Stack
from tests.cluster.split_faults import (
    DECODE,
    FLAGS,
    PATIENCE_S,
    PREFILL,
    PROMPT_TOKENS,
    End,
    Failed,
    Scene,
    ask,
    question,
    words,
)

Balanced = Callable[..., list[dict[str, Any]]]

PROMPT, OTHER = words(PROMPT_TOKENS, 1), words(60, 2)
TOKENS, OTHER_TOKENS = 24, 400
STOPPED_S = 10.0  # longer than a node may be silent (lost after 7)


@dataclass(frozen=True, slots=True)
class Right:
    """What a lone mixed node says."""

    answer: str
    other: str


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Right:
    home = tmp_path_factory.mktemp("alone") / "home"
    with Stack(home, "--port", "0", "--kv-device-tokens", "8192") as stack:
        answers = [ask(stack, PROMPT, TOKENS), ask(stack, OTHER, OTHER_TOKENS)]
    return Right(*(reply.text for reply in answers if isinstance(reply, ChatReply)))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Stack(tmp_path / "home", *FLAGS) as stack, Scene(stack) as scene:
        yield scene


def pages_wait(scene: Scene) -> None:
    """Decode is PREPARED and expects a peer that does not come."""
    scene.wait(lambda: held(scene, DECODE) >= PROMPT_TOKENS // 64, "decode takes no pages")


def connected(scene: Scene) -> None:
    scene.wait(lambda: bool(scene.transfers()), "prefill does not connect")


def pages_flow(scene: Scene) -> None:
    connected(scene)
    scene.wait(lambda: held(scene, PREFILL) > 2, "prefill computes nothing")


def all_computed(scene: Scene) -> None:
    """Decode stops towards the end: it may be silent for three seconds only."""
    pages_flow(scene)
    scene.wait(lambda: uncached(scene) < PROMPT_TOKENS // 2, "prefill does not go on")
    scene.stop(DECODE)
    scene.wait(lambda: uncached(scene) == 0, "prefill does not come to an end")


def uncached(scene: Scene) -> int:
    return int(scene.report(PREFILL).get("uncached_tokens", PROMPT_TOKENS))


@dataclass(frozen=True, slots=True)
class Moment:
    """How a request gets there: who is stopped before it, and what is waited for then."""

    name: str
    stopped: str | None
    reach: Callable[[Scene], None]


# Prefill does not hear of it: decode is PREPARED. Decode does not: prefill is DIALLING, answered by
# a kernel alone. Pages flow: SENDING, RECEIVING. All are given: SETTLING, and decode does not read.
UNHEARD = Moment("unheard", PREFILL, pages_wait)
DIALLING = Moment("dialling", DECODE, connected)
FLOWING = Moment("flowing", None, pages_flow)
SETTLING = Moment("settling", None, all_computed)
BEFORE = (UNHEARD, DIALLING, FLOWING, SETTLING)
SPEAKING = Moment("speaking", None, lambda _: None)  # both are QUIET: the first token is there


def held(scene: Scene, node: str) -> int:
    return int(scene.report(node).get("pages_held", 0))


def kill(scene: Scene, node: str, _: Future[End]) -> None:
    scene.kill(node)


def stop(scene: Scene, node: str, asked: Future[End]) -> None:
    """Until there is an answer, or for so long that the node is given up."""
    scene.stop(node)
    wait([asked], STOPPED_S)


def cut(scene: Scene, _: str, __: Future[End]) -> None:
    scene.cut()


CASES = [
    (moment, fault, node)
    for moment in (*BEFORE, SPEAKING)
    for fault in (kill, stop, cut)
    for node in (PREFILL, DECODE)
    # There is one connection to cut, and none before they meet or after they part.
    if fault is not cut or (node == PREFILL and moment in (DIALLING, FLOWING, SETTLING))
]
FAST = {(FLOWING, cut, PREFILL)}


@pytest.mark.parametrize(
    ("moment", "fault", "node"),
    [
        pytest.param(
            *case,
            id=f"{case[0].name}-{case[1].__name__}-{case[2]}",
            marks=() if case in FAST else pytest.mark.slow,
        )
        for case in CASES
    ],
)
def test_a_fault_leaves_the_right_answer_or_a_clean_error_and_nothing_else(
    scene: Scene,
    right: Right,
    balanced: Balanced,
    moment: Moment,
    fault: Callable[[Scene, str, Future[End]], None],
    node: str,
) -> None:
    other = running(scene)
    if moment.stopped is not None:
        scene.stop(moment.stopped)
    spoke = threading.Event()
    asked = scene.ask(PROMPT, TOKENS, spoke.set)
    moment.reach(scene)
    assert moment is SPEAKING or not asked.done()
    assert moment is not SPEAKING or spoke.wait(PATIENCE_S)
    fault(scene, node, asked)
    scene.all_go_on()

    # Who decodes is gone, or stood still for longer than a node is waited for.
    may_fail = (fault is kill and node == DECODE) or (
        fault is stop and (node == DECODE or moment in (DIALLING, SETTLING))
    )
    for future, text in ((asked, right.answer), (other, right.other)):
        end = future.result(PATIENCE_S)
        if isinstance(end, Failed):
            assert may_fail, end
        else:
            assert end.text == text
    rows = balanced(scene.stack, within_s=60.0)
    assert len(rows) == 2
    assert {row["status"] for row in rows} <= ({"ok", "failed"} if may_fail else {"ok"})


def running(scene: Scene) -> Future[End]:
    """Another stream, which has begun."""
    runs = threading.Event()
    other = scene.ask(OTHER, OTHER_TOKENS, runs.set)
    assert runs.wait(PATIENCE_S)
    return other


@pytest.mark.slow
@pytest.mark.parametrize("moment", [pytest.param(moment, id=moment.name) for moment in BEFORE])
def test_a_client_that_leaves_between_the_legs_leaves_nothing_behind(
    scene: Scene, right: Right, balanced: Balanced, moment: Moment
) -> None:
    other = running(scene)
    if moment.stopped is not None:
        scene.stop(moment.stopped)
    connection = scene.stack.api.connect(PATIENCE_S)
    body = json.dumps(question(scene.stack, PROMPT, TOKENS) | {"stream": True})
    connection.request("POST", "/v1/chat/completions", body, scene.stack.api.headers())
    moment.reach(scene)
    connection.close()
    scene.all_go_on()
    beside = other.result(PATIENCE_S)
    assert isinstance(beside, ChatReply)
    assert beside.text == right.other
    rows = balanced(scene.stack, within_s=30.0)
    assert sorted(row["status"] for row in rows) == ["client_left", "ok"]
    (left,) = (row for row in rows if row["status"] == "client_left")
    assert left["completion_tokens"] == 0


@pytest.mark.slow
def test_prompts_that_decode_has_no_pages_for_wait_their_turn(
    scene: Scene, right: Right, balanced: Balanced
) -> None:
    """The pool holds 8,192 tokens: three prompts of 3,000 do not fit at once."""
    asked = [scene.ask(words(3000, 10 + index), TOKENS) for index in range(3)]
    ends = [future.result(PATIENCE_S) for future in asked]
    assert all(isinstance(end, ChatReply) and end.path == "split" for end in ends), ends
    assert len({end.text for end in ends if isinstance(end, ChatReply)}) == 3
    assert [row["status"] for row in balanced(scene.stack)] == ["ok"] * 3
