"""Bring a SQLite file to the schema of this build, or refuse it whole.

Each migration and its `user_version` are one transaction, so a file is at one version exactly. A
file that is newer, foreign, or whose objects are not those of its version is refused untouched.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from gateway.ledger.files import LedgerError

Migration = Sequence[str]  # statements


def migrate(
    connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration], application_id: int
) -> None:
    """connection must be in autocommit mode; raises LedgerError."""
    found = _pragma(connection, "application_id")
    version = _pragma(connection, "user_version")
    objects = _objects(connection)
    if found != application_id and (found or version or objects):
        raise LedgerError(f"{path} is no file of ours; move it away or choose another --home")
    if version > len(migrations):
        raise LedgerError(
            f"{path} has schema {version}; this build knows up to {len(migrations)}; "
            "install the newer Kagari that wrote it"
        )
    if objects != _expected(migrations[:version]):
        raise LedgerError(
            f"{path} is not at schema {version}, though it says so; restore it from a backup"
        )
    for number, statements in enumerate(migrations[version:], version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {application_id}")
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _expected(migrations: Sequence[Migration]) -> list[tuple[str, str, str]]:
    scratch = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for statements in migrations:
            for statement in statements:
                scratch.execute(statement)
        return _objects(scratch)
    finally:
        scratch.close()


def _objects(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    rows = connection.execute(
        "SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL"
        " AND name NOT LIKE 'sqlite_%' ORDER BY type, name"
    )
    return [(kind, name, sql) for kind, name, sql in rows]


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value
