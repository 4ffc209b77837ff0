"""GET /v1/usage: what the caller's own key used, equal to the ledger, and nobody else's."""

from __future__ import annotations

import json
import sqlite3
import time
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from gateway.api.usage import MAX_DAYS, read_range
from gateway.config import GatewayConfig, ServerConfig
from gateway.errors import GatewayError
from gateway.ledger.files import LEDGER_NAME
from policies.admission import AdmissionLimits

OTHER_KEY = "other-key-0123456789abcd"
TODAY = date(2026, 11, 29)
SUMS = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens")


def body_of(say: str, **script: Any) -> bytes:
    messages = [{"role": "user", "content": json.dumps({"say": say, **script})}]
    return json.dumps({"model": "tiny", "messages": messages}).encode()


def usage(gateway: Any, query: str = "", **client: Any) -> dict[str, Any]:
    gateway.wait_idle()
    with gateway.client(**client) as http:
        reply = http.get("/v1/usage" + query)
        assert reply.status_code == 200, reply.text
        assert reply.headers["cache-control"] == "no-store"
        return reply.json()


def ask(gateway: Any, *bodies: bytes, **client: Any) -> list[Any]:
    with gateway.client(**client) as http:
        return [http.post("/v1/chat/completions", content=body) for body in bodies]


def test_sums_are_those_of_the_answers_and_of_each_grouping(gateway) -> None:
    before = usage(gateway)
    long = "the same words again and again " * 4
    replies = ask(gateway, body_of("one", pad=long), body_of("one", pad=long), body_of("three"))
    ask(gateway, body_of("x", fail="page_integrity"))
    after = usage(gateway)
    told = [reply.json()["usage"] for reply in replies]
    gained = {name: after[name] - before[name] for name in (*SUMS, "charge_nano_usd")}
    assert gained == {
        "requests": 4,
        "failed": 1,
        "prompt_tokens": sum(u["prompt_tokens"] for u in told),
        "cached_tokens": sum(u["prompt_tokens_details"]["cached_tokens"] for u in told),
        "completion_tokens": sum(u["completion_tokens"] for u in told),
        "charge_nano_usd": sum(int(r.headers["x-kagari-cost-nano-usd"]) for r in replies),
    }
    assert gained["cached_tokens"] > 0
    assert after["saved_nano_usd"] > before["saved_nano_usd"]
    assert Decimal(after["charge_usd"]) * 10**9 == after["charge_nano_usd"]
    assert Decimal(after["saved_usd"]) * 10**9 == after["saved_nano_usd"]
    assert after["cached_share"] == pytest.approx(
        after["cached_tokens"] / after["prompt_tokens"], abs=1e-6
    )
    for groups in ("by_day", "by_model"):
        for name in (*SUMS, "charge_nano_usd", "saved_nano_usd"):
            assert sum(line[name] for line in after[groups]) == after[name]
    assert [line["model"] for line in after["by_model"]] == ["tiny"]


def test_a_key_never_sees_anothers_usage(gateway) -> None:
    mine, theirs = usage(gateway), usage(gateway, key=OTHER_KEY)
    ask(gateway, body_of("theirs"), key=OTHER_KEY)
    assert {**usage(gateway), "remaining": None} == {**mine, "remaining": None}
    now = usage(gateway, key=OTHER_KEY)
    assert now["requests"] == theirs["requests"] + 1
    assert now["key"]["id"] != mine["key"]["id"]


def test_a_tenant_that_shares_a_key_id_sees_its_own_only(gateway) -> None:
    """Ids are unique; the ledger is asked for both all the same."""
    ask(gateway, body_of("mine"))
    mine = usage(gateway)
    path = gateway.services.home.folder / LEDGER_NAME
    connection = sqlite3.connect(path, timeout=5.0)
    with connection:
        connection.execute(
            "INSERT INTO rollups SELECT day, 'another tenant', key_id, model, 1, 0, 1, 0, 1, 1, 0"
            " FROM rollups LIMIT 1"
        )
    try:
        assert usage(gateway) == mine
    finally:
        with connection:
            connection.execute("DELETE FROM rollups WHERE tenant = 'another tenant'")
        connection.close()


def test_running_requests_are_counted_and_in_no_sum(gateway) -> None:
    before = usage(gateway)
    with gateway.connect() as sock, gateway.client() as http:
        sock.sendall(gateway.raw(body_of("z" * 100, delay_s=0.02)))
        deadline = time.monotonic() + 5
        while (now := http.get("/v1/usage").json())["open_requests"] == 0:
            assert time.monotonic() < deadline
        assert now["open_requests"] == 1
        assert now["requests"] == before["requests"]
    assert usage(gateway)["open_requests"] == 0


def test_rate_that_is_left_is_told_and_budgets_do_not_exist(tmp_path, start) -> None:
    config = GatewayConfig(
        server=ServerConfig(port=0, link_port=0, admin_port=0, drain_s=1.0),
        admission=AdmissionLimits(requests_per_minute_per_key=60),
    )
    with start(tmp_path, config) as running:
        ask(running, body_of("a"), body_of("b"))
        remaining = usage(running)["remaining"]
    assert 57 <= remaining["requests"] <= 59
    assert 0 < remaining["requests_reset_s"] <= 3
    assert (remaining["nano_usd"], remaining["usd"], remaining["tokens"]) == (None, None, None)


def test_range_of_days_is_inclusive_and_others_are_empty(gateway) -> None:
    ask(gateway, body_of("today"))
    today = datetime.now(UTC).date()  # a test at midnight may see two days: ask for both
    tomorrow = today + timedelta(1)
    now = usage(gateway, f"?from={today}&to={tomorrow}")
    assert now["requests"] == usage(gateway)["requests"]
    assert (now["from"], now["to"]) == (str(today), str(tomorrow))
    past = usage(gateway, "?from=2020-01-01&to=2020-01-31&unknown=ignored")
    assert (past["requests"], past["by_day"], past["by_model"]) == (0, [], [])
    assert (past["charge_usd"], past["cached_share"]) == ("0.000000000", 0.0)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (b"", (date(2026, 10, 31), TODAY)),
        (b"to=2026-03-01", (date(2026, 1, 31), date(2026, 3, 1))),
        (b"from=2026-11-29", (TODAY, TODAY)),
        (b"from=0001-01-01&to=0001-01-01", (date.min, date.min)),
        (b"to=0001-01-02", (date.min, date(1, 1, 2))),
        (b"from=2024-01-01&to=2024-12-31", (date(2024, 1, 1), date(2024, 12, 31))),
    ],
)
def test_range_that_is_asked_for(query, expected) -> None:
    assert read_range(query, TODAY) == expected


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (b"from=2026-11-30", "from"),
        (b"from=2020-01-01", "from"),
        (b"from=yesterday", "from"),
        (b"to=2026-02-30", "to"),
        (b"to=", "to"),
        (b"from=2026-1-1%00", "from"),
        (b"to=\xff\xfe", "to"),
    ],
)
def test_range_that_is_none_is_a_400(query, field) -> None:
    with pytest.raises(GatewayError) as caught:
        read_range(query, TODAY)
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)
    assert caught.value.allowed
    assert MAX_DAYS >= 366


def test_reading_leaves_no_reader_that_holds_up_the_log(gateway) -> None:
    """Trap 48: a reader that stays open keeps the write-ahead log from being truncated."""
    ask(gateway, *(body_of("w" * 50) for _ in range(20)))
    for _ in range(5):
        usage(gateway)
    deadline = time.monotonic() + 8
    while gateway.call(lambda: gateway.services.ledger.health().wal_bytes):
        assert time.monotonic() < deadline, "the log was not truncated"
        time.sleep(0.05)
