"""A relayed completion: what the upstream is sent, what the client gets, what the row says."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import openai
import pytest

from gateway.ledger.files import LEDGER_NAME
from policies.contract.wire import Usage
from policies.pricing import charge_nano_usd
from tests.gateway.api.conftest import KEY
from tests.gateway.upstreams.scripted_upstream import (
    Exchange,
    chunk,
    sse,
    start_upstream,
    usage_chunk,
    whole_answer,
)

ASK = {"model": "their-model", "messages": [{"role": "user", "content": "Say hello."}]}
TEXT = 'Grüße 🌊: "usage": null, \\"id\\": and a\nline'


def events(text: str) -> list[Any]:
    found = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in found]


def rows(gateway: Any) -> list[dict[str, Any]]:
    gateway.wait_settled()
    connection = sqlite3.connect(gateway.services.home.folder / LEDGER_NAME)
    connection.row_factory = sqlite3.Row
    found = [dict(row) for row in connection.execute("SELECT * FROM requests ORDER BY sequence")]
    connection.close()
    return found


def streamed(*pieces: bytes) -> Any:
    return lambda asked: Exchange(pieces)


def test_a_stream_keeps_its_bytes_but_for_id_model_and_usage(relayed) -> None:
    """Cut at every tenth byte, with CRLF, comments and a missing last line."""
    told = (
        b": a comment\n\n"
        + sse(chunk(""), chunk(TEXT))
        + sse(chunk(", world"), separator="\r\n\r\n")
        + sse(chunk(finish="stop"), usage_chunk(12, 3, 8))
        + b"data: [DONE]"
    )
    pieces = [told[at : at + 10] for at in range(0, len(told), 10)]
    with start_upstream(streamed(*pieces)) as upstream, relayed(upstream.url) as gateway:
        with gateway.client() as client:
            reply = client.post("/v1/chat/completions", json={**ASK, "stream": True})
        assert reply.status_code == 200, reply.text
        request_id = reply.headers["x-request-id"]
        kept = (sse(chunk(""), chunk(TEXT)) + sse(chunk(", world"), separator="\r\n\r\n")).decode()
        kept += sse(chunk(finish="stop"), "[DONE]").decode()
        ours = kept.replace("chatcmpl-theirs", f"chatcmpl-{request_id}")
        assert reply.text == ours
        expected = {
            "x-kagari-region": "local",
            "x-kagari-node": upstream.url.removeprefix("http://"),
            "x-kagari-path": "upstream",
            "x-kagari-affinity": "none",
            "x-accel-buffering": "no",
        }
        assert {name: reply.headers[name] for name in expected} == expected
        (asked,) = upstream.asked
        assert asked.path == "/v1/chat/completions"
        assert asked.body == {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        assert "authorization" not in asked.headers
        assert asked.headers["x-request-id"] == request_id
        (row,) = rows(gateway)
    assert (row["status"], row["quality"], row["path"]) == ("ok", "exact", "upstream")
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (12, 8, 3)
    assert (
        row["admitted_prompt_tokens"]
        == len(json.dumps(ASK["messages"], separators=(",", ":"))) // 2
    )
    assert row["node"] == expected["x-kagari-node"]


def test_usage_is_told_to_who_asked_with_its_cost(relayed) -> None:
    pieces = (sse(chunk("a"), chunk("b", finish="stop"), usage_chunk(100, 2, 64), "[DONE]"),)
    with start_upstream(streamed(*pieces)) as upstream, relayed(upstream.url) as gateway:
        body = {**ASK, "stream": True, "usage": {"include": True}}
        with gateway.client() as client:
            reply = client.post("/v1/chat/completions", json=body)
        chunks = events(reply.text)
        assert [one["usage"] for one in chunks[:-2]] == [None, None]
        last = chunks[-2]
        assert last["choices"] == []
        assert last["id"] == f"chatcmpl-{reply.headers['x-request-id']}"
        usage = last["usage"]
        rates = gateway.services.prices.rates("their-model")
        cost = charge_nano_usd(Usage(100, 64, 2), rates)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 64}
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            100,
            2,
            102,
        )
        assert usage["cost_details"]["charge_nano_usd"] == cost
        assert "usage" not in upstream.asked[0].body
        (row,) = rows(gateway)
        assert row["charge_nano_usd"] == cost


@pytest.mark.parametrize("asks", [False, True])
def test_nulls_and_continuous_usage_reach_only_who_asked(relayed, asks) -> None:
    """As OpenAI writes it, and as servers do that tell usage with each chunk."""
    running = [{**chunk(c), "usage": usage_chunk(9, n + 1)["usage"]} for n, c in enumerate("ab")]
    pieces = sse({**chunk("x"), "usage": None}, *running, {**chunk(finish="stop"), "usage": None})
    pieces += sse(usage_chunk(9, 3), "[DONE]")
    with start_upstream(streamed(pieces)) as upstream, relayed(upstream.url) as gateway:
        body: dict[str, Any] = {**ASK, "stream": True}
        if asks:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        with gateway.client() as client:
            reply = client.post("/v1/chat/completions", json=body)
        chunks = events(reply.text)
        if asks:
            assert [one["usage"] for one in chunks[:-2]] == [None] * 4
            assert chunks[-2]["usage"]["completion_tokens"] == 3
            assert reply.headers["x-kagari-changed"] == (
                "stream_options.continuous_usage_stats dropped"
            )
        else:
            assert all("usage" not in one for one in chunks[:-1])
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks[:4]) == "xab"
        assert upstream.asked[0].body["stream_options"] == {"include_usage": True}


def test_a_whole_answer_keeps_what_it_holds(relayed) -> None:
    data = whole_answer(TEXT, 20, 5, service_tier=None, prompt_logprobs=[1.50], odd={"b": 1e400})
    data = data.replace(b"Infinity", b"1e400").replace(b"1.5]", b"1.50]")
    answer = Exchange((data[:30], data[30:]), content_type="application/json", is_chunked=False)
    with start_upstream(lambda _: answer) as upstream, relayed(upstream.url) as gateway:
        with gateway.client() as client:
            sent = b'{"model":"their-model","odd":1.50,"messages":[{"role":"user","content":"x"}]}'
            reply = client.post(
                "/v1/chat/completions",
                content=sent,
                headers={"content-type": "application/json"},
            )
        assert reply.status_code == 200, reply.text
        request_id = reply.headers["x-request-id"]
        assert b'"odd":1.50' in upstream.asked[0].raw
        assert b"[1.50]" in reply.content
        assert b'"odd":{"b": 1e400}' in reply.content
        assert f'"id":"chatcmpl-{request_id}"' in reply.text
        body = json.loads(reply.text)
        assert body["choices"][0]["message"]["content"] == TEXT
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert reply.headers["x-kagari-cached-tokens"] == "0"
        (row,) = rows(gateway)
        assert reply.headers["x-kagari-cost-nano-usd"] == str(row["charge_nano_usd"])
        assert row["charge_nano_usd"] > 0


def test_names_are_mapped_both_ways_and_listed(relayed) -> None:
    settings = {"models": {"ours": "their-model"}, "aliases": {"gpt-x": "ours"}, "name": "lab"}
    answer = Exchange((whole_answer("x", 3, 1),), content_type="application/json")
    with (
        start_upstream(
            lambda _: answer,
            models=[{"id": "their-model", "max_model_len": 4096}, "hidden"],
        ) as upstream,
        relayed({"url": upstream.url + "/v1/", **settings}) as gateway,
        gateway.client() as client,
    ):
        for name in ("ours", "gpt-x"):
            reply = client.post("/v1/chat/completions", json={**ASK, "model": name})
            assert reply.json()["model"] == name
            assert reply.headers["x-kagari-node"] == "lab"
        assert {asked.body["model"] for asked in upstream.asked} == {"their-model"}
        listed = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        assert set(listed) == {"ours", "gpt-x"}
        assert listed["gpt-x"]["alias_of"] == "ours"
        assert listed["ours"]["context_length"] == 4096
        assert listed["ours"]["kagari"]["upstreams"] == ["lab"]
        assert client.get("/v1/models/gpt-x").json() == listed["gpt-x"]
        assert client.get("/readyz").json()["ready"]
        wrong = client.post("/v1/chat/completions", json={**ASK, "model": "our"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        assert "ours" in wrong.json()["error"]["remedy"]
        refused = client.post("/tokenize", json={"model": "ours", "prompt": "x"})
        assert refused.json()["error"]["code"] == "unsupported"
        assert {row["model"] for row in rows(gateway)} == {"ours"}


def test_the_official_sdk_reads_it(relayed) -> None:
    pieces = (sse(chunk("a"), chunk("b", finish="stop"), usage_chunk(5, 2), "[DONE]"),)
    with start_upstream(streamed(*pieces)) as upstream, relayed(upstream.url) as gateway:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
            stream = client.chat.completions.create(
                **ASK, stream=True, stream_options={"include_usage": True}
            )
            read = list(stream)
        assert "".join(one.choices[0].delta.content or "" for one in read if one.choices) == "ab"
        assert read[-1].usage.total_tokens == 7


def test_what_an_upstream_would_ignore_or_must_not_be_told_is_said(relayed) -> None:
    answer = Exchange((whole_answer("x", 3, 1),), content_type="application/json")
    unable = {"tools": False, "logprobs": False, "choices": False}
    with (
        start_upstream(lambda _: answer) as upstream,
        relayed({"url": upstream.url, **unable}) as gateway,
        gateway.client() as client,
    ):
        for field, value in (("tools", [{"type": "function"}]), ("logprobs", True), ("n", 2)):
            reply = client.post("/v1/chat/completions", json={**ASK, field: value})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["param"]) == (400, "unsupported", field)
        given = {"cache_salt": "another's", "kv_transfer_params": {"remote_host": "evil"}}
        reply = client.post("/v1/chat/completions", json={**ASK, **given, "tools": []})
        assert reply.headers.get_list("x-kagari-changed") == [
            "cache_salt dropped",
            "kv_transfer_params dropped",
        ]
        (asked,) = upstream.asked
        assert asked.body == {**ASK, "tools": []}


def test_a_key_goes_to_the_upstream_and_never_to_a_log(relayed, tmp_path) -> None:
    secret = tmp_path / "key"
    secret.write_text("sk-upstream-secret-1234\n")
    answer = Exchange((whole_answer("x", 3, 1),), content_type="application/json")
    with (
        start_upstream(lambda _: answer) as upstream,
        relayed({"url": upstream.url, "api_key_file": str(secret)}) as gateway,
    ):
        with gateway.client() as client:
            told = {"x-stainless-lang": "js", "cookie": "a=b", "x-api-key": "k"}
            reply = client.post("/v1/chat/completions", json=ASK, headers=told)
            assert reply.status_code == 200
        headers = upstream.asked[0].headers
        assert headers["authorization"] == "Bearer sk-upstream-secret-1234"
        assert not told.keys() & headers.keys()
        assert "sk-upstream" not in gateway.log.getvalue()


def test_completions_of_several_prompts_and_session_headers(relayed) -> None:
    body = {"model": "their-model", "prompt": ["a", "b"], "max_tokens": 4, "n": 2}
    choices = [{"index": i, "text": "t", "finish_reason": "stop"} for i in range(4)]
    data = json.dumps(
        {"id": "cmpl-1", "object": "text_completion", "model": "their-model", "choices": choices}
    ).encode()
    answer = Exchange((data,), content_type="application/json")
    with start_upstream(lambda _: answer) as upstream, relayed(upstream.url) as gateway:
        headers = {"x-session-affinity": "ses_1"}
        with gateway.client() as client:
            for expected in ("new", "hit"):
                reply = client.post("/v1/completions", json=body, headers=headers)
                assert reply.headers["x-kagari-affinity"] == expected
        assert reply.json()["usage"]["prompt_tokens"] == len('["a","b"]') // 2
        assert upstream.asked[0].path == "/v1/completions"
        assert upstream.asked[0].body == body
        sent = {asked.headers["x-session-affinity"] for asked in upstream.asked}
        assert len(sent) == 1
        assert "ses_1" not in sent
        first, second = rows(gateway)
        assert (first["quality"], second["status"]) == ("estimated", "ok")


def test_recorded_harnesses_reach_an_upstream_as_they_speak(relayed, shared) -> None:
    """Every member of what real clients send goes on, and their sessions are known."""
    pieces = (sse(chunk("a", finish="stop"), usage_chunk(5, 1), "[DONE]"),)
    with (
        start_upstream(streamed(*pieces)) as upstream,
        relayed(upstream.url) as gateway,
        gateway.client() as client,
    ):
        for path in sorted((shared / "clients").glob("*.json")):
            for one in json.loads(path.read_text())["requests"]:
                if not one["path"].endswith("/chat/completions"):
                    continue
                body = {**one["body"], "model": "their-model", "stream": True}
                told = {name: value for name, value in one["headers"] if name.startswith("x-s")}
                reply = client.post("/v1/chat/completions", json=body, headers=told)
                assert reply.status_code == 200, (path.stem, reply.text)
                options = {**body.get("stream_options", {}), "include_usage": True}
                assert upstream.asked[-1].body == {**body, "stream_options": options}
                if "x-session-affinity" in told:
                    assert reply.headers["x-kagari-affinity"] in ("new", "hit")
        assert len(upstream.asked) >= 10
