"""`kagari usage`, `ledger verify` and `keys` on a home that a ledger has been written in."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.cli.usage import usd
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.ledger import Ledger
from gateway.ledger.rows import OpenRow, Settlement
from policies.pricing import Rates

Kagari = Callable[..., subprocess.CompletedProcess[str]]
RATES = Rates(20_000, 4_000, 40_000)


@pytest.fixture
async def book(tmp_path: Path) -> Path:
    """Two requests: 1,000 prompt tokens each, 0 and 640 of them cached, 10 completion tokens."""
    path = tmp_path / "home" / LEDGER_NAME
    async with Ledger(path) as ledger:
        for index, cached in enumerate((0, 640)):
            request_id = f"req-{index}"
            await ledger.open(
                OpenRow(
                    request_id=request_id,
                    tenant="default",
                    key_id="key_1",
                    model="m",
                    path="mixed",
                    prompt_tokens=1000,
                    rates=RATES,
                    price_version="p",
                    policy_version="r",
                    node="n1",
                    started_at=1_800_000_000.0,
                )
            )
            ledger.settle(
                Settlement(
                    request_id=request_id,
                    status="ok",
                    quality="exact",
                    node="n1",
                    prefill_node=None,
                    path="mixed",
                    cached_tokens=cached,
                    completion_tokens=10,
                    tiers={},
                    attempts=(),
                    ended_at=1_800_000_001.0,
                    ttft_s=0.1,
                )
            )
    return path


@pytest.mark.anyio
async def test_requests_have_exactly_the_contracts_fields_and_tiers(
    book: Path, kagari: Kagari
) -> None:
    rows = json.loads(kagari("usage", "--requests", "--json").stdout)
    assert [row["request_id"] for row in rows] == ["req-0", "req-1"]
    assert set(rows[0]) == {
        *("request_id", "tenant", "model", "status", "path", "node", "prefill_node"),
        *("prompt_tokens", "cached_tokens", "completion_tokens", "charge_nano_usd", "rates"),
        "tiers",
    }
    assert rows[1]["rates"] == {"input": 20_000, "cached": 4_000, "output": 40_000}
    assert rows[1]["charge_nano_usd"] == 360 * 20 + 640 * 4 + 10 * 40


@pytest.mark.anyio
@pytest.mark.parametrize(("by", "name"), [("day", "2027-01-15"), ("key", "key_1"), ("model", "m")])
async def test_usage_sums_and_says_what_caching_saved(
    book: Path, kagari: Kagari, by: str, name: str
) -> None:
    told = json.loads(kagari("usage", "--by", by, "--json").stdout)
    assert [row["name"] for row in told["rows"]] == [name]
    for line in (told["rows"][0], told["total"]):
        assert line["requests"] == 2
        assert line["cached_share"] == 0.32
        assert line["charge_nano_usd"] == 20_400 + 10_160
        assert line["saved_nano_usd"] == 640 * 16
    shown = kagari("usage", "--by", by).stdout
    assert "0.000030560" in shown
    assert "32%" in shown
    assert "0.000010240" in shown


@pytest.mark.anyio
async def test_verify_finds_a_changed_charge(book: Path, kagari: Kagari) -> None:
    assert json.loads(kagari("ledger", "verify", "--json").stdout)["ok"] is True
    connection = sqlite3.connect(book)
    connection.execute("UPDATE requests SET charge_nano_usd = 1 WHERE request_id = 'req-0'")
    connection.commit()
    connection.close()
    told = kagari("ledger", "verify", "--json")
    assert told.returncode == 1
    answer = json.loads(told.stdout)
    assert answer["ok"] is False
    assert any("req-0" in problem for problem in answer["problems"])
    assert "does not balance" in kagari("ledger", "verify").stdout


@pytest.mark.anyio
async def test_an_empty_book_is_an_empty_array(tmp_path: Path, kagari: Kagari) -> None:
    async with Ledger(tmp_path / "home" / LEDGER_NAME):
        pass
    told = kagari("usage", "--requests", "--json")
    assert json.loads(told.stdout) == []


def test_money_is_shown_exactly() -> None:
    assert usd(0) == "0.000000000"
    assert usd(1) == "0.000000001"
    assert usd(12_345_678_901) == "12.345678901"


def test_a_key_is_created_listed_and_revoked(kagari: Kagari) -> None:
    created = json.loads(kagari("keys", "create", "ci", "--json").stdout)
    assert created["secret"].startswith("kg-")
    listed = kagari("keys", "list", "--json").stdout
    assert created["secret"] not in listed
    assert [key["name"] for key in json.loads(listed)] == ["ci"]
    assert kagari("keys", "create", "ci").returncode == 1
    assert kagari("keys", "revoke", "ci").returncode == 0
    assert kagari("keys", "revoke", "ci").returncode == 1
    again = kagari("keys", "create", "ci").stdout
    assert "not shown again" in again
    assert "revoked" in kagari("keys", "list").stdout
