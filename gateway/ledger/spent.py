"""Which request an idempotency key was billed for, whatever process served it."""

from __future__ import annotations

import sqlite3

from msgspec import Struct


class SpentKey(Struct, frozen=True):
    """is_billed: False while its row is open, that is, for the moment that settling takes."""

    request_id: str
    is_billed: bool


def find_spent(connection: sqlite3.Connection, *, digest: bytes) -> SpentKey | None:
    """None when nothing was billed under this digest and nothing may yet be."""
    row = connection.execute(
        "SELECT request_id, status <> 'open' FROM requests"
        " WHERE idempotency_digest = ? AND status IN ('open', 'ok', 'client_left')"
        " ORDER BY status = 'open' LIMIT 1",
        (digest,),
    ).fetchone()
    return None if row is None else SpentKey(row[0], bool(row[1]))
