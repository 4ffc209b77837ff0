"""Foreign clusters with prefill and decode apart, in both dialects, with every leg failing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.gateway.upstreams.scripted_upstream import (
    Exchange,
    Script,
    ScriptedUpstream,
    chunk,
    sse,
    start_upstream,
    usage_chunk,
    whole_answer,
)
from tests.gateway.upstreams.test_relay import events, rows

CHAT = "/v1/chat/completions"
ASK = {
    "model": "their-model",
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_completion_tokens": 50,
    "min_tokens": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
}
# As vLLM's NIXL connector answers a prefill: where its blocks are, for the decode server to fetch.
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[4, 5, 6]],
    "remote_engine_id": "5f3c",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 96,
}
DECODED = sse(chunk("a"), chunk("b", finish="stop"), usage_chunk(96, 2, 95), "[DONE]")


def prefilled(cached: int | None = 64, **fields: Any) -> Exchange:
    told = {"kv_transfer_params": PARAMS, **fields}
    answer = json.loads(whole_answer("a", 96, 1, **told))
    answer["usage"]["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
    return Exchange((json.dumps(answer).encode(),), content_type="application/json")


@dataclass
class Cluster:
    prefill: list[ScriptedUpstream]
    decode: list[ScriptedUpstream]
    gateway: Any


@pytest.fixture
def cluster(relayed) -> Any:
    @contextmanager
    def start(
        dialect: str, prefill: list[Script], decode: list[Script], **settings: Any
    ) -> Iterator[Cluster]:
        with ExitStack() as stack:
            p, d = (
                [stack.enter_context(start_upstream(one)) for one in scripts]
                for scripts in (prefill, decode)
            )
            urls = {"prefill": [one.url for one in p], "decode": [one.url for one in d]}
            table = {"name": "c", "dialect": dialect, **urls, **settings}
            gateway = stack.enter_context(relayed(table))
            while not all(view.state == "up" for view in views(gateway)):
                time.sleep(0.01)
            yield Cluster(p, d, gateway)

    return start


def views(gateway: Any) -> Any:
    return gateway.call(lambda: gateway.services.upstreams.views())


def test_vllm_prefills_first_and_hands_its_blocks_on(cluster) -> None:
    """The client sees the prefill server's cached tokens and the decode server's completion."""
    with cluster(
        "vllm", [lambda _: prefilled()], [lambda _: Exchange((DECODED,))], cache_salt=False
    ) as one:
        with one.gateway.client() as client:
            reply = client.post(CHAT, json=ASK)
        assert events(reply.text)[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        assert reply.headers["x-kagari-node"] == "c/d1"
        assert reply.headers["x-kagari-prefill-node"] == "c/p1"
        (first,), (second,) = one.prefill[0].asked, one.decode[0].asked
        expected = {name: value for name, value in ASK.items() if name != "stream_options"}
        del expected["min_tokens"]
        assert first.body == {
            **expected,
            "stream": False,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        assert second.body == {**ASK, "kv_transfer_params": PARAMS}
        assert first.headers["x-request-id"] == second.headers["x-request-id"]
        assert second.at > first.at
        (row,) = rows(one.gateway)
    assert (row["node"], row["prefill_node"]) == ("c/d1", "c/p1")
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (96, 64, 2)
    assert "10.0.0.7" not in reply.text


def test_counts_that_cannot_be_are_mended_and_counted(cluster) -> None:
    """Null details are not zero for the decode server's sake; prompts that differ: the larger."""
    script = [prefilled(None), prefilled(500), prefilled(64)]
    with cluster("vllm", [lambda _: script.pop(0)], [lambda _: Exchange((DECODED,))]) as one:
        with one.gateway.client() as client:
            for _ in range(3):
                if len(script) == 1:
                    script[0] = Exchange(
                        (
                            script[0]
                            .pieces[0]
                            .replace(b'"prompt_tokens": 96', b'"prompt_tokens": 99'),
                        ),
                        content_type="application/json",
                    )
                assert client.post(CHAT, json=ASK).status_code == 200
        found = [(row["prompt_tokens"], row["cached_tokens"]) for row in rows(one.gateway)]
        assert found == [(96, 0), (96, 96), (99, 64)]
        text = httpx.get(one.gateway.addresses.admin_url + "/metrics", trust_env=False).text
    assert 'kagari_upstream_usage_anomalies_total{field="cached_tokens"} 1.0' in text
    assert 'kagari_upstream_usage_anomalies_total{field="prompt_tokens"} 1.0' in text


def test_a_tenants_pages_are_salted_and_nobody_chooses_the_salt(cluster) -> None:
    from tests.gateway.api.conftest import KEY

    with cluster("vllm", [lambda _: prefilled()], [lambda _: Exchange((DECODED,))]) as one:
        with one.gateway.client(key=KEY) as client:
            client.post(CHAT, json={**ASK, "cache_salt": "mine"})
        salts = {
            one.prefill[0].asked[0].body["cache_salt"],
            one.decode[0].asked[0].body["cache_salt"],
        }
        assert len(salts) == 1
        assert len(salts.pop()) == 32


@pytest.mark.parametrize(
    "asks",
    [{"n": 2}, {"prompt_logprobs": 1}, {"n": 1, "best_of": 3}],
    ids=lambda one: next(iter(one)),
)
def test_what_cannot_be_handed_over_runs_whole_on_a_decode_server(cluster, asks) -> None:
    other = {"index": 1, "delta": {}, "finish_reason": "stop"}
    both = sse(chunk("a", finish="stop"), {**chunk("b"), "choices": [other]})
    both += sse(usage_chunk(9, 2, 4), "[DONE]")
    with cluster("vllm", [lambda _: prefilled()], [lambda _: Exchange((both,))]) as one:
        with one.gateway.client() as client:
            reply = client.post(CHAT, json={**ASK, **asks})
        assert reply.status_code == 200, reply.text
        assert not one.prefill[0].asked
        assert "kv_transfer_params" not in one.decode[0].asked[0].body
        assert rows(one.gateway)[0]["cached_tokens"] == 4


def test_prefill_fails_another_pair_is_tried_then_the_decode_server_alone(cluster) -> None:
    broken = Exchange((b"{}",), status=500)
    with cluster(
        "vllm", [lambda _: broken, lambda _: broken], [lambda _: Exchange((DECODED,))]
    ) as one:
        now = one.gateway.services.upstreams.clock()
        one.gateway.services.upstreams.clock = lambda: now  # what is open stays so
        with one.gateway.client() as client:
            for _ in range(12):
                reply = client.post(CHAT, json=ASK)
                if reply.status_code == 200:
                    break
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-kagari-node"] == "c/d1"
        assert "x-kagari-prefill-node" not in reply.headers
        assert {view.state for view in views(one.gateway)} == {"up", "open"}


def test_a_refusal_of_the_prefill_server_is_the_clients(cluster) -> None:
    no = Exchange((b'{"error": {"message": "bad tool"}}',), status=400)
    with cluster("vllm", [lambda _: no], [lambda _: Exchange((DECODED,))]) as one:
        with one.gateway.client() as client:
            reply = client.post(CHAT, json=ASK)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
        assert len(one.prefill[0].asked) == 1
        assert not one.decode[0].asked


def test_a_client_that_leaves_between_the_legs_has_its_blocks_freed(cluster) -> None:
    """The prefill server keeps them until somebody fetches them: the decode server is sent the
    request all the same, and left."""
    gate = threading.Event()
    held = Exchange((("until", gate), ("hang", None)))
    with cluster("vllm", [lambda _: prefilled()], [lambda _: held]) as one:
        with one.gateway.connect() as sock:
            sock.sendall(one.gateway.raw(json.dumps(ASK).encode()))
            one.decode[0].wait_asked(1)
        one.gateway.wait_idle()
        deadline = time.monotonic() + 20
        while len(one.decode[0].asked) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        freeing = one.decode[0].asked[1].body
        assert freeing["kv_transfer_params"] == PARAMS
        assert freeing["max_completion_tokens"] == 1
        assert one.decode[0].asked[0].client_left
        gate.set()
        assert rows(one.gateway)[0]["status"] == "client_left"


# --- SGLang ---------------------------------------------------------------------------------------


def meeting(rooms: dict[int, threading.Event], pieces: Any) -> Script:
    """A server that answers once the other has come into the same room."""

    def script(asked: Any) -> Exchange:
        room = asked.body["bootstrap_room"]
        first = room not in rooms
        gate = rooms.setdefault(room, threading.Event())
        if not first:
            gate.set()
        return Exchange((("until", gate), *pieces))

    return script


def test_sglang_asks_both_at_once_in_one_room(cluster) -> None:
    rooms: dict[int, threading.Event] = {}
    of_prefill = (sse(chunk("a", finish="length"), usage_chunk(96, 1, 32), "[DONE]"),)
    with cluster(
        "sglang", [meeting(rooms, of_prefill)], [meeting(rooms, (DECODED,))], bootstrap_port=8999
    ) as one:
        with one.gateway.client() as client:
            for _ in range(2):
                reply = client.post(CHAT, json=ASK)
                assert reply.status_code == 200, reply.text
        usage = events(reply.text)[-2]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 32
        for first, second in zip(one.prefill[0].asked, one.decode[0].asked, strict=True):
            assert first.body == second.body
            assert {**ASK, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8999}.items() <= (
                first.body.items()
            )
        assert len(rooms) == 2
        assert all(0 <= room < 1 << 63 for room in rooms)
        row = rows(one.gateway)[0]
    assert (row["prefill_node"], row["cached_tokens"]) == ("c/p1", 32)


def test_sglang_batches_have_a_room_a_prompt(cluster) -> None:
    choices = [{"index": i, "text": "t", "finish_reason": "stop"} for i in range(2)]
    data = json.dumps({"id": "cmpl-1", "choices": choices, "model": "their-model"}).encode()
    answer = Exchange((data,), content_type="application/json")
    with cluster("sglang", [lambda _: answer], [lambda _: answer]) as one:
        with one.gateway.client() as client:
            body = {"model": "their-model", "prompt": ["a", "b"]}
            assert client.post("/v1/completions", json=body).status_code == 200
        sent = one.decode[0].asked[0].body
        assert sent["bootstrap_host"] == ["127.0.0.1"] * 2
        assert len(set(sent["bootstrap_room"])) == 2


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_sglang_a_leg_that_fails_ends_the_other(cluster, failing) -> None:
    """Else the other waits in its room for minutes."""
    fails = lambda _: Exchange((b"{}",), status=500)  # noqa: E731
    waits = lambda _: Exchange((("hang", None),))  # noqa: E731
    scripts = ([fails], [waits]) if failing == "prefill" else ([waits], [fails])
    with cluster("sglang", *scripts) as one:
        began = time.monotonic()
        with one.gateway.client() as client:
            reply = client.post(CHAT, json=ASK)
        assert time.monotonic() - began < 15
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_error")
        waiting = one.decode[0] if failing == "prefill" else one.prefill[0]
        waiting.wait_left()
        rooms = [asked.body["bootstrap_room"] for asked in waiting.asked]
        assert len(set(rooms)) == len(rooms), "each attempt has a room of its own"


def test_sglang_a_client_that_leaves_leaves_both(cluster) -> None:
    waits = lambda _: Exchange((("hang", None),))  # noqa: E731
    with cluster("sglang", [waits], [waits]) as one:
        with one.gateway.connect() as sock:
            sock.sendall(one.gateway.raw(json.dumps(ASK).encode()))
            one.prefill[0].wait_asked(1)
            one.decode[0].wait_asked(1)
        one.prefill[0].wait_left()
        one.decode[0].wait_left()
        assert one.prefill[0].asked[0].client_left
        assert one.decode[0].asked[0].client_left


def test_sglang_without_a_prefill_server_serves_nothing(cluster) -> None:
    ok = lambda _: Exchange((DECODED,))  # noqa: E731
    with cluster("sglang", [ok], [ok]) as one:
        one.gateway.call(lambda: _break(one.gateway, "c/p1"))
        with one.gateway.client() as client:
            reply = client.post(CHAT, json=ASK)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_node")


def _break(gateway: Any, name: str) -> None:
    for server in gateway.services.upstreams.servers:
        if server.name == name:
            for _ in range(server.breaker.failures):
                server.breaker.end(False, "failed", gateway.services.upstreams.clock() + 30)
