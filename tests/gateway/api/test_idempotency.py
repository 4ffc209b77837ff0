"""A retry with its Idempotency-Key gets the one answer: joined, replayed, or told that it was."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest

from gateway.api import answers, idempotency
from gateway.config import GatewayConfig, IdempotencyConfig, ServerConfig, StreamConfig
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.rows import OpenRow
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


def open_request(gateway: Any, body: bytes, headers: dict[str, str]) -> socket.socket:
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


def streamed_text(reply: httpx.Response) -> str:
    events = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
    return "".join(c["delta"].get("content", "") for event in events for c in event["choices"])


def joined(gateway: Any) -> int:
    """How many requests have joined one that ran."""
    told = b'kagari_idempotent_requests_total{outcome="joined"} '
    lines = gateway.services.metrics.text().splitlines()
    return next((int(float(one.split()[1])) for one in lines if one.startswith(told)), 0)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
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
    reply = replies[0]
    text = streamed_text(reply) if stream else reply.json()["choices"][0]["message"]["content"]
    assert text == SLOW["say"]
    assert len(gateway.node.served) == 1
    assert [row[1] for row in rows(gateway)[before:]] == ["ok"]
    assert sum("idempotent-replayed" in reply.headers for reply in replies) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_left_and_comes_back_joins(gateway, post, key, stream) -> None:
    before = len(rows(gateway))
    body = body_of(SLOW, stream=stream)
    sock = open_request(gateway, body, key)
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


def test_client_that_came_back_is_not_aborted_when_the_grace_would_have_ended(
    tmp_path, start, key
) -> None:
    grace_s = 2.0
    body = body_of({"say": "x" * 60, "gate": "graced", "gate_after": 3}, stream=True)
    with (
        start(tmp_path, config_of(leave_grace_s=grace_s)) as running,
        running.client() as client,
        ThreadPoolExecutor(1) as thread,
    ):
        sock = open_request(running, body, key)
        read_until(sock, b'"content":"x')
        sock.close()
        wait_for(lambda: [e for e in running.log_lines() if e.get("client_left")])
        left = time.monotonic()
        reply = thread.submit(client.post, CHAT, content=body, headers=key)
        wait_for(lambda: joined(running))
        time.sleep(max(0.0, left + grace_s + 0.2 - time.monotonic()))
        running.node.opened.add("graced")
        assert reply.result().content.endswith(b"[DONE]\n\n")
        assert [row[1] for row in rows(running)] == ["ok"]


def test_client_that_left_and_comes_back_after_the_end_gets_the_whole_answer(
    gateway, post, key
) -> None:
    script = {"say": "abcdef", "delay_s": 0.05}
    open_request(gateway, body_of(script), key).close()
    gateway.wait_idle()
    assert post(body_of(script), key).json()["choices"][0]["message"]["content"] == "abcdef"
    assert len(gateway.node.served) == 1


def test_client_that_does_not_come_back_is_aborted_after_the_grace_and_billed_once(
    tmp_path, start, key
) -> None:
    body = body_of({"say": "x" * 1000, "delay_s": 0.02}, stream=True)
    with start(tmp_path, config_of(leave_grace_s=0.5)) as running, running.client() as client:
        sock = open_request(running, body, key)
        read_until(sock, b'"content":"x"')
        sock.close()
        left = time.monotonic()
        wait_for(lambda: running.node.served[0].aborted)
        assert time.monotonic() - left > 0.4
        ((request_id, status),) = rows(running)
        assert status == "client_left"
        reply = client.post(CHAT, content=body, headers=key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "idempotent_answer_gone")
        assert request_id in reply.json()["error"]["found"]
        assert reply.headers["x-should-retry"] == "false"
        assert rows(running) == [(request_id, "client_left")]
        told = [e for e in running.log_lines() if e["event"] == "request_outlived_its_client"]
        assert [(e["request_id"], e["finish"]) for e in told] == [(request_id, "client_left")]


def test_without_a_grace_or_a_key_leaving_aborts_at_once(tmp_path, start, key) -> None:
    body = body_of({"say": "x" * 1000, "delay_s": 0.02}, stream=True)
    with start(tmp_path, config_of(leave_grace_s=0.0)) as running:
        for headers in (key, {}):
            sock = open_request(running, body, headers)
            read_until(sock, b'"content":"x"')
            sock.close()
            running.wait_idle(10.0)  # half of what the answer takes
        assert [row[1] for row in rows(running)] == ["client_left", "client_left"]


def test_key_is_spent_although_its_row_is_not_yet_in_the_file(
    tmp_path, start, key, monkeypatch
) -> None:
    body = body_of({"say": "x" * 2000, "delay_s": 0.02})
    with start(tmp_path, config_of(leave_grace_s=0.0)) as running, running.client() as client:

        async def slow_open(_row: OpenRow) -> None:
            await asyncio.sleep(30)

        monkeypatch.setattr(running.services.ledger, "open", slow_open)
        sock = open_request(running, body, key)
        wait_for(lambda: running.node.served)
        sock.close()
        wait_for(lambda: running.node.served[0].aborted)
        monkeypatch.undo()
        reply = client.post(CHAT, content=body, headers=key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "idempotent_answer_gone")
        assert len(running.node.served) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_answer_too_large_to_keep_is_served_once_and_then_gone(
    tmp_path, start, key, stream, monkeypatch
) -> None:
    monkeypatch.setattr(answers, "WINDOW_BYTES", 1024)
    body = body_of({"say": '"' * 100, "times": 30, "step": 100}, stream=stream)  # 6 kB of JSON
    with start(tmp_path, config_of(answer_bytes=4096)) as running, running.client() as client:
        plain = client.post(CHAT, content=body)
        first = client.post(CHAT, content=body, headers=key)
        assert first.status_code == 200
        if stream:
            assert streamed_text(plain) == streamed_text(first)
            assert first.content.endswith(b"[DONE]\n\n")
        else:
            assert plain.json()["choices"] == first.json()["choices"]
        running.wait_idle()
        reply = client.post(CHAT, content=body, headers=key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "idempotent_answer_gone")
        assert first.headers["x-request-id"] in reply.json()["error"]["message"]
        assert running.services.idempotency.store.held_bytes == 0
        assert len(running.node.served) == 2


def test_retry_of_one_that_is_too_large_to_join_is_told_to_wait(tmp_path, start, key) -> None:
    body = body_of({"say": "x" * 500, "delay_s": 0.02}, stream=True)
    with start(tmp_path, config_of(answer_bytes=300)) as running, running.client() as client:
        with open_request(running, body, key) as sock:
            read_until(sock, b'"content":"x"')
            read_until(sock, b'"content":"x"')
            reply = client.post(CHAT, content=body, headers=key)
            assert reply.json()["error"]["code"] == "idempotency_in_progress"
            assert (reply.status_code, reply.headers["retry-after-ms"]) == (409, "1000")
            assert reply.headers["x-should-retry"] == "true"
        running.wait_idle()  # nobody can join it, so nothing is waited for
        assert len(running.node.served) == 1
        assert running.node.served[0].aborted


def test_evicted_and_outdated_answers_are_gone_and_never_run_again(
    tmp_path, start, monkeypatch
) -> None:
    lifetime_s, ahead_s = 600.0, [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(idempotency, "time", clock)
    with (
        start(tmp_path, config_of(stored_bytes=6000, lifetime_s=lifetime_s)) as running,
        running.client() as client,
    ):
        bodies = [body_of({"say": str(number)}) for number in range(6)]
        for number, body in enumerate(bodies):
            headers = {"idempotency-key": f"k{number}"}
            assert client.post(CHAT, content=body, headers=headers).status_code == 200
            assert running.services.idempotency.store.held_bytes <= 6000
        running.wait_idle()
        evicted = client.post(CHAT, content=bodies[0], headers={"idempotency-key": "k0"})
        kept = client.post(CHAT, content=bodies[5], headers={"idempotency-key": "k5"})
        ahead_s[0] = lifetime_s
        outdated = client.post(CHAT, content=bodies[5], headers={"idempotency-key": "k5"})
        assert [r.status_code for r in (evicted, kept, outdated)] == [409, 200, 409]
        assert len(running.node.served) == len(rows(running)) == 6


def test_reader_that_takes_nothing_ends_only_its_own_answer(tmp_path, start, key) -> None:
    config = msgspec.structs.replace(
        config_of(),
        server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=1.0, send_buffer_bytes=4096),
        stream=StreamConfig(first_heartbeat_s=0.3, heartbeat_s=0.2, send_stall_s=1.0),
    )
    body = body_of({"say": "y" * 3500}, stream=True)  # 700 kB of events
    with start(tmp_path, config) as running, running.client() as client:
        idle = running.connect()
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.sendall(running.raw(body, extra=f"Idempotency-Key: {key['idempotency-key']}\r\n"))
        wait_for(lambda: running.node.served)
        reply = client.post(CHAT, content=body, headers=key)
        assert reply.content.endswith(b"[DONE]\n\n")
        assert [row[1] for row in rows(running)] == ["ok"]
        wait_for(
            lambda: [e for e in running.log_lines() if e.get("client_left")]
        )  # cut while its answer is kept
        idle.close()
        assert client.post(CHAT, content=body, headers=key).content == reply.content


@pytest.mark.parametrize(("leaves", "status"), [(True, "client_left"), (False, "failed")])
def test_gateway_that_stops_settles_what_waits_for_a_retry_and_bills_no_cut_of_its_own(
    tmp_path, start, key, leaves, status
) -> None:
    body = body_of({"say": "x" * 1000, "delay_s": 0.02}, stream=True)
    with start(tmp_path, config_of(leave_grace_s=600.0)) as running:
        sock = open_request(running, body, key)
        read_until(sock, b'"content":"x"')
        if leaves:
            sock.close()
            wait_for(lambda: [e for e in running.log_lines() if e.get("client_left")])
    sock.close()
    connection = sqlite3.connect(tmp_path / LEDGER_NAME)
    assert connection.execute("SELECT status FROM requests").fetchall() == [(status,)]
    connection.close()


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


@pytest.mark.parametrize("stream", [False, True])
def test_text_completion_of_many_choices_is_replayed_too(gateway, key, stream) -> None:
    body = {"model": "tiny", "prompt": ["one", "two"], "n": 2, "stream": stream}
    before = len(rows(gateway))
    with gateway.client() as client:
        first, second = (client.post("/v1/completions", json=body, headers=key) for _ in range(2))
    assert first.status_code == 200
    assert first.content == second.content
    assert second.headers["idempotent-replayed"] == "true"
    assert len(rows(gateway)) == before + 1


@pytest.mark.parametrize("value", ["", "x" * 256, "caf\u00e9", "a\tb"])
def test_key_that_is_none_is_a_400(gateway, value) -> None:
    extra = f"Idempotency-Key: {value}\r\n"
    with gateway.connect() as sock:
        sock.sendall(gateway.raw(body_of({}), extra=extra))
        reply = read_until(sock, b"}}")
    assert b'"param":"idempotency-key"' in reply or b"400" in reply.split(b"\r\n")[0]
    assert not gateway.node.served


def test_two_keys_on_one_request_are_refused(gateway, post) -> None:
    reply = post(body_of({}), [("idempotency-key", "one"), ("Idempotency-Key", "two")])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "idempotency-key")
    assert not gateway.node.served


def test_spaces_around_a_key_are_no_part_of_it(gateway) -> None:
    replies = []
    for value in ("spaced", "  spaced \t"):
        extra = f"Idempotency-Key: {value}\r\nConnection: close\r\n"
        with gateway.connect() as sock:
            sock.sendall(gateway.raw(body_of({}), extra=extra))
            replies.append(read_until(sock, b"}}}"))
    assert b"idempotent-replayed: true" in replies[1].lower()
    assert len(gateway.node.served) == 1


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
    before = joined(gateway)
    body = body_of({"say": "x", "gate": "joined", "fail": "page_integrity"})
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(post, body, key) for _ in range(3)]
        wait_for(lambda: joined(gateway) == before + 2)
        gateway.node.opened.add("joined")
        replies = [one.result() for one in asked]
    assert {reply.status_code for reply in replies} == {502}
    assert {reply.headers["x-should-retry"] for reply in replies} == {"true"}
    assert len(gateway.node.served) == 1


def test_official_sdk_that_timed_out_gets_its_answer_by_its_own_retry(gateway, key, ask) -> None:
    before, joined_before = len(rows(gateway)), joined(gateway)
    with (
        openai.OpenAI(
            base_url=gateway.url + "/v1",
            api_key="test-key-0123456789abcdef",
            max_retries=5,
            timeout=1.0,
        ) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = ask({"say": "late", "gate": "late"})
        answer = thread.submit(client.chat.completions.create, **asked, extra_headers=key)
        wait_for(lambda: joined(gateway) > joined_before)
        gateway.node.opened.add("late")
        reply = answer.result()
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
