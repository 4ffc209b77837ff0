"""A ledger file is at one schema version exactly, or refused untouched."""

import hashlib
import os
import sqlite3

import pytest

from gateway.ledger import schema
from gateway.ledger.billing import open_values
from gateway.ledger.files import LedgerError, has_writer, take_writer_lock
from gateway.ledger.migrate import migrate
from gateway.ledger.schema import APPLICATION_ID, MIGRATIONS, prepare


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
