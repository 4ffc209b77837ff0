"""Requests that wait at the gateway, over the wire: refused in time, left, settled, and told of."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from gateway.config import LimitsConfig
from gateway.ledger.files import LEDGER_NAME
from tests.gateway.api.conftest import QUICK, RunningGateway

PATH = "/v1/completions"

# The scripted node's budget is 512 tokens, its rate 10,000 a second; a token is a byte.


def body(letter: str, tokens: int, **script: Any) -> dict[str, Any]:
    """A prompt of about so many tokens, of which none is that of another letter's."""
    return {"model": "tiny", "prompt": json.dumps({"pad": letter * tokens, "say": "ok", **script})}


def rows(gateway: RunningGateway) -> dict[str, tuple[str, int, int]]:
    """By request: status, prompt tokens, charge."""
    path = gateway.services.home.folder / LEDGER_NAME
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        found = connection.execute(
            "SELECT request_id, status, prompt_tokens, charge_nano_usd FROM requests"
        )
        return {name: (status, tokens, charge) for name, status, tokens, charge in found}
    finally:
        connection.close()


def queued(gateway: RunningGateway) -> int:
    views = gateway.call(gateway.services.fleet.nodes)
    return sum(engine.queued_requests for view in views for engine in view.engines)


def wait_until(gateway: RunningGateway, count: int) -> None:
    deadline = time.monotonic() + 10.0
    while queued(gateway) != count:
        assert time.monotonic() < deadline, f"{queued(gateway)} are queued, not {count}"
        time.sleep(0.01)


@contextmanager
def busy(gateway: RunningGateway, tokens: int) -> Iterator[None]:
    """The engine has a prompt that it never answers; it is given up at the end."""
    with gateway.connect() as sock:
        data = json.dumps(body("A", tokens, first_s=30.0)).encode()
        sock.sendall(gateway.raw(data, path=PATH))
        deadline = time.monotonic() + 10.0
        while not any("AAAA" in one.text and not one.aborted for one in gateway.node.served):
            assert time.monotonic() < deadline, "it did not reach the node"
            time.sleep(0.01)
        yield


def hasty_client(gateway: RunningGateway, name: str, ttft_deadline_ms: int) -> httpx.Client:
    _, secret = gateway.call(
        lambda: gateway.services.keys.create(name, ttft_deadline_ms=ttft_deadline_ms)
    )
    return gateway.client(key=secret)


def line_of(gateway: RunningGateway, request_id: str) -> dict[str, Any]:
    (line,) = [one for one in gateway.log_lines() if one.get("request_id") == request_id]
    return line


def metric(gateway: RunningGateway, name: str) -> float:
    with httpx.Client(trust_env=False) as client:
        token = gateway.services.home.admin_token
        text = client.get(
            f"{gateway.addresses.admin_url}/metrics", headers={"authorization": f"Bearer {token}"}
        ).text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_key_that_would_wait_too_long_is_refused_at_once_and_has_no_row(gateway) -> None:
    shed = metric(gateway, 'kagari_queue_sheds_total{reason="ttft"}')
    with busy(gateway, 40_000), hasty_client(gateway, "hasty", 3000) as client:
        began = time.monotonic()
        reply = client.post(PATH, json=body("B", 100))
        took_ms = (time.monotonic() - began) * 1000
        assert reply.status_code == 429, reply.text
        error = reply.json()["error"]
        assert (error["code"], error["allowed"]) == (
            "capacity_exceeded",
            "one within the key's ttft_deadline_ms",
        )
        assert "4.0" in error["found"]  # 40,100 tokens
        assert 1000 <= int(reply.headers["retry-after-ms"]) <= 1100 + took_ms
        assert reply.headers["x-should-retry"] == "true"
        assert reply.headers["x-request-id"] not in rows(gateway)
        with gateway.client() as patient:
            assert patient.post(PATH, json=body("C", 100)).status_code == 200
    assert metric(gateway, 'kagari_queue_sheds_total{reason="ttft"}') == shed + 1
    gateway.wait_settled()


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_shed_from_the_queue_pays_nothing(gateway, stream) -> None:
    """Before the first byte it is a refusal; a stream has had its head by then, after 0.3 s."""
    with busy(gateway, 950), hasty_client(gateway, f"hasty {stream}", 2000) as client:
        reply = client.post(PATH, json={**body("D", 8000), "stream": stream})  # 0.9 s
        if stream:
            assert reply.status_code == 200
            assert '"code":"capacity_exceeded"' in reply.text
            assert "[DONE]" not in reply.text
        else:
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "capacity_exceeded")
            assert int(reply.headers["retry-after-ms"]) == 500
        request_id = reply.headers["x-request-id"]
        assert queued(gateway) == 0
    gateway.wait_settled()
    assert rows(gateway)[request_id] == ("failed", 0, 0)
    assert not any('"DDDD' in one.text for one in gateway.node.served)
    assert 0.0 < line_of(gateway, request_id)["waited_s"] < 2.0


def several(*prompts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [one["prompt"] for one in prompts]}


def test_several_prompts_are_shed_with_their_first(gateway) -> None:
    with busy(gateway, 800), hasty_client(gateway, "several", 900) as client:
        reply = client.post(PATH, json=several(body("I", 500), body("J", 6000)))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "capacity_exceeded")
        assert queued(gateway) == 0
    gateway.wait_settled()
    assert rows(gateway)[reply.headers["x-request-id"]] == ("failed", 0, 0)
    assert len(gateway.node.served) == 1


def test_of_several_prompts_none_is_shed_once_one_is_answered(gateway) -> None:
    """The second one, shorter, is sent first; after that the first may take its time."""
    with ThreadPoolExecutor() as pool, hasty_client(gateway, "patient", 1500) as client:
        with busy(gateway, 800):
            prompts = several(body("K", 500), body("L", 100))
            answer = pool.submit(client.post, PATH, json=prompts)
            wait_until(gateway, 1)
            time.sleep(1.8)
            assert queued(gateway) == 1
        assert answer.result().status_code == 200
    gateway.wait_settled()


def test_who_leaves_the_queue_was_never_sent(gateway) -> None:
    with busy(gateway, 950):
        with gateway.connect() as sock:
            sock.sendall(gateway.raw(json.dumps(body("E", 100)).encode(), path=PATH))
            wait_until(gateway, 1)
            assert metric(gateway, "kagari_queued_requests{") == 1
            assert 100 < metric(gateway, "kagari_queued_tokens{") < 200
        wait_until(gateway, 0)
    gateway.wait_settled()
    assert not any('"EEEE' in one.text for one in gateway.node.served)
    assert metric(gateway, "kagari_queued_requests{") == 0
    status, prompt_tokens, _ = list(rows(gateway).values())[-1]
    assert status == "client_left"
    assert 100 < prompt_tokens < 200


def test_who_waited_is_answered_and_its_line_says_how_long(gateway) -> None:
    with gateway.connect() as sock:
        with busy(gateway, 950):
            sock.sendall(gateway.raw(json.dumps(body("F", 100)).encode(), path=PATH))
            wait_until(gateway, 1)
            time.sleep(0.05)
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")
    gateway.wait_settled()
    (request_id,) = re.findall(rb"x-request-id: (\w+)", answer)
    assert line_of(gateway, request_id.decode())["waited_s"] >= 0.05
    assert metric(gateway, "kagari_queue_seconds_count") >= 2


def test_the_settings_deadline_is_for_keys_without_their_own(tmp_path, start) -> None:
    limits = msgspec.structs.replace(QUICK.limits, ttft_deadline_ms=1500)
    assert LimitsConfig().ttft_deadline_ms is None
    with start(tmp_path, msgspec.structs.replace(QUICK, limits=limits)) as running:
        with running.client() as client:
            reply = client.post(PATH, json=body("G", 16_000))
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "capacity_exceeded")
            reply = client.post(PATH, json=several(body("I", 16_000), body("J", 10)))
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "capacity_exceeded")
            assert reply.headers["x-request-id"] not in rows(running)
            reply = client.post(PATH, json=several(body("J", 10), body("I", 16_000)))
            assert reply.status_code == 200  # the first one's token is the request's
        with hasty_client(running, "own", 15_000) as client:
            assert client.post(PATH, json=body("H", 16_000)).status_code == 200
        running.wait_settled()
