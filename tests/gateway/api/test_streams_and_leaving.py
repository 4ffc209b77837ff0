"""Heartbeats, faults before and after the first byte, and clients that leave at any moment."""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import struct
import time
from typing import Any

import openai
import pytest

from gateway.api import completion_run
from gateway.config import GatewayConfig, LimitsConfig, ServerConfig, StreamConfig
from gateway.ledger.files import LEDGER_NAME
from policies.contract.wire import Usage
from policies.pricing import charge_nano_usd

# The rest of an answer comes once the test has read of it, however long the row took to be written.
READ_FIRST = {"gate": "read", "gate_after": 3}


def body_of(script: dict[str, Any], **fields: Any) -> bytes:
    content = json.dumps(script)
    return json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}
    ).encode()


def ledger_rows(gateway: Any) -> list[tuple[Any, ...]]:
    """(status, completion_tokens, charge, attempts) of all rows, newest first."""
    gateway.wait_idle()
    path = gateway.services.home.folder / LEDGER_NAME
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return connection.execute(
            "SELECT status, completion_tokens, charge_nano_usd, attempts FROM requests"
            " ORDER BY sequence DESC"
        ).fetchall()
    finally:
        connection.close()


def read_until(sock: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        piece = sock.recv(65536)
        assert piece, data
        data += piece
    return data


def reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_heartbeats_come_first_while_nothing_is_ready(gateway) -> None:
    script = {"say": "late", "gate": "late"}
    with gateway.connect() as sock:
        started = time.monotonic()
        sock.sendall(gateway.raw(body_of(script, stream=True)))
        early = b""
        while early.count(b": keep-alive\n\n") < 3:  # at 0.3, 0.5, 0.7 s
            early += read_until(sock, b": keep-alive\n\n")
        waited = time.monotonic() - started
        gateway.node.opened.add("late")
        rest = read_until(sock, b"[DONE]")
    assert waited < 5.0  # by the usual settings the third comes after 10 s
    assert b'"role":"assistant"' not in early
    assert b'"role":"assistant"' in rest
    assert b"x-kagari-cached-tokens" not in early  # it was not known when the head was sent


def test_heartbeats_come_between_tokens_too(gateway) -> None:
    script = {"say": "ab", "delay_s": 0.5}
    with gateway.connect() as sock:
        sock.sendall(gateway.raw(body_of(script, stream=True)))
        text = read_until(sock, b"[DONE]")
    after_first_token = text[text.index(b'"content":"a"') :]
    assert b": keep-alive\n\n" in after_first_token
    assert b'"content":"b"' in after_first_token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "told"),
    [("page_integrity", 502, "page_integrity"), ("no_such_code_anywhere", 502, "engine_error")],
)
def test_failure_before_the_first_byte_is_a_status(gateway, stream, code, status, told) -> None:
    with gateway.client() as client:
        reply = client.post("/v1/chat/completions", content=body_of({"fail": code}, stream=stream))
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == told
    assert reply.headers["x-should-retry"] == "true"
    assert all(reply.json()["error"][part] for part in ("found", "allowed", "remedy"))
    assert "/secret/path" not in reply.text  # a node's words may hold paths
    assert ledger_rows(gateway)[0][:3] == ("failed", 0, 0)


def test_failure_after_the_first_byte_is_a_terminal_event_without_done(gateway) -> None:
    script = {"say": "abcdef", "fail_after": 3, "fail": "page_integrity"}
    with gateway.connect() as sock:
        sock.sendall(gateway.raw(body_of(script | READ_FIRST, stream=True)))
        data = read_until(sock, b'"content":"')
        gateway.node.opened.add("read")
        data += read_until(sock, b"\r\n0\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"".join(re.findall(rb'"content":"(\w*)"', data)) == b"abc"
    assert b"[DONE]" not in data
    assert b'"finish_reason":"' not in data
    event = data[data.rindex(b"data: {") + 6 :].split(b"\n\n")[0]
    assert json.loads(event)["error"]["code"] == "page_integrity"
    status, produced, charge, attempts = ledger_rows(gateway)[0]
    assert (status, produced, charge) == ("failed", 0, 0)
    assert '"completion_tokens":3' in attempts


def test_official_sdk_raises_on_the_terminal_event(gateway, ask) -> None:
    script = {"say": "abcdef", "fail_after": 3, "fail": "engine_lost_late", **READ_FIRST}
    with openai.OpenAI(
        base_url=gateway.url + "/v1", api_key="test-key-0123456789abcdef", max_retries=0
    ) as client:
        stream = client.chat.completions.create(**ask(script), stream=True)
        gateway.node.opened.add("read")
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_link_cut_before_the_first_token_is_retried_elsewhere(tmp_path, start, stream) -> None:
    with start(tmp_path, nodes=2) as running, running.client() as client:
        content = body_of({"say": "hello", "cut_after": 0, "cut_attempts": 1}, stream=stream)
        reply = client.post("/v1/chat/completions", content=content)
        assert reply.status_code == 200, reply.text
        (first,) = [node for node in running.nodes.values() if node.served[0].submit.attempt == 1]
        ((status, produced, charge, attempts),) = ledger_rows(running)
        rates = running.services.prices.rates("tiny")
        prompt = len(first.served[0].submit.prompt) // 4
        assert (status, produced) == ("ok", 5)
        assert charge == charge_nano_usd(Usage(prompt, 0, 5), rates)
        assert json.loads(attempts) == [
            {"attempt": 1, "node": first.node_id, "outcome": "failed"},
        ]
        assert reply.headers["x-kagari-node"] != first.node_id


def test_link_cut_on_every_node_is_node_lost_and_free(tmp_path, start) -> None:
    with start(tmp_path, nodes=2) as running, running.client() as client:
        content = body_of({"say": "hello", "cut_after": 0})
        reply = client.post("/v1/chat/completions", content=content)
        assert reply.status_code == 502, reply.text
        assert reply.json()["error"]["code"] == "node_lost"
        assert [row[:3] for row in ledger_rows(running)] == [("failed", 0, 0)]


def test_slow_reader_is_told_and_pays_for_what_was_produced(tmp_path, start) -> None:
    """Else whoever stops reading for a moment near the end would have the answer for nothing."""
    config = GatewayConfig(
        server=ServerConfig(
            port=0, link_port=0, admin_port=0, drain_s=0.5, send_buffer_bytes=16 << 10
        ),
        stream=StreamConfig(send_stall_s=20.0),
    )
    script = {"say": "s" * 1000, "times": 60, "first_s": 0.3, "step": 5, "delay_s": 0}
    with start(tmp_path, config) as running:
        with running.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
            sock.sendall(running.raw(body_of(script, stream=True)))
            deadline = time.monotonic() + 15
            while not (running.node.served and running.node.served[0].aborted):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            data = read_until(sock, b"\r\n0\r\n\r\n")
        assert b'"code":"slow_reader"' in data
        assert b"[DONE]" not in data
        ((status, produced, charge, _),) = ledger_rows(running)
        assert status == "client_left"
        assert produced > 4096
        assert charge > 0


def test_link_cut_after_the_first_token_is_node_lost(gateway) -> None:
    with gateway.client() as client:
        content = body_of({"say": "abcdef", "cut_after": 3, **READ_FIRST}, stream=True)
        with client.stream("POST", "/v1/chat/completions", content=content) as reply:
            assert reply.status_code == 200  # the first token was on its way
            gateway.node.opened.add("read")
            reply.read()
        assert '"code":"node_lost"' in reply.text
        assert "[DONE]" not in reply.text
        deadline = time.monotonic() + 20
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)


MOMENTS = ["in_body", "before_first_token", "mid_stream", "pending_json"]


@pytest.mark.parametrize("leave", ["fin", "rst"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_client_leaving_stops_the_engine_within_a_step(gateway, moment, leave) -> None:
    stream = moment != "pending_json"
    script = {"say": "x" * 2000, "delay_s": 0.01}  # 20 s at least
    if moment in ("before_first_token", "pending_json"):
        script["first_s"] = 20
    body = body_of(script, stream=stream)
    sock = gateway.connect()
    if moment == "in_body":
        sock.sendall(gateway.raw(body)[: -len(body) // 2])
        time.sleep(0.05)
    else:
        sock.sendall(gateway.raw(body))
        if moment == "mid_stream":
            read_until(sock, b'"content":"x')
        deadline = time.monotonic() + 20
        while not gateway.node.served:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    if leave == "rst":
        reset(sock)
    else:
        sock.close()
    gateway.wait_idle(10.0)
    if moment == "in_body":
        assert not gateway.node.served
        return
    assert gateway.node.served[0].aborted
    status, produced, charge, _ = ledger_rows(gateway)[0]
    assert status == "client_left"
    assert charge > 0  # the prompt was computed
    assert produced <= 1000
    line = [entry for entry in gateway.log_lines() if entry["event"] == "request"][-1]
    assert line["client_left"] is True


def test_leaving_at_many_random_moments_leaks_nothing(gateway) -> None:
    body = body_of({"say": "y" * 40, "delay_s": 0.002}, stream=True)
    request = gateway.raw(body)
    for number in range(30):
        sock = gateway.connect()
        sock.sendall(request[: len(request) if number % 3 else number * 12])
        time.sleep(number * 0.003)
        if number % 2:
            reset(sock)
        else:
            sock.close()
    gateway.wait_idle()
    with gateway.client() as client:
        assert client.post("/v1/chat/completions", content=body_of({})).status_code == 200


def test_half_closed_client_counts_as_gone(gateway) -> None:
    with gateway.connect() as sock:
        sock.sendall(gateway.raw(body_of({"say": "z" * 2000, "delay_s": 0.01}, stream=True)))
        read_until(sock, b'"content":"z')
        sock.shutdown(socket.SHUT_WR)
        gateway.wait_idle(10.0)
    assert gateway.node.served[0].aborted


def test_settled_rows_say_how_it_ended_and_bill_the_formula(gateway) -> None:
    with gateway.client() as client:
        reply = client.post("/v1/chat/completions", content=body_of({"say": "five5"}))
    status, produced, charge, _ = ledger_rows(gateway)[0]
    assert (status, produced) == ("ok", 5)
    assert str(charge) == reply.headers["x-kagari-cost-nano-usd"]


def test_keep_alive_connection_serves_many(gateway) -> None:
    with gateway.connect() as sock:
        for _ in range(5):
            sock.sendall(gateway.raw(body_of({"say": "q"}, stream=True)))
            read_until(sock, b"\r\n0\r\n\r\n")


def test_silent_engine_ends_at_the_deadline(tmp_path, start, monkeypatch) -> None:
    monkeypatch.setattr(completion_run, "DEADLINE_GRACE_S", 0.3)
    config = GatewayConfig(
        server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=1.0),
        limits=LimitsConfig(request_deadline_s=0.2),
        stream=StreamConfig(first_heartbeat_s=0.1, heartbeat_s=0.1),
    )
    silent = {"say": "a", "first_s": 30}
    with start(tmp_path, config) as running, running.client() as client:
        whole = client.post("/v1/chat/completions", content=body_of(silent))
        streamed = client.post("/v1/chat/completions", content=body_of(silent, stream=True))
        running.wait_idle()
    assert whole.status_code == 408, running.log.getvalue()
    assert whole.json()["error"]["code"] == "deadline_exceeded"
    assert '"code":"deadline_exceeded"' in streamed.text
    assert "[DONE]" not in streamed.text
