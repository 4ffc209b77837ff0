"""Usage adds up by any grouping; verify finds whatever does not."""

import sqlite3

import msgspec
import pytest

from gateway.ledger import requests as requests_module
from gateway.ledger.files import LedgerError
from gateway.ledger.ledger import Ledger
from gateway.ledger.requests import requests
from gateway.ledger.usage import Scope, UsageLine, usage_by
from gateway.ledger.verify import MAX_PROBLEMS, verify
from policies.contract.wire import Usage
from policies.pricing import charge

pytestmark = pytest.mark.anyio
DAY_S = 86_400


@pytest.fixture
async def filled(path, row, end):
    """Two days, two keys, two models: 24 requests, one of which failed; then a clean stop."""
    async with Ledger(path) as ledger:
        for i in range(24):
            await ledger.open(
                row(f"r{i}", model=f"m{i % 2}", key=f"key_{i % 4 // 2}", prompt=100 + i)
            )
            ended = end(f"r{i}", "failed" if i == 23 else "ok", cached=4 * i, completion=i)
            ledger.settle(msgspec.structs.replace(ended, ended_at=float(DAY_S * (i // 12) + i)))
    return path


async def test_every_grouping_has_the_same_total(filled):
    (total,) = usage_by(filled, ())
    assert (total.requests, total.failed) == (24, 1)
    for dimensions, groups in [
        (("day",), 2), (("key",), 2), (("model",), 2), (("tenant",), 1),
        (("day", "key", "model"), 8), (("model", "day"), 4),
    ]:  # fmt: skip
        lines = usage_by(filled, dimensions)
        assert len(lines) == groups
        for field in UsageLine.__struct_fields__[4:]:
            assert sum(getattr(line, field) for line in lines) == getattr(total, field)


async def test_full_price_less_saved_is_the_bill_over_the_whole_ledger(filled):
    (total,) = usage_by(filled, ())
    full = bill = 0
    for line in requests(filled):
        price = charge(
            Usage(line.prompt_tokens, line.cached_tokens, line.completion_tokens), line.rates
        )
        assert price.bill == line.charge_nano_usd
        full, bill = full + price.full, bill + price.bill
    assert total.charge_nano_usd == bill
    assert total.charge_nano_usd + total.saved_nano_usd == full
    assert total.saved_nano_usd > 0


async def test_days_are_utc_and_inclusive(filled):
    assert [line.day for line in usage_by(filled, ("day",))] == ["1970-01-01", "1970-01-02"]
    assert [line.requests for line in usage_by(filled, (), Scope(since_day="1970-01-02"))] == [12]
    assert [line.requests for line in usage_by(filled, (), Scope(until_day="1970-01-01"))] == [12]
    assert usage_by(filled, (), Scope(until_day="1969-12-31"))[0].requests == 0


async def test_an_empty_ledger_has_a_total_of_nothing(path):
    async with Ledger(path):
        (total,) = usage_by(path, ())
        assert (total.requests, total.cached_share) == (0, 0.0)
        assert list(requests(path)) == []
    assert UsageLine(None, None, None, None, 1, 0, 100, 80, 0, 0, 0).cached_share == 0.8


async def test_rows_are_paged_so_that_no_reader_stays_open(filled, monkeypatch):
    monkeypatch.setattr(requests_module, "PAGE_ROWS", 5)
    lines = requests(filled)
    first = next(lines)
    writer = sqlite3.connect(filled, isolation_level=None)
    writer.execute("UPDATE boots SET pid = pid")
    assert writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0  # not in the way
    writer.close()
    assert [first.request_id, *(line.request_id for line in lines)] == [f"r{i}" for i in range(24)]
    assert [line.request_id for line in requests(filled, after=22)] == ["r22", "r23"]


async def test_no_ledger_is_said_and_none_is_made(path):
    for read in (verify, usage_by, lambda p: list(requests(p))):
        with pytest.raises(LedgerError, match="absent"):
            read(path)
    assert not path.exists()


async def test_verify_passes_a_whole_ledger(filled):
    found = verify(filled)
    assert (found.rows, found.open_rows, found.problem_count, found.exit_status) == (24, 0, 0, 0)
    assert found.charge_nano_usd == usage_by(filled, ())[0].charge_nano_usd


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE requests SET charge_nano_usd = charge_nano_usd + 1 WHERE request_id = 'r3'", "r3"),
        ("UPDATE requests SET saved_nano_usd = 0 WHERE request_id = 'r5'", "r5"),
        ("UPDATE requests SET rate_output = rate_output + 1000 WHERE request_id = 'r7'", "r7"),
        (
            "UPDATE requests SET tiers = '{\"disk\":9}' WHERE request_id = 'r9'",
            "r9: 36 cached tokens",
        ),
        ("UPDATE requests SET tiers = '[' WHERE request_id = 'r9'", "but its tiers say ["),
        ("UPDATE requests SET prompt_tokens = 9 WHERE request_id = 'r23'", "failed, yet 9"),
        ("UPDATE rollups SET prompt_tokens = prompt_tokens + 1", "rows without such a rollup"),
        ("DELETE FROM rollups WHERE day = '1970-01-02'", "rows without such a rollup"),
        ("DELETE FROM requests WHERE request_id = 'r1'", "rollup without such rows"),
        ("INSERT INTO rollups VALUES ('d', 't', 'k', 'm', 1, 0, 0, 0, 0, 0, 0)", "d / t / k / m"),
    ],
)
async def test_verify_finds_a_changed_figure(filled, statement, told):
    connection = sqlite3.connect(filled, isolation_level=None)
    connection.execute(statement)
    connection.close()
    found = verify(filled)
    assert found.exit_status == 1
    assert any(told in problem for problem in found.problems)


async def test_verify_tells_open_rows_of_a_living_process_from_those_of_a_dead_one(path, row):
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        assert verify(path).problem_count == 0
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("INSERT INTO boots (pid, started_at) VALUES (1, 1.0)")
        assert "its process is gone" in verify(path).problems[0]
        connection.execute("DELETE FROM boots WHERE boot = 2")
        connection.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("INSERT INTO requests SELECT 9, 'r9', boot, tenant, key_id, model, 'open',"
        " NULL, path, node, NULL, 1, 0, 0, 0, 0, 0, 1, 1, 1, 'v', 'v', 1.0, NULL, NULL, NULL,"
        " '{}', '[]', NULL, NULL, NULL FROM requests")  # fmt: skip
    connection.close()
    assert "r9: open, but its process is gone" in verify(path).problems[0]


async def test_verify_of_a_wreck_is_bounded(path, row, end):
    async with Ledger(path) as ledger:
        for i in range(MAX_PROBLEMS + 20):
            await ledger.open(row(f"r{i}"))
            ledger.settle(end(f"r{i}"))
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE requests SET charge_nano_usd = 1")
    connection.close()
    found = verify(path)
    assert len(found.problems) == MAX_PROBLEMS
    assert found.problem_count > MAX_PROBLEMS + 20


async def test_a_file_that_is_no_ledger_is_named(path):
    sqlite3.connect(path).execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(LedgerError, match="no ledger of ours"):
        verify(path)
    path.write_bytes(b"x" * 4000)
    for read in (verify, usage_by, lambda p: list(requests(p))):
        with pytest.raises(LedgerError, match="not a database"):
            read(path)
