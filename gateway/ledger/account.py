"""What one API key used: its rollups over a range of days, read in one short transaction."""

from __future__ import annotations

import sqlite3

from msgspec import Struct

SUMS = (
    "requests",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "charge_nano_usd",
    "saved_nano_usd",
)
MAX_MODELS = 1000


class AccountLine(Struct, frozen=True):
    """Settled requests; what failed is counted and bills nothing. Full price = charge + saved."""

    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charge_nano_usd: int
    saved_nano_usd: int


class Account(Struct, frozen=True):
    """by_model holds the MAX_MODELS that cost most. open_requests are in none of the sums."""

    total: AccountLine
    by_day: tuple[tuple[str, AccountLine], ...]
    by_model: tuple[tuple[str, AccountLine], ...]
    open_requests: int


def account_of(
    connection: sqlite3.Connection, *, key_id: str, tenant: str, first_day: str, last_day: str
) -> Account:
    """Days are UTC, of the requests' end, both inclusive, as YYYY-MM-DD."""
    columns = ", ".join(f"coalesce(sum({name}), 0)" for name in SUMS)
    chosen = "FROM rollups WHERE key_id = ? AND tenant = ? AND day BETWEEN ? AND ?"
    values = (key_id, tenant, first_day, last_day)
    connection.execute("BEGIN")  # all of it from one moment
    total = connection.execute(f"SELECT {columns} {chosen}", values).fetchone()
    by_day = connection.execute(
        f"SELECT day, {columns} {chosen} GROUP BY day ORDER BY day", values
    ).fetchall()
    by_model = connection.execute(
        f"SELECT model, {columns} {chosen} GROUP BY model"
        " ORDER BY sum(charge_nano_usd) DESC, model LIMIT ?",
        (*values, MAX_MODELS),
    ).fetchall()
    (open_requests,) = connection.execute(
        "SELECT count(*) FROM requests WHERE status = 'open' AND key_id = ? AND tenant = ?",
        (key_id, tenant),
    ).fetchone()
    connection.execute("COMMIT")
    return Account(
        AccountLine(*total),
        tuple((day, AccountLine(*rest)) for day, *rest in by_day),
        tuple((model, AccountLine(*rest)) for model, *rest in by_model),
        open_requests,
    )
