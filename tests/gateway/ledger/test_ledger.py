"""The ledger's promises, one by one; traps are named after the failure they would be."""

import asyncio
import sqlite3
import statistics
import threading
import time

import msgspec
import pytest

from gateway.ledger import ledger as ledger_module
from gateway.ledger.files import LedgerError, wal_bytes
from gateway.ledger.ledger import Ledger
from gateway.ledger.requests import requests
from gateway.ledger.rows import Attempt, LedgerFull
from gateway.ledger.usage import usage_by
from gateway.ledger.verify import verify
from policies.contract.wire import Usage, UsageRecord
from policies.pricing import Rates

pytestmark = pytest.mark.anyio


async def until(condition, within_s=20.0):
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the ledger has no event for it
            await asyncio.sleep(0.002)


def column(path, name, request_id):
    connection = sqlite3.connect(path)
    try:
        return connection.execute(
            f"SELECT {name} FROM requests WHERE request_id = ?", (request_id,)
        ).fetchone()[0]
    finally:
        connection.close()


async def test_an_open_row_is_on_disk_when_open_returns_and_bills_nothing(path, row):
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        (line,) = requests(path)
        assert (line.status, line.prompt_tokens, line.charge_nano_usd) == ("open", 0, 0)
        assert verify(path).problem_count == 0
        assert ledger.health().open_rows == 1


async def test_a_row_settles_within_100_ms(path, row, end):
    took = []
    async with Ledger(path) as ledger:
        for i in range(15):
            await ledger.open(row(f"r{i}"))
            ledger.settle(end(f"r{i}"))
            began = time.perf_counter()
            await until(lambda: ledger.health().unsettled == 0)
            took.append(time.perf_counter() - began)
    assert statistics.median(took) < 0.1


async def test_the_bill_follows_the_formula_and_the_row_keeps_what_it_was_billed_by(path, row, end):
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        ledger.settle(end("r1"))
    (line,) = requests(path)
    assert line.charge_nano_usd == (360 * 20_000 + 640 * 4_000 + 10 * 40_000) // 1000
    assert (line.status, line.prompt_tokens, line.cached_tokens) == ("ok", 1000, 640)
    assert line.rates == Rates(20_000, 4_000, 40_000)
    assert msgspec.to_builtins(line).keys() == {
        "request_id", "tenant", "model", "status", "path", "node", "prefill_node",
        "prompt_tokens", "cached_tokens", "completion_tokens", "charge_nano_usd", "rates", "tiers",
    }  # fmt: skip
    assert line.tiers == {"device": 640}
    assert column(path, "price_version", "r1") == "2026-11-29"
    assert column(path, "policy_version", "r1") == "1"
    assert column(path, "tiers", "r1") == '{"device":640}'
    assert column(path, "page_digest", "r1") == b"p" * 16


async def test_client_left_pays_prompt_and_what_was_produced(path, row, end):
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        ledger.settle(end("r1", "client_left", cached=0, completion=3))
    (line,) = requests(path)
    assert (line.status, line.completion_tokens) == ("client_left", 3)
    assert line.charge_nano_usd == 1000 * 20 + 3 * 40


async def test_a_failure_of_ours_bills_nothing_and_keeps_what_was_produced(path, row, end):
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        earlier = Attempt(1, "n9", "node_lost")
        ledger.settle(msgspec.structs.replace(end("r1", "failed"), attempts=(earlier,)))
    (line,) = requests(path)
    assert (line.status, line.prompt_tokens, line.charge_nano_usd) == ("failed", 0, 0)
    attempts = msgspec.json.decode(column(path, "attempts", "r1"), type=list[Attempt])
    assert attempts == [earlier, Attempt(2, "n1", "failed", 1000, 640, 10)]
    assert usage_by(path, ())[0].failed == 1


async def test_a_row_bills_once_though_settled_twice(path, row, end):
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        ledger.settle(end("r1", completion=10))
        ledger.settle(end("r1", completion=99))
        await until(lambda: ledger.health().unsettled == 0)
        ledger.settle(end("r1", completion=99))
    assert [line.completion_tokens for line in requests(path)] == [10]
    assert usage_by(path, ())[0].requests == 1


async def test_an_id_used_again_neither_replaces_nor_doubles_its_row(path, row, end):
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        with pytest.raises(ValueError, match="open already"):
            await ledger.open(row("r1", prompt=5))
        ledger.settle(end("r1"))
        with pytest.raises(ValueError, match="open already"):
            await ledger.open(row("r1", prompt=5))
        await until(lambda: ledger.health().unsettled == 0)
        await ledger.open(row("r1", prompt=5))
        ledger.settle(end("r1", cached=0))
    assert [line.prompt_tokens for line in requests(path)] == [1000]
    assert verify(path).problem_count == 0


async def test_cached_tokens_are_part_of_the_prompt_and_never_more_than_it(path, row, end):
    async with Ledger(path) as ledger:
        await ledger.open(row("r1", prompt=100))
        ledger.settle(end("r1", cached=5000, completion=0))
    (line,) = requests(path)
    assert (line.prompt_tokens, line.cached_tokens) == (100, 100)
    assert line.charge_nano_usd == 100 * 4


@pytest.mark.parametrize("odd", ["\ud800", "nan", "negative", "quality"])
async def test_an_odd_settlement_does_not_hold_up_the_others(path, row, end, odd):
    changes = {
        "\ud800": {"attempts": (Attempt(1, "\ud800", "\ud800"),), "node": "n\ud800"},
        "nan": {"ended_at": float("nan"), "ttft_s": float("inf")},
        "negative": {"completion_tokens": -1, "cached_tokens": 1 << 70},
        "quality": {"quality": "perfect", "status": "fine"},
    }[odd]
    async with Ledger(path) as ledger:
        await ledger.open(row("odd"))
        await ledger.open(row("r1"))
        ledger.settle(msgspec.structs.replace(end("odd"), **changes))
        ledger.settle(end("r1"))
        await until(lambda: ledger.health().unsettled == 0)
    assert [line.status != "open" for line in requests(path)] == [True, True]
    assert verify(path).problem_count == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": "\ud800"},
        {"request_id": ""},
        {"prompt_tokens": -1},
        {"rates": Rates(1, 2, 3)},
        {"started_at": float("nan")},
    ],
)
async def test_a_row_that_could_never_be_written_is_refused_alone(path, row, change):
    async with Ledger(path) as ledger:
        bad = ledger.open(msgspec.structs.replace(row("bad"), **change))
        outcomes = await asyncio.gather(bad, ledger.open(row("r1")), return_exceptions=True)
        assert isinstance(outcomes[0], ValueError)
        assert outcomes[1] is None


async def test_disk_full_refuses_new_rows_and_loses_no_settlement(path, row, end, disk):
    for disk_fails_at in ("row", "commit"):
        async with Ledger(path, connect=disk.connect) as ledger:
            await ledger.open(row(f"a{disk_fails_at}"))
            disk.fails_at = disk_fails_at
            ledger.settle(end(f"a{disk_fails_at}"))
            await until(lambda ledger=ledger: ledger.health().state == "full")
            with pytest.raises(LedgerFull, match=r"free space|No space|full"):
                await ledger.open(row(f"b{disk_fails_at}"))
            ledger.settle(end(f"b{disk_fails_at}"))  # of a refused row: nothing to settle
            assert ledger.health().unsettled == 1
            disk.fails_at = None
            await until(lambda ledger=ledger: ledger.health().state == "ok")
            await ledger.open(row(f"c{disk_fails_at}"))
            ledger.settle(end(f"c{disk_fails_at}"))
    assert [line.request_id for line in requests(path)] == ["arow", "crow", "acommit", "ccommit"]
    assert usage_by(path, ())[0].requests == 4
    assert verify(path).problem_count == 0


async def test_a_disk_that_was_full_is_found_well_again_without_a_request(path, row, disk):
    async with Ledger(path, connect=disk.connect) as ledger:
        disk.fails_at = "row"
        with pytest.raises(LedgerFull):
            await ledger.open(row("r1"))
        assert (ledger.health().state, ledger.health().open_rows) == ("full", 0)
        disk.fails_at = None
        await until(lambda: ledger.health().state == "ok")


async def test_a_close_that_cannot_write_says_what_it_leaves(path, row, end, disk, monkeypatch):
    monkeypatch.setattr(ledger_module, "DRAIN_DEADLINE_S", 1.0)
    ledger = Ledger(path, connect=disk.connect)
    async with ledger:
        await ledger.open(row("r1"))
        disk.fails_at = "commit"
        ledger.settle(end("r1"))
        with pytest.raises(LedgerError, match="1 settlements are not on disk"):
            await ledger.close()
    async with Ledger(path):
        assert [line.status for line in requests(path)] == ["orphaned"]


async def test_a_full_queue_refuses_instead_of_growing(path, row, end):
    async with Ledger(path, max_waiting_opens=3, max_open_rows=5) as ledger:
        many = [ledger.open(row(f"r{i}")) for i in range(8)]
        outcomes = await asyncio.gather(*many, return_exceptions=True)
        assert [isinstance(o, LedgerFull) for o in outcomes] == [False] * 3 + [True] * 5
        await ledger.open(row("r8"))
        await ledger.open(row("r9"))
        with pytest.raises(LedgerFull, match="5 requests are open"):
            await ledger.open(row("r10"))
        ledger.settle(end("r8"))
        await until(lambda: ledger.health().unsettled == 0)
        await ledger.open(row("r11"))


async def test_a_cancelled_open_still_settles(path, row, end, monkeypatch):
    monkeypatch.setattr(ledger_module, "OPEN_EVERY_S", 0.1)
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))  # so that the next batch has to wait, and a settlement not
        opening = asyncio.create_task(ledger.open(row("r2")))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        ledger.settle(end("r2", "client_left", cached=0, completion=0))
        await until(lambda: ledger.health().unsettled == 0)
        ledger.settle(end("r1"))
        assert ledger.health().open_rows == 0
    assert [line.status for line in requests(path)] == ["ok", "client_left"]


async def test_an_open_that_the_disk_stalls_is_refused_and_bills_nothing(
    path, row, disk, monkeypatch
):
    monkeypatch.setattr(ledger_module, "OPEN_DEADLINE_S", 0.05)
    may_go = asyncio.Event()

    async def connect(path):
        connection = await disk.connect(path)
        execute = connection.execute

        async def slow(sql):
            if sql == "COMMIT":
                await may_go.wait()
            return await execute(sql)

        connection.execute = slow
        return connection

    async with Ledger(path, connect=connect) as ledger:
        with pytest.raises(LedgerFull, match="took over"):
            await ledger.open(row("r1"))
        may_go.set()
        await until(lambda: ledger.health().unsettled == 0)
        assert ledger.health().open_rows == 0
    assert [(line.status, line.charge_nano_usd) for line in requests(path)] == [("failed", 0)]


async def test_close_drains_every_buffer_even_when_its_task_is_cancelled(path, row, end):
    opened = asyncio.Event()

    async def serve():
        async with Ledger(path) as ledger:
            for i in range(50):
                await ledger.open(row(f"r{i}"))
            opened.set()
            try:
                await asyncio.sleep(60)
            finally:
                for i in range(50):
                    ledger.settle(end(f"r{i}"))

    serving = asyncio.create_task(serve())
    await opened.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert {line.status for line in requests(path)} == {"ok"}
    assert usage_by(path, ())[0].requests == 50


async def test_a_settlement_after_the_final_drain_is_loud(path, row, end):
    ledger = Ledger(path)
    async with ledger:
        await ledger.open(row("r1"))
    assert [line.status for line in requests(path)] == ["orphaned"]
    with pytest.raises(LedgerFull, match="closing"):
        await ledger.open(row("r2"))
    assert ledger.health().state == "closed"
    ledger.settle(end("r1"))  # it was settled as orphaned
    assert [line.status for line in requests(path)] == ["orphaned"]


async def test_an_unclosed_connection_does_not_hang_exit(path):
    before = set(threading.enumerate())

    def ours():
        return [thread for thread in threading.enumerate() if thread not in before]

    async def broken(path):
        raise sqlite3.OperationalError("unable to open database file")

    with pytest.raises(sqlite3.OperationalError):
        async with Ledger(path, connect=broken):
            pass
    async with Ledger(path):
        assert len(ours()) == 1
    await until(lambda: not ours())


async def test_a_fault_of_the_writer_itself_is_loud_and_opens_nothing_more(path, row, disk):
    async def connect(path):
        connection = await disk.connect(path)

        async def executemany(sql, values):
            raise ZeroDivisionError("a bug")

        connection.executemany = executemany
        return connection

    ledger = Ledger(path, connect=connect)
    await ledger.__aenter__()
    with pytest.raises(LedgerFull, match="closing"):
        await ledger.open(row("r1"))
    assert ledger.health().state == "closed"
    with pytest.raises(ZeroDivisionError):
        await ledger.close()


async def test_wal_does_not_grow_when_idle(path, row, end, monkeypatch):
    monkeypatch.setattr(ledger_module, "CHECKPOINT_EVERY_S", 0.5)
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        ledger.settle(end("r1"))
        await until(lambda: ledger.health().unsettled == 0)
        assert wal_bytes(path) > 0
        await until(lambda: wal_bytes(path) == 0)


async def test_wal_is_truncated_once_an_open_reader_leaves(path, row, end, monkeypatch):
    monkeypatch.setattr(ledger_module, "CHECKPOINT_EVERY_S", 0.05)
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM requests").fetchall()
        ledger.settle(end("r1"))
        await until(lambda: ledger.health().unsettled == 0)
        await asyncio.sleep(0.2)
        assert wal_bytes(path) > 0
        assert ledger.health().state == "ok"
        reader.close()
        await until(lambda: wal_bytes(path) == 0)


async def test_wal_of_a_busy_ledger_is_bounded(path, row, end, monkeypatch):
    monkeypatch.setattr(ledger_module, "CHECKPOINT_EVERY_S", 0.05)
    monkeypatch.setattr(ledger_module, "MAX_WAL_BYTES", 100_000)
    sizes = []
    async with Ledger(path) as ledger:
        for i in range(300):
            await ledger.open(row(f"r{i}"))
            ledger.settle(end(f"r{i}"))
            sizes.append(wal_bytes(path))
    assert max(sizes) > 100_000
    assert min(sizes[len(sizes) // 2 :]) < 50_000


async def test_a_second_gateway_on_the_same_home_is_refused(path, monkeypatch):
    monkeypatch.setattr("gateway.ledger.files.LOCK_WAIT_S", 0.05)
    async with Ledger(path):
        with pytest.raises(LedgerError, match="has a writer already"):
            async with Ledger(path):
                pass


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "ok"), ("length", "ok"), ("abort", "client_left"), ("error", "failed")],
)
async def test_a_late_usage_record_settles_only_an_open_row(path, row, end, reason, status):
    record = UsageRecord("r1", 1, 0, reason, Usage(1000, 640, 7))
    async with Ledger(path) as ledger:
        await ledger.open(row("r1"))
        await ledger.open(row("r2"))
        ledger.settle_from_usage_record(record, time.time())
        ledger.settle_from_usage_record(record, time.time())
        ledger.settle(end("r2"))
        await until(lambda: ledger.health().unsettled == 0)
        ledger.settle_from_usage_record(
            UsageRecord("r2", 1, 0, "stop", Usage(1000, 0, 99)), time.time()
        )
    lines = list(requests(path))
    assert [line.status for line in lines] == [status, "ok"]
    assert lines[1].completion_tokens == 10
    assert verify(path).problem_count == 0
