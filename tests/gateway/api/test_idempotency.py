"""A retry with its Idempotency-Key gets the one answer: joined, replayed, or told that it was."""

from __future__ import annotations

import json
import socket
import sqlite3
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import openai
import pytest

from gateway.config import GatewayConfig, IdempotencyConfig, ServerConfig, StreamConfig
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.verify import verify

CHAT = "/v1/chat/completions"
OTHER_KEY = "other-key-0123456789abcd"
SLOW = {"say": "abcdefghij" * 6, "delay_s": 0.02}  # 1.2 s


def body_of(script: dict[str, Any], **fields: Any) -> bytes:
    messages = [{"role": "user", "content": json.dumps(script)}]
    return json.dumps({"model": "tiny", "messages": messages, **fields}).encode()


def config_of(**settings: Any) -> GatewayConfig:
    return GatewayConfig(
        server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=1.0),
        stream=StreamConfig(first_heartbeat_s=0.3, heartbeat_s=0.2, send_stall_s=5.0),
        idempotency=IdempotencyConfig(**settings),
    )


@pytest.fixture
def key() -> dict[str, str]:
    return {"idempotency-key": str(uuid.uuid4())}


@pytest.fixture
def post(gateway):
    """post(body, headers): one request on a connection of its own."""

    def send(body: bytes, headers: dict[str, str], **settings: Any) -> httpx.Response:
        with gateway.client(**settings) as client:
            return client.post(CHAT, content=body, headers=headers)

    return send


def rows(gateway: Any) -> list[tuple[str, str]]:
    """(request_id, status) of all rows, oldest first."""
    gateway.wait_idle()
    path = gateway.services.home.folder / LEDGER_NAME
    assert verify(path).problems == ()
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return connection.execute(
            "SELECT request_id, status FROM requests ORDER BY sequence"
        ).fetchall()
    finally:
        connection.close()


def start(gateway: Any, body: bytes, headers: dict[str, str]) -> socket.socket:
    """A request on a raw socket, which can be left at any moment."""
    sock = gateway.connect()
    extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    sock.sendall(gateway.raw(body, extra=extra))
    return sock


def read_until(sock: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        piece = sock.recv(65536)
        assert piece, data
        data += piece
    return data


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_retry_after_the_answer_replays_it_byte_for_byte(gateway, post, key, stream) -> None:
    before = len(rows(gateway))
    body = body_of({"say": "once only"}, stream=stream)
    first, second = post(body, key), post(body, key)
    assert first.status_code == second.status_code == 200
    assert first.content == second.content
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert second.headers["x-kagari-original-request-id"] == first.headers["x-request-id"]
    assert second.headers["x-request-id"] != first.headers["x-request-id"]
    own = {"x-request-id", "date", "idempotent-replayed", "x-kagari-original-request-id"}
    assert {n: v for n, v in first.headers.items() if n not in own} == {
        n: v for n, v in second.headers.items() if n not in own
    }
    assert len(gateway.node.served) == 1
    assert [row[0] for row in rows(gateway)[before:]] == [first.headers["x-request-id"]]


@pytest.mark.parametrize("stream", [False, True])
def test_retries_at_the_same_instant_and_later_join_the_one_that_runs(
    gateway, post, key, stream
) -> None:
    before = len(rows(gateway))
    body = body_of(SLOW, stream=stream)
    starts = threading.Barrier(4)

    def at_once(number: int) -> httpx.Response:
        starts.wait()
        time.sleep(0.5 if number == 3 else 0.0)
        return post(body, key)

    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(at_once, range(4)))
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.content for reply in replies}) == 1
    assert b"abcdefghij" * 6 in b"".join(
        b"".join(c["delta"].get("content", "").encode() for c in json.loads(line[6:])["choices"])
        for line in replies[0].content.splitlines()
        if line.startswith(b"data: {")
    ) or (not stream and replies[0].json()["choices"][0]["message"]["content"] == SLOW["say"])
    assert len(gateway.node.served) == 1
    assert [row[1] for row in rows(gateway)[before:]] == ["ok"]
    assert sum("idempotent-replayed" in reply.headers for reply in replies) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_left_and_comes_back_joins(gateway, post, key, stream) -> None:
    before = len(rows(gateway))
    body = body_of(SLOW, stream=stream)
    sock = start(gateway, body, key)
    if stream:
        seen = read_until(sock, b'"content":"a"')
    else:
        wait_for(lambda: gateway.node.served and gateway.node.served[0].sent > 5)
    sock.close()
    time.sleep(0.2)
    reply = post(body, key)
    assert reply.status_code == 200
    assert not gateway.node.served[0].aborted
    if stream:
        assert reply.content.endswith(b"data: [DONE]\n\n")
        assert seen.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1].split(b"\n\n")[0] in reply.content
    else:
        assert reply.json()["choices"][0]["message"]["content"] == SLOW["say"]
    assert [row[1] for row in rows(gateway)[before:]] == ["ok"]


def test_client_that_left_and_comes_back_after_the_end_gets_the_whole_answer(
    gateway, post, key
) -> None:
    script = {"say": "abcdef", "delay_s": 0.05}
    start(gateway, body_of(script), key).close()
    gateway.wait_idle()
    assert post(body_of(script), key).json()["choices"][0]["message"]["content"] == "abcdef"
    assert len(gateway.node.served) == 1


def test_client_that_does_not_come_back_is_aborted_after_the_grace_and_billed_once(
    tmp_path, start: Any = start
) -> None:
    pass


def test_other_body_with_the_same_key_is_refused(gateway, post, key) -> None:
    first = post(body_of({"say": "one"}), key)
    reply = post(body_of({"say": "two"}), key)
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert first.headers["x-request-id"] in reply.json()["error"]["found"]
    assert reply.headers["x-should-retry"] == "false"
    assert len(gateway.node.served) == 1


def test_key_belongs_to_the_api_key_and_the_route(gateway, post, key) -> None:
    body = body_of({"say": "mine"})
    mine, theirs = post(body, key), post(body, key, key=OTHER_KEY)
    with gateway.client() as client:
        elsewhere = client.post("/client/v4/accounts/a/ai" + CHAT, content=body, headers=key)
    assert len({r.json()["id"] for r in (mine, theirs, elsewhere)}) == 3
    assert len(gateway.node.served) == 3


@pytest.mark.parametrize("value", ["", "x" * 256, "caf\u00e9", "a\tb"])
def test_key_that_is_none_is_a_400(gateway, value) -> None:
    extra = f"Idempotency-Key: {value}\r\n"
    with gateway.connect() as sock:
        sock.sendall(gateway.raw(body_of({}), extra=extra))
        reply = read_until(sock, b"}}")
    assert b'"param":"idempotency-key"' in reply or b"400" in reply.split(b"\r\n")[0]
    assert not gateway.node.served


def test_key_of_255_characters_is_taken(gateway, post) -> None:
    assert post(body_of({}), {"idempotency-key": "~" * 255}).status_code == 200


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (body_of({}, temperature=9), 400),
        (body_of({}, model="nothing"), 404),
        (body_of({"fail": "page_integrity"}), 502),
    ],
)
def test_what_was_not_billed_leaves_the_key_free(gateway, post, key, first, status) -> None:
    refused = post(first, key)
    assert refused.status_code == status
    assert "idempotent-replayed" not in refused.headers
    gateway.wait_idle()
    wait_for(lambda: gateway.services.ledger.health().unsettled == 0)
    assert post(body_of({"say": "now"}), key).status_code == 200


def test_failure_after_the_first_byte_leaves_the_key_free(gateway, post, key) -> None:
    script = {"say": "abcdef", "fail_after": 3, "fail": "page_integrity", "delay_s": 0.01}
    body = body_of(script, stream=True)
    assert b"page_integrity" in post(body, key).content
    gateway.wait_idle()
    assert b"page_integrity" in post(body, key).content
    assert len(gateway.node.served) == 2


def test_everybody_who_joined_is_told_of_the_failure(gateway, key, post) -> None:
    body = body_of({"say": "x", "first_s": 0.5, "fail": "page_integrity"})
    with ThreadPoolExecutor(3) as threads:
        replies = list(threads.map(lambda _: post(body, key), range(3)))
    assert {reply.status_code for reply in replies} == {502}
    assert {reply.headers["x-should-retry"] for reply in replies} == {"true"}
    assert len(gateway.node.served) == 1


def test_official_sdk_that_timed_out_gets_its_answer_by_its_own_retry(gateway, key, ask) -> None:
    before = len(rows(gateway))
    with openai.OpenAI(
        base_url=gateway.url + "/v1", api_key="test-key-0123456789abcdef", max_retries=2, timeout=0.6
    ) as client:
        reply = client.chat.completions.create(
            **ask({"say": "late", "first_s": 1.2}), extra_headers=key
        )
    assert reply.choices[0].message.content == "late"
    assert len(gateway.node.served) == 1
    assert [row[1] for row in rows(gateway)[before:]] == ["ok"]


def test_log_line_and_metric_tell_what_became_of_the_key(gateway, post, key) -> None:
    body = body_of({"say": "logged"})
    replies = [post(body, key) for _ in range(2)]
    ids = [reply.headers["x-request-id"] for reply in replies]
    wait_for(lambda: ids[1] in gateway.log.getvalue())
    lines = {e["request_id"]: e for e in gateway.log_lines() if e["event"] == "request"}
    assert [lines[i]["idempotency"] for i in ids] == ["first", "replayed"]
    assert lines[ids[0]]["finish"] == "stop"
    assert key["idempotency-key"] not in gateway.log.getvalue()
    assert b'kagari_idempotent_requests_total{outcome="replayed"}' in (
        gateway.services.metrics.text()
    )
