"""The deadline of a first token before upstreams: passed over, ended in time, billed nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.gateway.api.conftest import QUICK
from tests.gateway.upstreams.scripted_upstream import (
    Exchange,
    chunk,
    sse,
    start_upstream,
    usage_chunk,
    whole_answer,
)
from tests.gateway.upstreams.test_relay import ASK, events, rows

CHAT = "/v1/chat/completions"
END = sse(chunk("ok", finish="stop"), usage_chunk(4, 1), "[DONE]")
GOOD = Exchange((END,))
STREAM = {**ASK, "stream": True}
LONG = {**STREAM, "messages": [{"role": "user", "content": "x" * 6000}]}  # 3,000 tokens, by bytes


def within(ttft_deadline_ms: int, *, heartbeat_s: float = 0.05) -> dict[str, Any]:
    """Settings under which first tokens have to come by then, and the first heartbeat goes out."""
    return {
        "limits": msgspec.structs.replace(QUICK.limits, ttft_deadline_ms=ttft_deadline_ms),
        "stream": msgspec.structs.replace(QUICK.stream, first_heartbeat_s=heartbeat_s),
    }


@pytest.mark.parametrize("heartbeat_s", [10.0, 0.05])
def test_who_gets_no_first_token_in_time_is_told_so_and_pays_nothing(relayed, heartbeat_s) -> None:
    """A status before the first heartbeat, the last event after it; the server is left at once."""
    hang = Exchange((b": thinking\n\n", ("hang", None)))
    with (
        start_upstream(lambda _: hang) as upstream,
        relayed(upstream.url, **within(1000, heartbeat_s=heartbeat_s)) as gateway,
        gateway.client() as client,
    ):
        reply = client.post(CHAT, json=STREAM)
        if heartbeat_s > 1:
            told = reply.json()["error"]
            assert reply.status_code == 429
            assert int(reply.headers["retry-after-ms"]) == 1000
        else:
            told = events(reply.text)[-1]["error"]
            assert "[DONE]" not in reply.text
        assert told["code"] == "capacity_exceeded"
        assert told["allowed"] == "one within the key's ttft_deadline_ms"
        upstream.wait_left()
        (row,) = rows(gateway)
        assert (row["status"], row["charge_nano_usd"], row["prompt_tokens"]) == ("failed", 0, 0)
        (view,) = gateway.call(lambda: gateway.services.upstreams.views())
        assert (view.state, view.in_flight, view.outstanding_tokens) == ("up", 0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_answered_or_cannot_be_seen_is_not_given_up(relayed, stream) -> None:
    """After its first token an answer takes as long as it likes; one that comes whole has none."""
    pieces: tuple[Any, ...] = (sse(chunk("first")), ("wait", 1.3), END)
    kind = "text/event-stream"
    if not stream:
        pieces, kind = (("wait", 1.3), whole_answer("ok", 4, 1)), "application/json"
    with (
        start_upstream(lambda _: Exchange(pieces, content_type=kind)) as upstream,
        relayed(upstream.url, **within(1200)) as gateway,
        gateway.client() as client,
    ):
        reply = client.post(CHAT, json={**ASK, "stream": stream})
        assert reply.status_code == 200
        assert "ok" in reply.text
        assert [row["status"] for row in rows(gateway)] == ["ok"]


def test_a_server_that_would_be_late_by_its_rate_is_passed_over(relayed) -> None:
    with start_upstream(lambda _: GOOD) as slow, start_upstream(lambda _: GOOD) as unknown:
        tables = (
            {"url": slow.url, "name": "slow", "prefill_tokens_per_s": 1000},
            {"url": unknown.url, "name": "unknown"},
        )
        with relayed(*tables, **within(2000)) as gateway, gateway.client() as client:
            headers = {"x-session-affinity": "s"}
            homes = {client.post(CHAT, json=STREAM, headers=headers).headers["x-kagari-node"]}
            for number in range(6):
                reply = client.post(CHAT, json=LONG, headers={"x-session-affinity": f"{number}"})
                assert reply.headers["x-kagari-node"] == "unknown"
            assert homes <= {"slow", "unknown"}
            assert all(len(one.raw) < 6000 for one in slow.asked)


def test_where_all_would_be_late_nobody_is_asked_and_there_is_no_row(relayed) -> None:
    with (
        start_upstream(lambda _: GOOD) as upstream,
        relayed({"url": upstream.url, "prefill_tokens_per_s": 1000}, **within(2000)) as gateway,
        gateway.client() as client,
    ):
        reply = client.post(CHAT, json=LONG)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (429, "capacity_exceeded")
        assert error["found"].startswith("a first token after 3")
        assert reply.headers["x-should-retry"] == "true"
        assert client.post(CHAT, json=STREAM).status_code == 200
        assert len(upstream.asked) == 1
        assert [row["status"] for row in rows(gateway)] == ["ok"]


def test_another_server_is_tried_only_while_it_can_be_in_time(relayed) -> None:
    """The fault of the first is told where the other's forecast is too late by then."""
    broken = Exchange((("wait", 0.8), ("reset", None)))
    with start_upstream(lambda _: broken) as bad, start_upstream(lambda _: GOOD) as slow:
        tables = (
            {"url": bad.url, "name": "bad", "prefill_tokens_per_s": 1500},  # 2.0 s
            {"url": slow.url, "name": "slow", "prefill_tokens_per_s": 1250},  # 2.4 s
        )
        with relayed(*tables, **within(3000)) as gateway, gateway.client() as client:
            reply = client.post(CHAT, json=LONG)
            assert events(reply.text)[-1]["error"]["code"] == "upstream_error"
            assert len(bad.asked) == 1
            assert not slow.asked
