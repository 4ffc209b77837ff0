"""What was used, what it cost and what caching saved: read from the file, gateway running or not.

Readers take short transactions only, because an open one keeps the write-ahead log from being
truncated (rows are paged for the same reason, and so that no table is loaded whole).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gateway.ledger.files import reading
from gateway.ledger.rows import RequestPath, Status
from policies.pricing import Rates

Dimension = Literal["day", "tenant", "key", "model"]
COLUMN_BY_DIMENSION: dict[Dimension, str] = {
    "day": "day",
    "tenant": "tenant",
    "key": "key_id",
    "model": "model",
}
PAGE_ROWS = 1000


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


class RequestLine(Struct, frozen=True):
    """One request as `kagari usage --requests --json` prints it; open and failed ones bill 0."""

    request_id: str
    tenant: str
    model: str
    status: Status
    path: RequestPath
    node: str | None
    prefill_node: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charge_nano_usd: int
    rates: Rates


def usage_by(
    path: Path,
    dimensions: Sequence[Dimension] = ("day", "key", "model"),
    *,
    since_day: str = "",
    until_day: str = "9999-12-31",
) -> list[UsageLine]:
    """Rollups summed over what is not in `dimensions`; no dimension gives one line, the total.

    Days are inclusive, as YYYY-MM-DD. Raises LedgerError when there is no ledger.
    """
    names = [
        name if dimension in dimensions else "NULL"
        for dimension, name in COLUMN_BY_DIMENSION.items()
    ]
    sums = ["requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens"]
    sums += ["charge_nano_usd", "saved_nano_usd"]
    columns = ", ".join([*names, *(f"coalesce(sum({name}), 0)" for name in sums)])
    groups = ", ".join(COLUMN_BY_DIMENSION[dimension] for dimension in dimensions)
    order = f"GROUP BY {groups} ORDER BY {groups}" if groups else ""
    with reading(path) as connection:
        rows = connection.execute(
            f"SELECT {columns} FROM rollups WHERE day BETWEEN ? AND ? {order}",
            (since_day, until_day),
        )
        return [UsageLine(*row) for row in rows]


def requests(path: Path, *, after: int = 0) -> Iterator[RequestLine]:
    """Every row in the order of opening, those after row number `after`; raises LedgerError."""
    with reading(path) as connection:
        while page := connection.execute(
            "SELECT sequence, request_id, tenant, model, status, path, node, prefill_node,"
            " prompt_tokens, cached_tokens, completion_tokens, charge_nano_usd,"
            " rate_input, rate_cached, rate_output"
            " FROM requests WHERE sequence > ? ORDER BY sequence LIMIT ?",
            (after, PAGE_ROWS),
        ).fetchall():
            for row in page:
                yield RequestLine(*(*row[1:-3], Rates(*row[-3:])))
            after = page[-1][0]
