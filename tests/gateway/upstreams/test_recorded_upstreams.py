"""What real servers answered, played back: clients read the same, told and billed in our form.

`*.jsonl` in `recorded/` are recordings (vLLM 0.32 on a CPU, llama-cpp-python 0.3.36);
`*_form.jsonl` are written after what is published of Ollama's and llama.cpp's own servers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.upstreams.scripted_upstream import Exchange, start_upstream
from tests.gateway.upstreams.test_relay import events, rows

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.jsonl"))
ERRORS = {
    "bad value": (400, "invalid_request"),
    "bad value stream": (400, "invalid_request"),
    "too long": (400, "context_length_exceeded"),
    "no such model": (404, "model_not_found"),
}


def told_of(chunks: list[Any]) -> tuple[str, list[str], list[Any]]:
    """Text, finish reasons and log probabilities of a stream, but for its ids and usage."""
    choices = [one for chunk in chunks if chunk != "[DONE]" for one in chunk["choices"]]
    text = "".join(
        (one.get("delta") or one).get("content") or one.get("text") or "" for one in choices
    )
    return (
        text,
        [one["finish_reason"] for one in choices if one["finish_reason"]],
        [one["logprobs"] for one in choices if one.get("logprobs")],
    )


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_server_is_relayed_whatever_its_pieces(relayed, path) -> None:
    recordings = {one["name"]: one for one in map(json.loads, path.read_text().splitlines())}
    sizes: list[int] = []  # of the next answer's pieces; the last: whole

    def script(asked: Any) -> Exchange:
        told = recordings[asked.body["user"]]
        body = told["body"].encode()
        cut = sizes.pop(0) if sizes else len(body)
        return Exchange(
            [body[at : at + cut] for at in range(0, len(body), cut)],
            status=told["status"],
            content_type=told["headers"]["content-type"],
        )

    model = next(one["asked"]["model"] for one in recordings.values() if one["asked"])
    with (
        start_upstream(script, models=[model]) as upstream,
        relayed(upstream.url) as gateway,
        gateway.client() as client,
    ):
        for name, told in recordings.items():
            asked = told["asked"] or {
                "model": model,
                "messages": [{"role": "user", "content": "x"}],
            }
            for size in (1, 7, 100, 1 << 20):
                sizes[:] = [size]
                reply = client.post(told["path"], json={**asked, "user": name})
                if told["status"] != 200:
                    error = reply.json()["error"]
                    assert (reply.status_code, error["code"]) == ERRORS[name]
                    assert json.loads(told["body"])["error"]["message"][:40] in error["message"]
                    continue
                assert reply.status_code == 200, reply.text
                if asked.get("stream"):
                    check_stream(told, reply)
                else:
                    check_whole(told, reply)
            if asked.get("stream") and told["status"] == 200:
                unasked = {**asked, "user": name}
                del unasked["stream_options"]
                silent = client.post(told["path"], json=unasked)
                assert told_of(events(silent.text)) == told_of(events(told["body"]))
                assert "usage" not in "".join(silent.text.split("content")[::2])
        settled = [row for row in rows(gateway) if row["status"] == "ok"]
    assert {row["quality"] for row in settled} <= {"exact", "estimated"}
    assert all(row["completion_tokens"] > 0 for row in settled)


def usage_told(told: dict[str, Any]) -> dict[str, Any] | None:
    if not told["asked"].get("stream"):
        usage: dict[str, Any] | None = json.loads(told["body"])["usage"]
        return usage
    found = [one.get("usage") for one in events(told["body"]) if one != "[DONE]"]
    return next((usage for usage in reversed(found) if usage), None)


def check_usage(told: dict[str, Any], usage: dict[str, Any]) -> None:
    theirs = usage_told(told)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    if theirs is not None:
        for field in ("prompt_tokens", "completion_tokens"):
            assert usage[field] == theirs[field]


def check_stream(told: dict[str, Any], reply: Any) -> None:
    chunks = events(reply.text)
    assert told_of(chunks) == told_of(events(told["body"]))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    check_usage(told, chunks[-2]["usage"])
    assert [one["usage"] for one in chunks[:-2]] == [None] * (len(chunks) - 2)
    ids = {one["id"].partition("-")[2] for one in chunks[:-1]}
    assert ids == {reply.headers["x-request-id"]}


def check_whole(told: dict[str, Any], reply: Any) -> None:
    ours, theirs = reply.json(), json.loads(told["body"])
    check_usage(told, ours.pop("usage"))
    assert ours.pop("id").endswith(reply.headers["x-request-id"])
    for name in ("usage", "id", "kv_transfer_params", "ec_transfer_params"):
        theirs.pop(name, None)
    assert ours == theirs
