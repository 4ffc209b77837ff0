"""What was used, what it cost and what caching saved: the rollups, gateway running or not."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gateway.ledger.files import reading

Dimension = Literal["day", "tenant", "key", "model"]
COLUMN_BY_DIMENSION: dict[Dimension, str] = {
    "day": "day",
    "tenant": "tenant",
    "key": "key_id",
    "model": "model",
}


class UsageLine(Struct, frozen=True):
    """Settled requests of one group; dimensions that were not asked for are None.

    Days are UTC, of the request's end. Full price = charge + saved.
    """

    day: str | None
    tenant: str | None
    key_id: str | None
    model: str | None
    requests: int
    failed: int  # of ours or orphaned: billed nothing
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charge_nano_usd: int
    saved_nano_usd: int

    @property
    def cached_share(self) -> float:
        """Cached ÷ prompt tokens; 0 without a prompt token."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class UsageReport(Struct, frozen=True):
    """total is over all groups, also those that `lines` had no room for."""

    lines: tuple[UsageLine, ...]
    total: UsageLine
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Scope:
    """Which rollups count: days are inclusive, as YYYY-MM-DD; None is any."""

    since_day: str = ""
    until_day: str = "9999-12-31"
    tenant: str | None = None
    key_id: str | None = None
    model: str | None = None


EVERYTHING = Scope()


def usage_report(
    connection: sqlite3.Connection,
    dimensions: Sequence[Dimension],
    scope: Scope = EVERYTHING,
    *,
    max_lines: int | None = None,
) -> UsageReport:
    """Groups and their total as of one moment."""
    connection.execute("BEGIN")
    lines = _summed(connection, dimensions, scope, -1 if max_lines is None else max_lines + 1)
    shown = tuple(lines[:max_lines])
    is_cut = len(lines) > len(shown)
    total = _summed(connection, (), scope, 1)[0] if is_cut else _total(shown)
    connection.execute("COMMIT")
    return UsageReport(shown, total, is_cut)


def usage_by(
    path: Path, dimensions: Sequence[Dimension] = ("day", "key", "model"), scope: Scope = EVERYTHING
) -> list[UsageLine]:
    """Rollups summed over what is not in `dimensions`; no dimension gives one line, the total.

    Raises LedgerError when there is no ledger.
    """
    with reading(path) as connection:
        return _summed(connection, dimensions, scope, -1)


def _total(lines: Sequence[UsageLine]) -> UsageLine:
    figures = UsageLine.__struct_fields__[len(COLUMN_BY_DIMENSION) :]
    sums = (sum(getattr(line, figure) for line in lines) for figure in figures)
    return UsageLine(None, None, None, None, *sums)


def _summed(
    connection: sqlite3.Connection, dimensions: Sequence[Dimension], scope: Scope, limit: int
) -> list[UsageLine]:
    sql, values = summing(dimensions, scope, limit)
    return [UsageLine(*row) for row in connection.execute(sql, values)]


def summing(
    dimensions: Sequence[Dimension], scope: Scope, limit: int
) -> tuple[str, tuple[str | int, ...]]:
    """The one query of totals: a range of days in the rollups, never a request's row."""
    names = [
        name if dimension in dimensions else "NULL"
        for dimension, name in COLUMN_BY_DIMENSION.items()
    ]
    sums = ["requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens"]
    sums += ["charge_nano_usd", "saved_nano_usd"]
    columns = ", ".join([*names, *(f"coalesce(sum({name}), 0)" for name in sums)])
    groups = ", ".join(COLUMN_BY_DIMENSION[dimension] for dimension in dimensions)
    order = f"GROUP BY {groups} ORDER BY {groups}" if groups else ""
    equal = {"tenant": scope.tenant, "key_id": scope.key_id, "model": scope.model}
    wanted = {name: value for name, value in equal.items() if value is not None}
    where = " AND ".join(["day BETWEEN ? AND ?", *(f"{name} = ?" for name in wanted)])
    return (
        f"SELECT {columns} FROM rollups WHERE {where} {order} LIMIT ?",
        (scope.since_day, scope.until_day, *wanted.values(), limit),
    )
