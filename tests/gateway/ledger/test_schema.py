"""A ledger file is at one schema version exactly, or refused untouched."""

import hashlib
import os
import sqlite3

import msgspec
import pytest

from gateway.ledger import schema
from gateway.ledger.billing import open_values, settle_values
from gateway.ledger.files import LedgerError, has_writer, make_private, take_writer_lock
from gateway.ledger.ledger import Ledger
from gateway.ledger.migrate import migrate
from gateway.ledger.requests import requests
from gateway.ledger.schema import APPLICATION_ID, MIGRATIONS, prepare
from gateway.ledger.usage import usage_by
from gateway.ledger.verify import verify


def change(path, *statements):
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (("PRAGMA user_version = 99",), "install the newer Kagari"),
        (("DROP TABLE rollups",), "restore it from a backup"),
        (("DROP TRIGGER roll_up",), "restore it from a backup"),
        (("ALTER TABLE requests ADD COLUMN extra TEXT",), "restore it from a backup"),
        (("PRAGMA application_id = 7",), "no file of ours"),
    ],
)
def test_a_newer_half_migrated_or_foreign_file_is_refused_untouched(path, statements, message):
    prepare(path, 0.0)
    change(path, *statements, "PRAGMA wal_checkpoint(TRUNCATE)")
    before = digest(path)
    with pytest.raises(LedgerError, match=message):
        prepare(path, 0.0)
    assert digest(path) == before


def test_a_file_that_is_no_database_is_refused(path):
    path.write_bytes(b"x" * 5000)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite3"):
        prepare(path, 0.0)


def test_a_migration_that_fails_half_way_leaves_the_old_version(path):
    prepare(path, 0.0)
    connection = sqlite3.connect(path, isolation_level=None)
    broken = ("CREATE TABLE later (x)", "CREATE TABLE requests (x)")
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        migrate(connection, path, (*MIGRATIONS, broken), APPLICATION_ID)
    migrate(connection, path, MIGRATIONS, APPLICATION_ID)
    migrate(connection, path, (*MIGRATIONS, ("CREATE TABLE later (x)",)), APPLICATION_ID)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    connection.close()


@pytest.mark.anyio
async def test_file_of_the_first_schema_is_read_as_it_is_and_migrated_at_the_start(path, row, end):
    make_private(path)
    connection = sqlite3.connect(path, isolation_level=None)
    migrate(connection, path, MIGRATIONS[:1], APPLICATION_ID)
    connection.execute("INSERT INTO boots (pid, started_at) VALUES (1, 0.0)")
    old = schema.OPEN.replace(", idempotency_digest", "").replace("?, ?) ON", "?) ON")
    for name in ("r1", "r2"):
        connection.execute(old, open_values(row(name), 1)[:-1])
    connection.execute(schema.SETTLE, settle_values(row("r1"), end("r1")))
    connection.execute(schema.ORPHAN, (0.0, 0.0))
    connection.close()
    before = (verify(path), usage_by(path), list(requests(path)))
    assert before[0].problems == ()
    assert (before[0].rows, before[0].charge_nano_usd) == (2, before[1][-1].charge_nano_usd)
    async with Ledger(path) as ledger:
        await ledger.open(msgspec.structs.replace(row("r3"), idempotency_digest=b"k"))
        ledger.settle(end("r3"))
    after = verify(path)
    assert (after.rows, after.problems) == (3, ())
    assert list(requests(path))[:2] == before[2]
    connection = sqlite3.connect(path)
    kept = connection.execute("SELECT idempotency_digest FROM requests ORDER BY sequence")
    assert kept.fetchall() == [(None,), (None,), (b"k",)]
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    connection.close()


@pytest.mark.anyio
async def test_verify_tells_of_a_key_that_was_billed_twice(path, row, end):
    async with Ledger(path) as ledger:
        for name, status in (("r1", "failed"), ("r2", "ok"), ("r3", "client_left")):
            await ledger.open(msgspec.structs.replace(row(name), idempotency_digest=b"k"))
            ledger.settle(end(name, status))
    found = verify(path)
    assert found.problems == ("r2 and r3: one idempotency key, billed more than once",)


def test_each_start_is_a_boot_and_settles_what_the_last_one_left_open(path, row):
    assert prepare(path, 1.0) == 1
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(schema.OPEN, open_values(row("r1"), 1))
    connection.close()
    assert prepare(path, 86_400.0 * 2) == 2
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT status, quality, day, charge_nano_usd FROM requests")
    assert found.fetchall() == [("orphaned", "estimated", "1970-01-03", 0)]
    rolled = connection.execute("SELECT day, requests, failed, charge_nano_usd FROM rollups")
    assert rolled.fetchall() == [("1970-01-03", 1, 1, 0)]
    connection.close()


def test_the_writer_lock_is_held_by_one_and_seen_by_all(path, monkeypatch):
    monkeypatch.setattr("gateway.ledger.files.LOCK_WAIT_S", 0.03)
    assert not has_writer(path)
    lock = take_writer_lock(path)
    assert has_writer(path)
    with pytest.raises(LedgerError, match="--home"):
        take_writer_lock(path)
    os.close(lock)
    assert not has_writer(path)
    os.close(take_writer_lock(path))
