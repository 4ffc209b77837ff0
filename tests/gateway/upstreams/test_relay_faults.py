"""Whatever an upstream does, a client gets one answer or one clean error, and the books balance."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from tests.gateway.api.conftest import QUICK
from tests.gateway.upstreams.scripted_upstream import (
    Exchange,
    chunk,
    sse,
    start_upstream,
    usage_chunk,
)
from tests.gateway.upstreams.test_relay import ASK, events, rows

CHAT = "/v1/chat/completions"
GOOD = Exchange((sse(chunk("ok", finish="stop"), usage_chunk(4, 1), "[DONE]"),))
TOO_LONG = (
    "This model's maximum context length is 16 tokens. However, your request has 20 input tokens."
)


def error(status: int, message: str, **fields: Any) -> Exchange:
    body = json.dumps({"error": {"message": message, **fields}}).encode()
    return Exchange((body,), status=status, content_type="application/json")


# What it does before anything of an answer came → the status and the code that a client gets.
BEFORE = {
    "bad request": (error(400, "temperature: bad", param="temperature"), 400, "invalid_request"),
    "unprocessable": (error(422, "no"), 400, "invalid_request"),
    "too long": (error(400, TOO_LONG), 400, "context_length_exceeded"),
    "older vLLM": (
        Exchange(
            (b'{"object":"error","message":"top_p must be in","code":400}',),
            status=400,
            content_type="application/json",
        ),
        400,
        "invalid_request",
    ),
    "no such model": (error(404, "The model `x` does not exist."), 404, "model_not_found"),
    "no such route": (error(404, "Not Found"), 400, "unsupported"),
    "key refused": (error(401, "Incorrect API key sk-secret"), 502, "upstream_refused"),
    "forbidden": (error(403, "no"), 502, "upstream_refused"),
    "busy": (
        Exchange((b"{}",), status=429, headers=(("retry-after", "7"),)),
        429,
        "capacity_exceeded",
    ),
    "fault": (error(500, "CUDA error at /srv/host-7"), 502, "upstream_error"),
    "gateway's page": (
        Exchange((b"<html>502 Bad Gateway</html>",), status=502, content_type="text/html"),
        502,
        "upstream_error",
    ),
    "redirect": (
        Exchange((), status=302, headers=(("location", "http://127.0.0.1:1/"),)),
        502,
        "upstream_error",
    ),
    "error event": (
        Exchange((sse({"error": {"message": "no", "code": 400}}),)),
        400,
        "invalid_request",
    ),
    "fault event": (Exchange((sse({"error": {"message": "boom"}}),)), 502, "upstream_error"),
    "reset": (Exchange((("reset", None),)), 502, "upstream_error"),
    "nothing": (Exchange(()), 502, "upstream_error"),
    "no chunk": (Exchange((b"data: {nonsense\n\n",)), 502, "upstream_error"),
    "half an event": (Exchange((b'data: {"id": "x", "choi',)), 502, "upstream_error"),
}
HASTY = {"hasty": "their-model"}
FIRST = sse(chunk("begun"))
AFTER = {
    "reset": (Exchange((FIRST, ("wait", 0.4), ("reset", None))), "upstream_error"),
    "end without an end": (Exchange((FIRST, ("wait", 0.4))), "upstream_error"),
    "garbage": (Exchange((FIRST, ("wait", 0.4), b"data: <html>\n\n")), "upstream_error"),
    "error event": (
        Exchange((FIRST, ("wait", 0.4), sse({"error": {"message": "x"}}))),
        "upstream_error",
    ),
}
LATE = msgspec.structs.replace(QUICK.stream, first_heartbeat_s=15.0)
EARLY = msgspec.structs.replace(QUICK.stream, first_heartbeat_s=0.05)
SILENCE = Exchange((("hang", None),))


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_byte_a_fault_is_a_status(relayed, stream) -> None:
    script: list[Exchange] = []
    with (
        start_upstream(lambda _: script.pop(0) if script else GOOD) as upstream,
        relayed(upstream.url, stream=LATE) as gateway,
        gateway.client() as client,
    ):
        for name, (exchange, status, code) in BEFORE.items():
            if not stream and ("event" in name or name == "no chunk"):
                continue
            script[:] = [exchange] * 2  # one is asked again where that may help
            reply = client.post(CHAT, json={**ASK, "stream": stream})
            told = reply.json()["error"]
            assert (reply.status_code, told["code"]) == (status, code), (name, reply.text)
            assert told["request_id"] == reply.headers["x-request-id"]
            for secret in ("sk-secret", "host-7", "127.0.0.1"):
                assert secret not in reply.text
            if name == "busy":
                assert reply.headers["retry-after"] == "7"
            if name in ("bad request", "too long"):
                assert json.loads(exchange.pieces[0])["error"]["message"] in told["message"]
            if code == "upstream_refused":
                assert reply.headers["x-should-retry"] == "false"
            script.clear()
            if stream:
                assert client.post(CHAT, json={**ASK, "stream": True}).status_code == 200
            gateway.call(lambda: _close_breakers(gateway))
        failed = [row for row in rows(gateway) if row["status"] == "failed"]
        assert failed
        assert all(row["charge_nano_usd"] == 0 for row in failed)


def test_a_fault_before_the_first_byte_is_an_event_once_heartbeats_went_out(relayed) -> None:
    with (
        start_upstream(lambda _: SILENCE) as upstream,
        relayed({"url": upstream.url, "first_byte_s": 1.0}, stream=EARLY) as gateway,
        gateway.client() as client,
    ):
        reply = client.post(CHAT, json={**ASK, "stream": True})
        assert reply.status_code == 200
        assert reply.text.startswith(": keep-alive")
        told = events(reply.text)[-1]["error"]
        assert told["code"] == "upstream_timeout"
        assert told["request_id"] == reply.headers["x-request-id"]
        (row,) = rows(gateway)
        assert (row["status"], row["charge_nano_usd"]) == ("failed", 0)


def _close_breakers(gateway: Any) -> None:
    for server in gateway.services.upstreams.servers:
        server.breaker = type(server.breaker)()


def test_after_the_first_byte_a_fault_is_the_last_event(relayed) -> None:
    script: list[Exchange] = []
    with (
        start_upstream(lambda _: script.pop(0)) as upstream,
        relayed(
            {"url": upstream.url, "name": "patient"},
            {"url": upstream.url, "name": "hasty", "idle_s": 0.5, "models": HASTY},
        ) as gateway,
        gateway.client() as client,
    ):
        cases = {**AFTER, "silence": (Exchange((FIRST, *SILENCE.pieces)), "upstream_timeout")}
        for name, (exchange, code) in cases.items():
            script[:] = [exchange]
            model = "hasty" if name == "silence" else ASK["model"]
            reply = client.post(CHAT, json={**ASK, "model": model, "stream": True})
            assert reply.status_code == 200
            chunks = events(reply.text)
            assert chunks[0]["choices"][0]["delta"]["content"] == "begun", name
            assert chunks[-1]["error"]["code"] == code, name
            assert "[DONE]" not in reply.text
            gateway.call(lambda: _close_breakers(gateway))
        assert len(upstream.asked) == len(cases), "nothing is asked again once something was sent"
        assert {row["status"] for row in rows(gateway)} == {"failed"}


def test_another_upstream_is_asked_before_the_first_byte_and_heartbeats_go_on(relayed) -> None:
    slow = Exchange((("wait", 0.7), ("reset", None)))
    with (
        start_upstream(lambda _: slow) as bad,
        start_upstream(lambda _: GOOD) as good,
        relayed({"url": bad.url, "name": "bad"}, {"url": good.url, "name": "good"}) as gateway,
        gateway.client() as client,
    ):
        while not bad.asked:
            reply = client.post(CHAT, json={**ASK, "stream": True})
            assert reply.status_code == 200
        assert ": keep-alive" in reply.text
        assert events(reply.text)[-1] == "[DONE]"
        found = rows(gateway)
        attempts = json.loads(found[-1]["attempts"])
        assert [(one["node"], one["outcome"]) for one in attempts] == [("bad", "upstream_error")]
        assert (found[-1]["node"], found[-1]["status"]) == ("good", "ok")
        metrics = httpx.get(gateway.addresses.admin_url + "/metrics", trust_env=False).text
        assert 'kagari_upstream_retries_total{upstream="good"} 1.0' in metrics


def test_a_broken_server_is_left_alone_and_comes_back_by_one_trial(relayed) -> None:
    is_well = threading.Event()
    bad = error(503, "x")
    with (
        start_upstream(lambda _: GOOD if is_well.is_set() else bad) as upstream,
        relayed(upstream.url) as gateway,
        gateway.client() as client,
    ):
        clock, now = gateway.services.upstreams.clock, gateway.services.upstreams.clock()
        gateway.services.upstreams.clock = lambda: now  # else its second without requests passes
        for _ in range(5):
            reply = client.post(CHAT, json={**ASK, "stream": True})
        before = len(upstream.asked)
        reply = client.post(CHAT, json={**ASK, "stream": True})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_node")
        assert len(upstream.asked) == before
        (view,) = gateway.call(lambda: gateway.services.upstreams.views())
        assert view.state == "open"
        gateway.services.upstreams.clock = clock
        is_well.set()
        deadline = time.monotonic() + 10
        while client.post(CHAT, json={**ASK, "stream": True}).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (view,) = gateway.call(lambda: gateway.services.upstreams.views())
        assert view.state == "up"


def test_a_server_that_is_down_is_known_and_refused_until_it_is_up(relayed) -> None:
    settings = {"models": {"ours": "their-model"}}
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{held.getsockname()[1]}"
    with relayed({"url": url, **settings}, serving=0) as gateway, gateway.client() as client:
        body = {**ASK, "model": "ours", "stream": True}
        reply = client.post(CHAT, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_node")
        assert not client.get("/readyz").json()["ready"]
        with start_upstream(lambda _: GOOD, held=held):
            deadline = time.monotonic() + 20
            while client.post(CHAT, json=body).status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(relayed, stream) -> None:
    begun = (sse(chunk("a"), chunk("b")), ("hang", None)) if stream else (("hang", None),)
    with start_upstream(lambda _: Exchange(begun)) as upstream, relayed(upstream.url) as gateway:
        with gateway.connect() as sock:
            body = json.dumps({**ASK, "stream": stream}).encode()
            sock.sendall(gateway.raw(body))
            upstream.wait_asked(1)
            if stream:
                read = b""
                while b'"b"' not in read:
                    piece = sock.recv(65536)
                    assert piece, read
                    read += piece
        upstream.wait_left()  # it would hang for a minute
        assert upstream.asked[0].client_left
        (row,) = rows(gateway)
        assert (row["status"], row["quality"]) == ("client_left", "estimated")
        assert row["completion_tokens"] == (2 if stream else 0)


def test_bounds_shed_and_a_slow_reader_slows_the_upstream(relayed) -> None:
    much = [sse(chunk("x" * 60_000)) for _ in range(400)]
    gate = threading.Event()
    scripts = {
        "slow": Exchange((*much, sse("[DONE]"))),
        "wait": Exchange((("until", gate), *GOOD.pieces)),
    }
    with (
        start_upstream(lambda asked: scripts[asked.body["user"]]) as upstream,
        relayed({"url": upstream.url, "max_in_flight": 2}) as gateway,
    ):
        with gateway.connect() as sock, gateway.client() as client, ThreadPoolExecutor(1) as pool:
            body = json.dumps({**ASK, "stream": True, "user": "slow"}).encode()
            sock.sendall(gateway.raw(body))
            upstream.wait_asked(1)
            waiting = pool.submit(client.post, CHAT, json={**ASK, "stream": True, "user": "wait"})
            upstream.wait_asked(2)
            with gateway.client() as third:
                shed = third.post(CHAT, json={**ASK, "stream": True, "user": "wait"})
            assert (shed.status_code, shed.json()["error"]["code"]) == (429, "capacity_exceeded")
            gate.set()
            assert waiting.result(20).status_code == 200
            assert not upstream.asked[0].is_answered, "24 MB went somewhere without a reader"
        assert rows(gateway)[0]["status"] == "client_left"


@pytest.mark.parametrize("visits", [40, pytest.param(1500, marks=pytest.mark.slow)])
def test_leaves_and_faults_at_any_moment_leave_nothing_behind(relayed, visits) -> None:
    """After them no connection is open, no place taken, no row open, and every bill adds up."""
    moods = Counter[str]()

    def script(asked: Any) -> Exchange:
        number = int(asked.body["user"])
        moods[str(number % 7)] += 1
        pauses = ("wait", 0.002 * (number % 5))
        pieces = (pauses, sse(chunk("a")), pauses, sse(chunk("b", finish="stop")), pauses)
        match number % 7:
            case 0:
                return Exchange((*pieces[:2], ("reset", None)))
            case 1:
                return error(503, "x")
            case 2:
                return Exchange((("reset", None),))
        return Exchange((*pieces, sse(usage_chunk(9, 2, 4), "[DONE]")))

    def visit(number: int) -> None:
        body = json.dumps({**ASK, "stream": True, "user": str(number)}).encode()
        with gateway.connect() as sock:
            sock.settimeout(10 if number % 3 else 0.001 * (number % 11) + 0.0001)
            sock.sendall(gateway.raw(body, extra="Connection: close\r\n"))
            try:
                while sock.recv(4096):
                    continue
            except (TimeoutError, ConnectionError):
                return

    with (
        start_upstream(script) as one,
        start_upstream(script) as two,
        relayed({"url": one.url, "name": "one"}, {"url": two.url, "name": "two"}) as gateway,
    ):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(visit, range(visits)))
        found = rows(gateway)
        for server in gateway.services.upstreams.servers:
            assert (server.in_flight, server.outstanding_tokens) == (0, 0)
        one.wait_left()
        two.wait_left()
        ended = {row["status"] for row in found}
        assert ended >= {"ok", "failed"}
        assert all(row["completion_tokens"] == 0 for row in found if row["status"] == "failed")
        deadline = time.monotonic() + 10
        while one.num_open + two.num_open > 2 * 16:  # kept ones go after KEPT_S
            assert time.monotonic() < deadline
            time.sleep(0.05)
