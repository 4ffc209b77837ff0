"""The rows of requests: all of them in order, a page newest first, or one by its id.

Readers take short transactions only, because an open one keeps the write-ahead log from being
truncated; so rows are looked through in windows, each a query of its own that an index bounds.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from gateway.ledger.files import reading
from gateway.ledger.rows import Attempt, Quality, RequestPath, Status
from policies.pricing import Rates

PAGE_ROWS = 1000  # of all rows in order
WINDOW_ROWS = 20_000  # rows that one query may have to look at
PATIENCE_S = 0.5  # after that a page comes short, and says where to go on
CLOCK_STEP_S = 3600.0  # a clock that was set back less than that hides no row from `since`


class RequestLine(Struct, frozen=True):
    """One request as `kagari usage --requests --json` prints it; open and failed ones bill 0.

    tiers: cached_tokens by the tier that held them; empty where nobody told.
    """

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
    tiers: dict[str, int] = {}


class RequestRow(Struct, frozen=True):
    """One row as an operator sees it. Token counts are the billed ones; times are wall seconds.

    session: the salted digest of the client's session, in hex; None when it gave no sign of one.
    """

    request_id: str
    tenant: str
    key_id: str
    model: str
    status: Status
    quality: Quality | None
    path: RequestPath
    node: str | None
    prefill_node: str | None
    admitted_prompt_tokens: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charge_nano_usd: int
    saved_nano_usd: int
    rates: Rates
    price_version: str
    policy_version: str
    started_at: float
    ended_at: float | None
    ttft_s: float | None
    session: str | None


class RequestDetail(RequestRow, frozen=True):
    """A row with the tiers that its cached tokens came from, and the tries before its answer."""

    tiers: dict[str, int]
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows: None is any; since <= started_at < until, in wall seconds."""

    tenant: str | None = None
    key_id: str | None = None
    model: str | None = None
    status: Status | None = None
    since: float | None = None
    until: float | None = None

    def matches(self, row: RequestRow) -> bool:
        return (
            self.tenant in (None, row.tenant)
            and self.key_id in (None, row.key_id)
            and self.model in (None, row.model)
            and self.status in (None, row.status)
            and (self.since is None or row.started_at >= self.since)
            and (self.until is None or row.started_at < self.until)
        )


@dataclass(frozen=True, slots=True)
class NewestRequests:
    """next: ask again with it as `before`, also when this page is short; None is the end."""

    rows: list[RequestRow]
    next: int | None


Line = TypeVar("Line", bound=Struct)
COLUMN_BY_FIELD = {"session": "session_digest"}
READ_BY_FIELD: Mapping[str, Callable[[Any], Any]] = {
    "session": lambda digest: None if digest is None else digest.hex(),
    "tiers": msgspec.json.Decoder(dict[str, int]).decode,
    "attempts": msgspec.json.Decoder(tuple[Attempt, ...]).decode,
}


def _columns(line: type[Struct]) -> str:
    """The sequence, the fields of a line in their order, and its three rates."""
    names = [COLUMN_BY_FIELD.get(name, name) for name in line.__struct_fields__ if name != "rates"]
    return ", ".join(["sequence", *names, "rate_input", "rate_cached", "rate_output"])


def _read(line: type[Line], row: tuple[Any, ...]) -> Line:
    names = [name for name in line.__struct_fields__ if name != "rates"]
    fields = {
        name: READ_BY_FIELD[name](value) if name in READ_BY_FIELD else value
        for name, value in zip(names, row[1:-3], strict=True)
    }
    return line(**fields, rates=Rates(*row[-3:]))


def requests(path: Path, *, after: int = 0) -> Iterator[RequestLine]:
    """Every row in the order of opening, those after row number `after`; raises LedgerError."""
    with reading(path) as connection:
        while page := connection.execute(
            f"SELECT {_columns(RequestLine)} FROM requests"
            " WHERE sequence > ? ORDER BY sequence LIMIT ?",
            (after, PAGE_ROWS),
        ).fetchall():
            for row in page:
                yield _read(RequestLine, row)
            after = page[-1][0]


def find_request(connection: sqlite3.Connection, request_id: str) -> RequestDetail | None:
    """One row by its id."""
    row = connection.execute(
        f"SELECT {_columns(RequestDetail)} FROM requests WHERE request_id = ?", (request_id,)
    ).fetchone()
    return None if row is None else _read(RequestDetail, row)


def newest_requests(
    connection: sqlite3.Connection,
    wanted: Wanted,
    *,
    limit: int,
    before: int | None = None,
    patience_s: float = PATIENCE_S,
) -> NewestRequests:
    """Rows in falling order of opening, so that a row opened later never moves a page.

    A page that holds fewer than limit rows is not the last one unless its next is None.
    """
    rows: list[RequestRow] = []
    give_up_at = time.monotonic() + patience_s
    low, high = _bounds(connection, wanted)
    high = high if before is None else min(high, before)
    sql, values = selecting(wanted)
    while low < high and len(rows) < limit:
        floor = max(low, high - WINDOW_ROWS)
        found = connection.execute(sql, (*values, floor, high, limit - len(rows))).fetchall()
        rows += [_read(RequestRow, row) for row in found]
        high = found[-1][0] if len(rows) == limit else floor
        if time.monotonic() > give_up_at:
            break
    return NewestRequests(rows, high if low < high else None)


def selecting(wanted: Wanted) -> tuple[str, tuple[str | float, ...]]:
    """The query of one window and its first values; floor, ceiling and limit come last."""
    terms: dict[str, str | float | None] = {
        "tenant = ?": wanted.tenant,
        "key_id = ?": wanted.key_id,
        "model = ?": wanted.model,
        "status = ?": wanted.status,
        "started_at >= ?": wanted.since,
        "started_at < ?": wanted.until,
    }
    used = {term: value for term, value in terms.items() if value is not None}
    index, *more = _index(wanted)
    where = " AND ".join([*used, *more, "sequence >= ?", "sequence < ?"])
    return (
        f"SELECT {_columns(RequestRow)} FROM requests {index} WHERE {where}"
        " ORDER BY sequence DESC LIMIT ?",
        tuple(used.values()),
    )


def _index(wanted: Wanted) -> tuple[str, ...]:
    """The index of the filter that keeps the fewest rows, and the terms that let it be used."""
    if wanted.status == "open":
        return (
            "INDEXED BY open_requests",
            "status = 'open'",
            "boot = (SELECT max(boot) FROM boots)",  # those of others are settled at boot
        )
    if wanted.status not in (None, "ok"):
        return "INDEXED BY requests_by_ending", "status NOT IN ('open', 'ok')"
    if wanted.key_id is not None:
        return ("INDEXED BY requests_by_key",)
    if wanted.model is not None:
        return ("INDEXED BY requests_by_model",)
    if wanted.tenant is not None:
        return ("INDEXED BY requests_by_tenant",)
    return ("NOT INDEXED",)  # the table itself, by its sequence


def _bounds(connection: sqlite3.Connection, wanted: Wanted) -> tuple[int, int]:
    """The sequences [low, high) that can hold rows of the wanted time."""
    first, last = connection.execute(
        "SELECT (SELECT min(sequence) FROM requests), (SELECT max(sequence) FROM requests)"
    ).fetchone()
    if first is None:
        return 0, 0
    low, high = first, last + 1
    if wanted.since is not None:
        low = _first_since(connection, wanted.since - CLOCK_STEP_S, first, last + 1)
    if wanted.until is not None:
        high = _first_since(connection, wanted.until + CLOCK_STEP_S, first, last + 1)
    return low, high


def _first_since(connection: sqlite3.Connection, moment: float, low: int, high: int) -> int:
    """By halving: sequences rise with the time of opening, but for what a clock was set back."""
    while low < high:
        middle = (low + high) // 2
        sequence, started_at = connection.execute(
            "SELECT sequence, started_at FROM requests WHERE sequence >= ?"
            " ORDER BY sequence LIMIT 1",
            (middle,),
        ).fetchone()
        if started_at >= moment:
            high = middle
        else:
            low = sequence + 1
    return low
