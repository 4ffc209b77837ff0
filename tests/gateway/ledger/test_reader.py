"""Reads beside the writer: bounded in time and number, and no connection outlives its read."""

import asyncio
import sqlite3
import time

import msgspec
import pytest

from gateway.ledger import reader as reader_module
from gateway.ledger.account import account_of
from gateway.ledger.ledger import Ledger
from gateway.ledger.reader import LedgerReader, LedgerUnreadable
from gateway.ledger.schema import prepare
from gateway.ledger.spent import SpentKey, find_spent

pytestmark = pytest.mark.anyio

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def endless(connection):
    return connection.execute(ENDLESS).fetchone()


async def test_query_that_takes_too_long_is_ended_and_its_thread_is_free_again(path):
    prepare(path, 0.0)
    async with LedgerReader(path, deadline_s=0.3) as reader:
        began = time.monotonic()
        for error in await asyncio.gather(
            *(reader.read(endless) for _ in range(4)), return_exceptions=True
        ):
            assert isinstance(error, LedgerUnreadable)
        assert time.monotonic() - began < 15
        async with asyncio.timeout(20):
            while True:
                try:
                    boots = await reader.read(lambda c: c.execute("SELECT 1").fetchone())
                    break
                except LedgerUnreadable:  # the queries were ended within their deadline, nearly
                    continue
        assert boots == (1,)
        assert reader.waiting == 0


async def test_more_readers_than_may_wait_are_refused_at_once(path, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_WAITING", 3)
    prepare(path, 0.0)
    async with LedgerReader(path, deadline_s=0.3) as reader:
        reads = [asyncio.create_task(reader.read(endless)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(LedgerUnreadable, match="3 others wait"):
            await reader.read(endless)
        await asyncio.wait(reads)
        assert reader.waiting == 0


async def test_absent_or_broken_file_is_told(path):
    async with LedgerReader(path) as reader:
        with pytest.raises(LedgerUnreadable, match="absent"):
            await reader.read(endless)
        path.write_bytes(b"x" * 5000)
        with pytest.raises(LedgerUnreadable, match="not a database"):
            await reader.read(lambda c: c.execute("SELECT * FROM rollups").fetchall())


async def test_reader_cannot_write(path):
    prepare(path, 0.0)
    async with LedgerReader(path) as reader:
        with pytest.raises(LedgerUnreadable, match="readonly"):
            await reader.read(lambda c: c.execute("DELETE FROM requests"))


async def test_log_is_truncated_after_reads(path, row, end):
    async with Ledger(path) as ledger, LedgerReader(path) as reader:
        for number in range(20):
            await ledger.open(row(f"r{number}"))
            ledger.settle(end(f"r{number}"))
            await reader.read(lambda c: c.execute("SELECT count(*) FROM requests").fetchone())
        async with asyncio.timeout(20):
            while ledger.health().wal_bytes or ledger.health().unsettled:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_spent_key_is_the_one_that_was_billed_and_open_rows_may_yet_be(path, row, end):
    def keyed(name, digest):
        return msgspec.structs.replace(row(name), idempotency_digest=digest)

    async def found(digest):
        return await reader.read(lambda c: find_spent(c, digest=digest))

    async with Ledger(path) as ledger, LedgerReader(path) as reader:
        await ledger.open(keyed("r1", b"a"))
        assert await found(b"a") == SpentKey("r1", False)
        assert await found(b"b") is None
        await settled(ledger, end("r1", "failed"))
        assert await found(b"a") is None
        await ledger.open(keyed("r2", b"a"))
        await settled(ledger, end("r2", "client_left"))
        assert await found(b"a") == SpentKey("r2", True)
    connection = sqlite3.connect(path)
    plan = connection.execute(
        "EXPLAIN QUERY PLAN SELECT request_id FROM requests WHERE idempotency_digest = ?", (b"a",)
    ).fetchall()
    assert "idempotent_requests" in plan[0][-1]
    plan = connection.execute(
        "EXPLAIN QUERY PLAN SELECT sum(requests) FROM rollups"
        " WHERE key_id = ? AND tenant = ? AND day BETWEEN ? AND ?",
        ("k", "t", "a", "b"),
    ).fetchall()
    assert "rollups_by_key" in plan[0][-1]
    connection.close()


async def settled(ledger, ending):
    ledger.settle(ending)
    async with asyncio.timeout(20):
        while ledger.health().unsettled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_account_of_a_year_is_exact_and_by_key_alone(path, row, end):
    async with Ledger(path) as ledger:
        for number in range(60):
            await ledger.open(row(f"r{number}", key=f"key_{number % 3}", model=f"m{number % 2}"))
            ending = msgspec.structs.replace(end(f"r{number}"), ended_at=86_400.0 * number)
            ledger.settle(ending)
        await ledger.open(row("open", key="key_1"))
        await settled(ledger, end("r59"))
        async with LedgerReader(path) as reader:
            account = await reader.read(
                lambda c: account_of(
                    c, key_id="key_1", tenant="default",
                    first_day="1970-01-11", last_day="1970-02-09",
                )
            )  # fmt: skip
        ledger.settle(end("open"))
    expected = [n for n in range(60) if n % 3 == 1 and 10 <= n <= 39]
    assert account.total.requests == len(account.by_day) == len(expected)
    assert account.open_requests == 1
    assert {model for model, _ in account.by_model} == {"m0", "m1"}
    assert sum(line.charge_nano_usd for _, line in account.by_model) == (
        account.total.charge_nano_usd
    )
