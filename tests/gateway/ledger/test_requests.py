"""Pages of rows: newest first, stable while rows are added, and never a walk over the table."""

import itertools
import sqlite3
import time
from contextlib import closing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ledger import requests as requests_module
from gateway.ledger.files import reading, wal_bytes
from gateway.ledger.keys import KeyRefused, Keys
from gateway.ledger.ledger import Ledger
from gateway.ledger.reader import LedgerReader
from gateway.ledger.requests import (
    Wanted,
    _bounds,
    find_request,
    newest_requests,
    selecting,
)
from gateway.ledger.rows import Attempt
from gateway.ledger.schema import prepare
from gateway.ledger.usage import Scope, summing, usage_report

pytestmark = pytest.mark.anyio
STATUSES = ("ok", "ok", "ok", "client_left", "failed", "ok", "orphaned", "open")
FILTERS = [
    Wanted(),
    Wanted(tenant="t1"),
    Wanted(key_id="k2"),
    Wanted(model="m1"),
    *(Wanted(status=status) for status in sorted(set(STATUSES))),
    Wanted(tenant="t0", key_id="k2", model="m1", status="failed", since=1.0, until=9e9),
    Wanted(tenant="t0", model="m1", since=2000.0),
    Wanted(since=1000.0, until=5000.0),
]


def fill(path, rows, *, first=1):
    """Rows of one boot, ten seconds apart; every property comes round at its own pace."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO requests (sequence, request_id, boot, tenant, key_id, model, status, path,"
            " admitted_prompt_tokens, rate_input, rate_cached, rate_output, price_version,"
            " policy_version, started_at)"
            " VALUES (?, ?, 1, ?, ?, ?, ?, 'mixed', 0, 1, 1, 1, 'v', 'v', ?)",
            (
                (
                    i, f"r{i}", f"t{i % 2}", f"k{i % 3}", f"m{i % 5 % 2}",
                    STATUSES[i % len(STATUSES)], 10.0 * i,
                )
                for i in range(first, first + rows)
            ),
        )  # fmt: skip
        connection.execute("COMMIT")


def pages(path, wanted, limit, **options):
    before = None
    while True:
        with reading(path) as connection:
            page = newest_requests(connection, wanted, limit=limit, before=before, **options)
        yield page
        before = page.next
        if before is None:
            return


def ids(path, wanted, limit=7, **options):
    rows = itertools.chain.from_iterable(p.rows for p in pages(path, wanted, limit, **options))
    return [row.request_id for row in rows]


@pytest.fixture(scope="module")
def long_book(tmp_path_factory):
    """600 rows that no test changes."""
    path = tmp_path_factory.mktemp("book") / "ledger.sqlite3"
    prepare(path, 0.0)
    fill(path, 600)
    return path


@pytest.mark.parametrize("wanted", FILTERS, ids=str)
async def test_pages_hold_every_wanted_row_once_newest_first(long_book, monkeypatch, wanted):
    (everything,) = pages(long_book, Wanted(), 1000)
    assert [row.request_id for row in everything.rows] == [f"r{i}" for i in range(600, 0, -1)]
    right = [row.request_id for row in everything.rows if wanted.matches(row)]
    assert right
    assert ids(long_book, wanted) == right
    monkeypatch.setattr(requests_module, "WINDOW_ROWS", 9)
    assert ids(long_book, wanted, limit=50) == right
    assert ids(long_book, wanted, limit=50, patience_s=0.0) == right  # short pages lose nothing


async def test_an_empty_ledger_is_one_empty_page(path):
    prepare(path, 0.0)
    assert ids(path, Wanted(since=1.0, until=2.0)) == []


async def test_rows_that_come_meanwhile_move_no_page(path):
    prepare(path, 0.0)
    fill(path, 100)
    seen, came = [], 101
    for page in pages(path, Wanted(tenant="t0"), 5):
        seen += [row.request_id for row in page.rows]
        fill(path, 3, first=came)
        came += 3
    assert seen == [f"r{i}" for i in range(100, 0, -2)]


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.integers(-3000, 9000), min_size=1, max_size=40),
    since=st.integers(-5000, 200_000),
    length=st.integers(0, 100_000),
)
def test_a_clock_that_was_set_back_hides_no_row(steps, since, length):
    latest, times = 0.0, []
    for step in steps:  # never further back than a step from the latest
        times.append(latest + step)
        latest = max(latest, times[-1])
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE requests (sequence INTEGER PRIMARY KEY, started_at REAL)")
        connection.executemany("INSERT INTO requests VALUES (?, ?)", enumerate(times, 1))
        low, high = _bounds(connection, Wanted(since=float(since), until=float(since + length)))
    right = [i for i, at in enumerate(times, 1) if since <= at < since + length]
    assert all(low <= i < high for i in right)


# --- what a query may cost ----------------------------------------------------------------------


def plan(path, sql, values) -> str:
    with reading(path) as connection:
        rows = connection.execute("EXPLAIN QUERY PLAN " + sql, values).fetchall()
    return "; ".join(row[3] for row in rows)


@pytest.mark.parametrize("wanted", FILTERS, ids=str)
async def test_every_page_is_a_search_in_an_index_without_a_sort(long_book, wanted):
    sql, values = selecting(wanted)
    told = plan(long_book, sql, (*values, 1, 100, 10))
    assert "SCAN" not in told
    assert "TEMP B-TREE" not in told
    assert "rowid>? AND rowid<?" in told


async def test_the_bounds_of_a_time_are_found_by_searches(long_book):
    asked: list[str] = []
    with reading(long_book) as connection:
        connection.set_trace_callback(asked.append)
        _bounds(connection, Wanted(since=4000.0, until=5000.0))
        connection.set_trace_callback(None)
    assert 10 < len(asked) < 30
    ends, *looks = (plan(long_book, sql, ()) for sql in asked)
    assert ends.count("SEARCH requests") == 2  # the least and the greatest sequence, each a seek
    assert all(told.startswith("SEARCH requests USING INTEGER PRIMARY KEY") for told in looks)


@pytest.mark.parametrize("dimensions", [(), ("day",), ("key", "model"), ("tenant", "day")])
async def test_totals_search_the_rollups_by_day_and_read_no_row(long_book, dimensions):
    for scope in (Scope(), Scope("2026-01-01", "2026-01-31", "t", "k", "m")):
        told = plan(long_book, *summing(dimensions, scope, 10))
        assert "SEARCH rollups USING" in told
        assert "requests" not in told
        assert "SCAN" not in told


async def test_keys_are_paged_by_their_index(tmp_path):
    path = tmp_path / "keys.sqlite3"
    with Keys(path) as keys:
        made = [keys.create(f"k{i}")[0] for i in range(7)]
        keys.revoke("k3")
        seen, after = [], None
        while page := keys.list_after(after, 3):
            seen += [key.key_id for key in page]
            after = (page[-1].created_at, page[-1].key_id)
        assert seen == [key.key_id for key in made]
    told = plan(
        path,
        "SELECT * FROM keys WHERE (created_at, key_id) > (?, ?) ORDER BY created_at, key_id",
        (0.0, ""),
    )
    assert "USING INDEX keys_by_age" in told
    assert "TEMP B-TREE" not in told


def steps_of(path, wanted) -> int:
    """Steps of SQLite's machine that one page takes, in hundreds."""
    counted = []
    with reading(path) as connection:
        connection.set_progress_handler(lambda: counted.append(1), 100)
        newest_requests(connection, wanted, limit=20, patience_s=0.0)
    return len(counted)


async def test_a_page_costs_the_same_in_a_ledger_ten_times_as_long(path, tmp_path, monkeypatch):
    monkeypatch.setattr(requests_module, "WINDOW_ROWS", 300)
    long = tmp_path / "long" / path.name
    prepare(path, 0.0)
    prepare(long, 0.0)
    fill(path, 1_000)
    fill(long, 10_000)
    for wanted in FILTERS:
        short_steps = steps_of(path, wanted)
        assert steps_of(long, wanted) <= short_steps + 30


async def test_usage_says_when_it_has_more_groups_than_it_shows(path, row, end):
    async with Ledger(path) as ledger:
        for i in range(6):
            await ledger.open(row(f"r{i}", model=f"m{i}"))
            ledger.settle(end(f"r{i}"))
    with reading(path) as connection:
        cut = usage_report(connection, ("model",), max_lines=4)
        whole = usage_report(connection, ("model",), Scope(model="m5"), max_lines=4)
    assert ([line.model for line in cut.lines], cut.is_cut) == (["m0", "m1", "m2", "m3"], True)
    assert cut.total.requests == 6
    assert ([line.requests for line in whole.lines], whole.is_cut) == ([1], False)
    assert whole.total.charge_nano_usd == whole.lines[0].charge_nano_usd


# --- beside the writer --------------------------------------------------------------------------


async def test_the_log_is_truncated_though_readers_page_all_the_time(path, row, end):
    async with LedgerReader(path) as reader, Ledger(path) as ledger:
        for i in range(60):
            await ledger.open(row(f"r{i}"))
            ledger.settle(end(f"r{i}"))
        deadline = time.monotonic() + 20
        read = 0
        while wal_bytes(path) or ledger.health().unsettled:
            page = await reader.read(
                lambda file: newest_requests(file, Wanted(key_id="key_a"), limit=50)
            )
            read += len(page.rows)
            assert time.monotonic() < deadline, f"{wal_bytes(path)} bytes of log are left"
        assert read > 0


async def test_one_request_is_told_with_its_tries_and_tiers(path, row, end):
    async with Ledger(path) as ledger:
        await ledger.open(row("r1", prompt=1000))
        tries = (Attempt(1, "n1", "node_lost"),)
        ledger.settle(msgspec.structs.replace(end("r1", "failed"), attempts=tries))
    with reading(path) as connection:
        found = find_request(connection, "r1")
        assert find_request(connection, "r2") is None
    assert found is not None
    assert (found.status, found.prompt_tokens, found.charge_nano_usd) == ("failed", 0, 0)
    assert [attempt.outcome for attempt in found.attempts] == ["node_lost", "failed"]
    assert found.attempts[1].completion_tokens == 10
    assert (found.tiers, found.session) == ({"device": 640}, (b"s" * 16).hex())


async def test_a_key_is_found_by_its_id_before_anothers_name(tmp_path):
    with Keys(tmp_path / "keys.sqlite3") as keys:
        first, _ = keys.create("first")
        second, secret = keys.create(first.key_id)
        assert keys.get(first.key_id) == first
        assert keys.revoke(first.key_id).name == "first"
        assert keys.find(secret) == second
        assert keys.get(first.key_id).revoked_at is not None
        assert keys.rename(second.key_id, "second").name == "second"
        for refused in (lambda: keys.rename(first.key_id, "x"), lambda: keys.get("first")):
            with pytest.raises(KeyRefused) as caught:
                refused()
            assert (caught.value.reason, caught.value.field) == ("unknown", "key")
        third, _ = keys.create("third")
        with pytest.raises(KeyRefused, match="live key already"):
            keys.rename(third.key_id, "second")
