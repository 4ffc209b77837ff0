"""The row before the first byte, no row no service, and one settlement whatever happens."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from gateway.api import completion_run
from gateway.ledger.rows import LedgerFull, LedgerHealth, OpenRow, Settlement


class FakeLedger:
    """Remembers what it is told; refuses or is slow when asked to."""

    def __init__(self, *, refuse: bool = False, slow_s: float = 0.0) -> None:
        self.refuse = refuse
        self.slow_s = slow_s
        self.opened: list[OpenRow] = []
        self.settled: list[Settlement] = []

    async def open(self, row: OpenRow) -> None:
        if self.refuse:
            raise LedgerFull("the disk is full", 2.0)
        await asyncio.sleep(self.slow_s)
        self.opened.append(row)

    def settle(self, settlement: Settlement) -> None:
        self.settled.append(settlement)

    def health(self) -> LedgerHealth:
        state = "full" if self.refuse else "ok"
        return LedgerHealth(state, "", 0, 0, 0, 0.0, 0)


@pytest.fixture
def with_ledger(gateway):
    """with_ledger(fake): the running gateway writes there until the test's end."""
    real = gateway.services.ledger

    def use(fake: FakeLedger) -> FakeLedger:
        gateway.services.ledger = fake
        return fake

    yield use
    gateway.wait_idle()
    gateway.services.ledger = real


def body(script: dict[str, Any], **fields: Any) -> bytes:
    messages = [{"role": "user", "content": json.dumps(script)}]
    return json.dumps({"model": "tiny", "messages": messages, **fields}).encode()


@pytest.mark.parametrize("stream", [False, True])
def test_full_ledger_is_503_and_the_node_is_told_to_stop(gateway, with_ledger, stream) -> None:
    fake = with_ledger(FakeLedger(refuse=True))
    with gateway.client() as client:
        reply = client.post(
            "/v1/chat/completions",
            content=body({"say": "x" * 500, "delay_s": 0.01}, stream=stream),
        )
        ready = client.get("/readyz")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "ledger_full")
    assert reply.headers["retry-after-ms"] == "2000"
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["ledger_full"])
    gateway.wait_idle()
    assert not fake.settled
    assert all(served.aborted for served in gateway.node.served)


def test_first_byte_waits_for_the_row(gateway, with_ledger) -> None:
    fake = with_ledger(FakeLedger(slow_s=0.5))
    with gateway.connect() as sock:
        began = time.monotonic()
        sock.sendall(gateway.raw(body({"say": "quick"}, stream=True)))
        sock.recv(1)
        waited = time.monotonic() - began
    assert waited >= 0.5
    assert len(fake.opened) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_wait_for_the_row_are_not_the_clients_fault(
    gateway, with_ledger, stream
) -> None:
    fake = with_ledger(FakeLedger(slow_s=0.5))
    with gateway.client() as client:
        script = {"say": "x" * 1000, "times": 10, "step": 1000}
        reply = client.post("/v1/chat/completions", content=body(script, stream=stream))
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "server_error")
    assert reply.headers["x-should-retry"] == "true"
    gateway.wait_idle()
    assert [end.status for end in fake.settled] == ["failed"]


def test_row_carries_what_will_be_billed_and_no_clear_session(gateway, with_ledger) -> None:
    fake = with_ledger(FakeLedger())
    with gateway.client() as client:
        reply = client.post(
            "/v1/chat/completions",
            content=body({"say": "abc"}),
            headers={"x-session-affinity": "ses_clear"},
        )
    (row,) = fake.opened
    (end,) = fake.settled
    assert row.request_id == reply.headers["x-request-id"] == end.request_id
    assert (row.tenant, row.model, row.path, row.node) == ("default", "tiny", "mixed", "n1")
    assert row.prompt_tokens == reply.json()["usage"]["prompt_tokens"]
    assert row.rates == gateway.services.prices.rates("tiny")
    assert row.session_digest is not None
    assert b"ses_clear" not in row.session_digest
    assert row.page_digest is not None
    assert (end.status, end.quality, end.completion_tokens) == ("ok", "exact", 3)
    assert end.ttft_s is not None
    assert end.ttft_s >= 0


@pytest.mark.parametrize("leave_after_s", [0.05, 0.2, 0.45])
def test_leaving_while_the_row_is_written_settles_once(gateway, with_ledger, leave_after_s) -> None:
    fake = with_ledger(FakeLedger(slow_s=0.3))
    sock = gateway.connect()
    sock.sendall(gateway.raw(body({"say": "x" * 2000, "delay_s": 0.01}, stream=True)))
    while not gateway.node.served:
        time.sleep(0.005)
    time.sleep(leave_after_s)
    sock.close()
    gateway.wait_idle()
    deadline = time.monotonic() + 20
    while not fake.settled:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [end.status for end in fake.settled] == ["client_left"]
    assert gateway.node.served[0].aborted


ENDINGS = [
    ({"say": "ab"}, "ok"),
    ({"say": "abcdef", "fail": "page_integrity"}, "failed"),
    ({"say": "abcdef", "fail": "page_integrity", "fail_after": 2, "delay_s": 0.01}, "failed"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "status"), ENDINGS)
def test_every_ending_settles_exactly_once(gateway, with_ledger, script, status, stream) -> None:
    fake = with_ledger(FakeLedger())
    with gateway.client() as client:
        client.post("/v1/chat/completions", content=body(script, stream=stream))
    gateway.wait_idle()
    assert [end.status for end in fake.settled] == [status]


def test_refused_request_has_no_row(gateway, with_ledger) -> None:
    fake = with_ledger(FakeLedger())
    with gateway.client() as client:
        client.post("/v1/chat/completions", content=body({}, n=500))
        client.post("/v1/chat/completions", content=body({}, model="nothing"))
    assert not fake.opened
    assert not fake.settled


class Broken(Exception):
    """A fault that nobody foresaw."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["models", "prompt", "dispatch", "open", "settle", "headers"])
def test_a_fault_at_any_place_is_a_500_and_leaks_nothing(
    gateway, with_ledger, monkeypatch, place, stream
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise Broken("with a secret word of the prompt")

    fleet = gateway.services.fleet
    fake = with_ledger(FakeLedger())
    if place == "models":
        monkeypatch.setattr(fleet, "model", fail)
    elif place == "prompt":
        monkeypatch.setattr(fleet.model("tiny").text, "page_keys", fail)
    elif place == "dispatch":
        monkeypatch.setattr(fleet, "dispatch", fail)
    elif place == "headers":
        monkeypatch.setattr(completion_run.CompletionRun, "headers", fail)
    else:
        monkeypatch.setattr(fake, place, fail)
    with gateway.client() as client:
        reply = client.post("/v1/chat/completions", content=body({"say": "abc"}, stream=stream))
    monkeypatch.undo()
    if stream and place == "settle":  # the answer is under way: its last event says so
        assert '"code":"server_error"' in reply.text
        assert "[DONE]" not in reply.text
    else:
        assert reply.status_code == 500, reply.text
        error = reply.json()["error"]
        assert error["code"] == "server_error"
        assert all(error[part] for part in ("found", "allowed", "remedy", "docs"))
    assert "secret word" not in reply.text
    gateway.wait_idle()
    # An open that raised may have reached the disk, so it is settled; else that does nothing.
    expected = ["failed"] if place in ("open", "headers") else []
    assert [end.status for end in fake.settled] == expected
