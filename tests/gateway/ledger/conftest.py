"""Rows and endings for the ledger's tests, and a disk that can be full."""

import sqlite3
import time
from pathlib import Path

import aiosqlite
import pytest

from gateway.ledger import ledger as ledger_module
from gateway.ledger.ledger import connect_writer
from gateway.ledger.rows import OpenRow, Settlement
from policies.pricing import Rates

RATES = Rates(20_000, 4_000, 40_000)


def make_row(
    request_id: str, *, prompt: int = 1000, model: str = "m", key: str = "key_a"
) -> OpenRow:
    return OpenRow(
        request_id, "default", key, model, "mixed", prompt, RATES, "2026-11-29", "1", "n1",
        time.time(), b"s" * 16, b"p" * 16,
    )  # fmt: skip


def make_end(
    request_id: str, status: str = "ok", *, cached: int = 640, completion: int = 10
) -> Settlement:
    return Settlement(
        request_id, status, "exact", "n1", None, "mixed", cached, completion,
        {"device": cached}, (), time.time(), 0.05,
    )  # fmt: skip


class Disk:
    """Connects like the ledger, but its writes fail, at the row or at the commit, while told so."""

    def __init__(self) -> None:
        self.fails_at: str | None = None

    async def connect(self, path: Path) -> "FailingConnection":
        return FailingConnection(await connect_writer(path), self)


class FailingConnection:
    def __init__(self, connection: aiosqlite.Connection, disk: Disk) -> None:
        self._connection, self._disk = connection, disk

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    async def execute(self, sql: str) -> aiosqlite.Cursor:
        if sql == "COMMIT" and self._disk.fails_at == "commit":
            raise sqlite3.OperationalError("database or disk is full")
        return await self._connection.execute(sql)

    async def executemany(self, sql: str, values: list) -> aiosqlite.Cursor:
        if self._disk.fails_at == "row":
            raise OSError(28, "No space left on device")
        return await self._connection.executemany(sql, values)

    async def close(self) -> None:
        await self._connection.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the disk is."""
    monkeypatch.setattr(ledger_module, "OPEN_DEADLINE_S", 60.0)


@pytest.fixture
def row():
    return make_row


@pytest.fixture
def end():
    return make_end


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def new_disk() -> type[Disk]:
    return Disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite3"
