"""Several choices of one answer: each in order, one bill, one end."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import pytest

from gateway.ledger.files import LEDGER_NAME

SAYS = ["first", "the second STOP it", "third!"]


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended well."""
    pieces = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    assert pieces.pop() == "[DONE]"
    return [json.loads(piece) for piece in pieces]


def joined(events: list[dict[str, Any]]) -> dict[int, tuple[str, str]]:
    """index → (content, finish reason); roles come first and ends last, once a choice."""
    contents: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            index, delta = choice["index"], choice["delta"]
            assert index not in reasons, "a choice went on after its end"
            assert ("role" in delta) == (index not in contents), "the role comes first and once"
            contents[index] = contents.get(index, "") + delta.get("content", "")
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    return {index: (contents[index], reasons[index]) for index in sorted(contents)}


def last_row(gateway: Any) -> dict[str, Any]:
    gateway.wait_idle()
    path = gateway.services.home.folder / LEDGER_NAME
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    try:
        found = connection.execute("SELECT * FROM requests ORDER BY sequence DESC").fetchone()
        return dict(found)
    finally:
        connection.close()


@pytest.mark.parametrize("step", [1, 3, 50])
def test_streamed_choices_equal_whole_ones_and_are_billed_once(gateway, ask, step) -> None:
    fields = {"n": 3, "stop": "STOP", "seed": 5}
    script = {"say": SAYS, "step": step, "delay_s": 0.002, "wait_lane": 1}
    with gateway.client() as client:
        whole = client.post("/v1/chat/completions", json=ask(script, **fields))
        row = last_row(gateway)
        streamed = client.post(
            "/v1/chat/completions",
            json=ask(script, **fields, stream=True, stream_options={"include_usage": True}),
        )
        streamed_row = last_row(gateway)
    body = whole.json()
    expected = {0: ("first", "stop"), 1: ("the second ", "stop"), 2: ("third!", "stop")}
    assert {
        choice["index"]: (choice["message"]["content"], choice["finish_reason"])
        for choice in body["choices"]
    } == expected
    *events, usage = events_of(streamed.text)
    assert joined(events) == expected
    assert [event["usage"] for event in events] == [None] * len(events)
    assert usage["choices"] == []
    completion_tokens = len("first") + len("the second STOP") + len("third!")
    (prompt_tokens,) = {len(one.submit.prompt) // 4 for one in gateway.node.served}
    for found, settled in ((body["usage"], row), (usage["usage"], streamed_row)):
        assert found["completion_tokens"] == settled["completion_tokens"] == completion_tokens
        assert found["prompt_tokens"] == settled["prompt_tokens"] == prompt_tokens
        assert settled["status"] == "ok"
    assert [len(one.submit.lanes) for one in gateway.node.served] == [3, 3]
    assert all(one.keeps == {1: len("the second STOP")} for one in gateway.node.served)


@pytest.mark.parametrize("stream", [False, True])
def test_one_choice_that_fails_fails_the_answer(gateway, ask, stream) -> None:
    script = {"say": "x" * 2000, "fail_after": 3, "fail": "page_integrity", "fail_lane": 1}
    script |= {"delay_s": 0.01} | ({"gate": "read", "gate_after": 3} if stream else {})
    body = ask(script, n=3, stream=stream)
    with (
        gateway.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        assert reply.status_code == (200 if stream else 502)
        gateway.node.opened.add("read")
        reply.read()
    assert '"code":"page_integrity"' in reply.text
    assert "[DONE]" not in reply.text
    row = last_row(gateway)
    assert (row["status"], row["charge_nano_usd"]) == ("failed", 0)
    assert gateway.node.served[0].aborted


def test_who_leaves_pays_the_prompt_once_and_every_choices_tokens(gateway, ask) -> None:
    body = json.dumps(ask({"say": "x" * 900, "delay_s": 0.005}, n=3, stream=True)).encode()
    with gateway.connect() as sock:
        sock.sendall(gateway.raw(body))
        data = b""
        while data.count(b'"content":"x') < 9:
            data += sock.recv(65536)
    row = last_row(gateway)
    (served,) = gateway.node.served
    assert row["status"] == "client_left"
    assert row["prompt_tokens"] == len(served.submit.prompt) // 4
    assert 9 <= row["completion_tokens"] <= served.sent


@pytest.mark.parametrize("step", [1, 2, 50])
def test_log_probabilities_of_chat_are_told_with_the_text(gateway, ask, step) -> None:
    fields = {"n": 2, "stop": "TOP", "logprobs": True, "top_logprobs": 2}
    script = {"say": ["é🙂x", "to TOP"], "step": step, "delay_s": 0.002}
    with gateway.client() as client:
        whole = client.post("/v1/chat/completions", json=ask(script, **fields)).json()
        reply = client.post("/v1/chat/completions", json=ask(script, **fields, stream=True))
    entries: dict[int, list[Any]] = {0: [], 1: []}
    for event in events_of(reply.text):
        for choice in event["choices"]:
            if choice["logprobs"] is not None:
                assert choice["logprobs"]["refusal"] is None
                entries[choice["index"]] += choice["logprobs"]["content"]
    for choice in whole["choices"]:
        assert choice["logprobs"] == {"content": entries[choice["index"]], "refusal": None}
    first, second = entries[0], entries[1]
    assert bytes(byte for entry in first for byte in entry["bytes"]).decode() == "é🙂x"
    assert first[-1]["token"] == "x"
    assert [entry["token"] for entry in second] == ["t", "o", " "]  # none of the stop string
    assert [entry["logprob"] for entry in second] == [-0.125, -0.25, -0.375]
    assert second[0]["top_logprobs"][0] == {"token": "t", "logprob": -0.125, "bytes": [116]}
    assert [len(entry["top_logprobs"]) for entry in first + second] == [2] * 10


def test_fields_of_sampling_reach_the_node(gateway, ask) -> None:
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"9": -100, "2": 3.5},
        "min_tokens": 2,
        "max_tokens": 9,
        "seed": 7,
        "logprobs": True,
        "n": 2,
    }
    with gateway.client() as client:
        for ignore_eos in (False, True):
            body = ask("hi", **fields, ignore_eos=ignore_eos)
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    kept, ignored = (one.submit.sampling for one in gateway.node.served)
    assert (kept.presence_penalty, kept.frequency_penalty) == (0.5, -0.5)
    assert (kept.repetition_penalty, kept.logit_bias) == (1.1, ((2, 3.5), (9, -100.0)))
    assert (kept.min_tokens, kept.max_tokens, kept.seed, kept.logprobs) == (2, 9, 7, 0)
    assert kept.prompt_logprobs is None
    assert (len(kept.stop_token_ids), ignored.stop_token_ids) == (1, ())
