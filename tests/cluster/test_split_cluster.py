"""Prefill and decode apart over real processes: the same answers, and every fault an answer too."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.client import Server, call
from gateway.demo.stack import Stack
from tests.cluster.byte_llama import save_byte_llama
from tests.engine.store.mooncake_cluster import network

Balanced = Callable[[Stack], list[dict[str, Any]]]

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
PAGE = 64
# Nothing but a transfer brings pages from one node to another.
ALONE = ("--kv-host-mb", "0", "--kv-disk-mb", "0", "--threads", "1", "--kv-device-tokens", "8192")


@dataclass(frozen=True)
class Answer:
    text: str
    usage: dict[str, Any]
    headers: dict[str, str]

    @property
    def path(self) -> str:
        return self.headers["x-kagari-path"]

    @property
    def cached(self) -> int:
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached


def ask(stack: Stack, *said: str, key: str = "", **fields: Any) -> Answer:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    body = {"model": stack.model, "messages": messages, "temperature": 0, "max_tokens": 24}
    request = urllib.request.Request(
        stack.ready["url"] + "/chat/completions",
        data=json.dumps({**body, **fields}).encode(),
        headers={
            "authorization": f"Bearer {key or stack.api.secret}",
            "content-type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        told = json.load(reply)
        headers = dict(reply.headers)
    return Answer(told["choices"][0]["message"]["content"], told["usage"], headers)


def operator(stack: Stack) -> Server:
    return Server(stack.ready["admin_url"], (stack.home / "admin.token").read_text().strip())


# --- real engines --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder") / "tiny-llama"
    save_byte_llama(
        path,
        template=TEMPLATE,
        seed=5,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    return path


QUESTIONS = ("Does the lantern burn? " * 40, "Short. ", "b" * (4 * PAGE - 1))


def resident(stack: Stack) -> int:
    """Pages on prefill's node."""
    (prefill,) = (node for node in stack.nodes() if node["node_id"] == "n1")
    return int(prefill["engines"][0]["resident_pages"])


def conversation(stack: Stack, key: str, **fields: Any) -> list[tuple[Answer, Answer]]:
    """Two turns of each question; before the second what decode computed has come home."""
    had = resident(stack)
    firsts = [ask(stack, question, key=key, **fields) for question in QUESTIONS]
    if {first.path for first in firsts} == {"split"}:
        made = sum((first.usage["total_tokens"] - 1) // PAGE for first in firsts)
        eventually(lambda: resident(stack) >= had + made)
    return [
        (first, ask(stack, question, first.text, "And now?", key=key, **fields))
        for question, first in zip(QUESTIONS, firsts, strict=True)
    ]


@pytest.mark.parametrize("way", ["auto", "tcp", pytest.param("mooncake", marks=pytest.mark.slow)])
def test_a_split_answers_as_one_node_does_and_finds_as_much(
    folder: Path, way: str, tmp_path: Path, balanced: Balanced
) -> None:
    """Whole, by asking for two choices, and split, as tenants that share no page."""
    flags = ("--port", "0", "--model", str(folder), *ALONE, "--transfer", way)
    roles = ("--prefill", "1", "--decode", "1", "--split", "always")
    # Mooncake listens on all addresses, and asks nobody who they are.
    inside = network().inside() if way == "mooncake" else nullcontext()
    with inside, Stack(tmp_path / "split", *flags, *roles) as stack:
        other = call(operator(stack), "POST", "/admin/v1/keys", {"name": "k", "tenant": "whole"})
        whole = conversation(stack, other["secret"], n=2)
        split = conversation(stack, stack.api.secret)
        rows = balanced(stack)
    assert {answer.path for turns in whole for answer in turns} == {"bypass"}
    for (first, second), (same_first, same_second) in zip(whole, split, strict=True):
        assert (same_first.text, same_second.text) == (first.text, second.text)
        assert (same_first.cached, same_second.cached) == (first.cached, second.cached)
        total = same_first.usage["total_tokens"]
        assert same_second.cached >= total - PAGE, "what decode computed came home"
    answers = [first for first, _ in split] + [second for _, second in split]
    for answer, row in zip(answers, rows[-len(answers) :], strict=True):
        told = [answer.headers[f"x-kagari-{name}"] for name in ("path", "prefill-node", "node")]
        assert told == ["split", "n1", "n2"]
        assert (row["path"], row["prefill_node"], row["node"]) == ("split", "n1", "n2")
        assert row["cached_tokens"] == answer.cached


def test_prefill_may_compute_fast_and_decode_keep_other_pages(
    tmp_path: Path, balanced: Balanced
) -> None:
    """Of a model that has kernels for both ways to compute. Nothing of it passes for exact."""
    roles = ("--prefill", "1", "--decode", "1", "--split", "always")
    precision = ("--compute", "prefill=fast,decode=exact", "--kv-dtype", "decode=int8")
    question = "Does the lantern burn? " * 40
    with Stack(tmp_path / "home", "--port", "0", *ALONE, *roles, *precision) as stack:
        (served, *_) = call(stack.api, "GET", "/v1/models")["data"]
        first = ask(stack, question)
        second = ask(stack, question, first.text, "And now?")
        whole = ask(stack, question, n=2)
        infos = [node["engines"][0]["info"] for node in stack.nodes()]
        balanced(stack)
    assert served["kagari"]["compute"] == "fast"
    precisions = {(info["compute"], info["kv_precision"]) for info in infos}
    assert precisions == {("fast", "bf16"), ("fast", "int8")}
    assert infos[0]["identity"] == infos[1]["identity"]
    assert infos[0]["page_kind"] != infos[1]["page_kind"]
    told = [(one.path, one.headers["x-kagari-precision"]) for one in (first, second, whole)]
    split = ("split", "q4_1/bf16/fast > q4_1/int8/fast")
    assert told == [split, split, ("bypass", "q4_1/int8/fast")]
    full_pages = (first.usage["prompt_tokens"] - 1) // PAGE
    assert second.cached == full_pages * PAGE, "other pages do not come home"
    assert whole.cached == full_pages * PAGE, "prefill's pages, converted"


# --- scripted engines, whose pages travel all the same -------------------------------------------


@pytest.fixture(scope="module")
def stack(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill node and two that decode, to which every fault is done, one after the other."""
    home = tmp_path_factory.mktemp("split") / "home"
    flags = ("--prefill", "1", "--decode", "2", "--split", "always", "--port", "0")
    with Stack(home, *flags, "--script", str(script), *ALONE) as running:
        yield running


LONG = "Tell me later. " * 60  # the first token takes 1.5 s: until then pages have come, and it not


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def busy(stack: Stack) -> list[str]:
    return [node["node_id"] for node in stack.nodes() if node["in_flight"]]


def between(pool: ThreadPoolExecutor, stack: Stack) -> tuple[Future[Answer], str]:
    """A request whose prefill is not done: its answer to come, and its decode node."""
    asked = pool.submit(ask, stack, LONG)
    eventually(lambda: len(busy(stack)) == 2)
    time.sleep(0.4)
    (decode,) = set(busy(stack)) - {"n1"}
    return asked, decode


def test_scripted_engines_split_too(stack: Stack, balanced: Balanced) -> None:
    question = "Is this a long question. " * 30
    first, second = ask(stack, question), ask(stack, question)
    assert (first.text, second.text) == ("Yes.", "Yes.")
    assert (first.path, second.path) == ("split", "split")
    assert (first.cached, second.cached > PAGE) == (0, True)
    assert [row["path"] for row in balanced(stack)[-2:]] == ["split", "split"]

    def imports() -> float:
        (node,) = (one for one in stack.nodes() if one["node_id"] == first.headers["x-kagari-node"])
        return float(node["engines"][0]["report"]["import_bytes_per_s"])

    eventually(lambda: imports() > 0)  # it is told by the next report


def test_a_client_that_leaves_between_the_halves_leaves_no_page_held(
    stack: Stack, balanced: Balanced
) -> None:
    connection = stack.api.connect(30)
    body = {"model": stack.model, "messages": [{"role": "user", "content": LONG}]}
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        {"authorization": f"Bearer {stack.api.secret}", "content-type": "application/json"},
    )
    eventually(lambda: len(busy(stack)) == 2)
    time.sleep(0.3)
    connection.close()
    row = balanced(stack)[-1]
    assert (row["status"], row["path"], row["completion_tokens"]) == ("client_left", "split", 0)


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_a_half_that_is_killed_in_the_middle_costs_a_try_and_no_answer(
    stack: Stack, balanced: Balanced, half: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked, decode = between(pool, stack)
        killed = "n1" if half == "prefill" else decode
        os.kill(stack.ready["pids"][killed], signal.SIGKILL)
        answer = asked.result(60)
    assert answer.text == "At last."
    assert answer.headers["x-kagari-node"] != killed
    if half == "prefill":
        assert (answer.path, answer.headers["x-kagari-node"]) == ("bypass", decode)
    eventually(lambda: [node["state"] for node in stack.nodes()] == ["ready"] * 3)
    stack.ready["pids"][killed] = 0  # it has another one now
    row = balanced(stack)[-1]
    assert (row["status"], row["path"]) == ("ok", answer.path)
    told = call(operator(stack), "GET", f"/admin/v1/requests/{row['request_id']}")
    # Two, where the other half sees the connection break before the gateway misses the link.
    assert [one["prefill_node"] for one in told["attempts"]] in (["n1"], ["n1", "n1"])


def test_roles_change_under_load_and_every_request_is_answered(
    stack: Stack, balanced: Balanced
) -> None:
    def role_of(name: str) -> Any:
        return call(operator(stack), "GET", f"/admin/v1/nodes/{name}")["role"]

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, stack, f"Question {number}. " * 20) for number in range(60)]
        for name, role in (("n2", "prefill"), ("n1", "decode")):
            call(operator(stack), "POST", f"/admin/v1/nodes/{name}/role", {"role": role})
            eventually(lambda name=name, role=role: role_of(name) == role)
        answers = [one.result(60) for one in asked]
    assert {answer.text for answer in answers} == {"Yes."}
    last = ask(stack, "The last question. " * 30)
    assert (last.path, last.headers["x-kagari-prefill-node"]) == ("split", "n2")
    assert {row["status"] for row in balanced(stack)[-61:]} == {"ok"}
