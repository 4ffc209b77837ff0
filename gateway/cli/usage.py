"""`kagari usage` and `kagari ledger verify`: the book under home, gateway running or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from gateway.cli.home import home_folder
from gateway.cli.problem import FAILED, Problem
from gateway.ledger.files import LEDGER_NAME, LedgerError, reading
from gateway.ledger.requests import requests
from gateway.ledger.usage import UsageLine, UsageReport, usage_report
from gateway.ledger.verify import Verification, verify

NANO_PER_USD = 1_000_000_000

By = Literal["day", "key", "model"]
Read = TypeVar("Read")


def read(home: Path | None, reader: Callable[[Path], Read]) -> Read:
    """What the reader makes of the ledger's file; LedgerError becomes a Problem."""
    path = home_folder(home) / LEDGER_NAME
    try:
        return reader(path)
    except LedgerError as error:
        raise Problem(
            "ledger",
            found=str(error),
            allowed="the ledger of a gateway that has run with this home",
            remedy="pass --home DIR or set KAGARI_HOME",
            exit_code=FAILED,
        ) from error


def show_usage(by: By, *, home: Path | None, as_json: bool) -> None:
    report = read(home, lambda path: summed(path, by))
    if as_json:
        answer = {
            "by": by,
            "rows": [row(line, line_name(line, by)) for line in report.lines],
            "total": row(report.total, None),
        }
        write_json(answer)
        return
    print_usage(report.lines, report.total, by)


def summed(path: Path, by: By) -> UsageReport:
    with reading(path) as connection:
        return usage_report(connection, (by,))


def row(line: UsageLine, name: str | None) -> dict[str, object]:
    return {
        "name": name,
        "requests": line.requests,
        "failed": line.failed,
        "prompt_tokens": line.prompt_tokens,
        "cached_tokens": line.cached_tokens,
        "completion_tokens": line.completion_tokens,
        "cached_share": round(line.cached_share, 4),
        "charge_nano_usd": line.charge_nano_usd,
        "saved_nano_usd": line.saved_nano_usd,
    }


def line_name(line: UsageLine, by: By) -> str:
    return {"day": line.day, "key": line.key_id, "model": line.model}[by] or "-"


def print_usage(lines: Sequence[UsageLine], total: UsageLine, by: By) -> None:
    from gateway.cli.tables import plain_table, print_table

    table = plain_table(show_footer=True)
    table.add_column(by, footer="total")
    figures: list[tuple[str, Callable[[UsageLine], str]]] = [
        ("requests", lambda line: str(line.requests)),
        ("prompt", lambda line: f"{line.prompt_tokens:,}"),
        ("cached", lambda line: f"{line.cached_tokens:,}"),
        ("share", lambda line: f"{line.cached_share:.0%}"),
        ("completion", lambda line: f"{line.completion_tokens:,}"),
        ("cost USD", lambda line: usd(line.charge_nano_usd)),
        ("saved USD", lambda line: usd(line.saved_nano_usd)),
    ]
    for heading, figure in figures:
        table.add_column(heading, footer=figure(total), justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line_name(line, by), *(figure(line) for _, figure in figures))
    print_table(table)


def usd(nano: int) -> str:
    """Exact, as a decimal number: no float touches money."""
    whole, rest = divmod(nano, NANO_PER_USD)
    return f"{whole}.{rest:09d}"


def show_requests(*, home: Path | None, as_json: bool) -> None:
    """All rows, oldest first; as JSON one array, written row by row: a ledger may be long."""
    if as_json:
        read(home, write_requests)
        return
    read(home, print_requests)


def write_requests(path: Path) -> None:
    encode = msgspec.json.encode
    separator = "["
    for line in requests(path):
        sys.stdout.write(separator + encode(line).decode())
        separator = ",\n "
    sys.stdout.write("[]\n" if separator == "[" else "]\n")


def print_requests(path: Path) -> None:
    from gateway.cli.tables import plain_table, print_table

    table = plain_table(
        *("request", "model", "status", "node"), *("prompt", "cached", "from", "completion", "USD")
    )
    for line in requests(path):
        table.add_row(
            line.request_id,
            line.model,
            line.status,
            line.node or "-",
            str(line.prompt_tokens),
            str(line.cached_tokens),
            "+".join(line.tiers) or "-",
            str(line.completion_tokens),
            usd(line.charge_nano_usd),
        )
    print_table(table)


def verify_ledger(*, home: Path | None, as_json: bool) -> None:
    """Exit 1 when a row or a sum does not balance."""
    result = read(home, verify)
    if as_json:
        write_json({"ok": result.problem_count == 0, **msgspec.to_builtins(result)})
    else:
        print_verification(result)
    if result.exit_status:
        raise SystemExit(result.exit_status)


def print_verification(result: Verification) -> None:
    sys.stdout.write(
        f"{result.rows} rows, {result.open_rows} open; charged {usd(result.charge_nano_usd)} USD, "
        f"saved {usd(result.saved_nano_usd)} USD\n"
    )
    for problem in result.problems:
        sys.stdout.write(f"  {problem}\n")
    told = len(result.problems)
    if result.problem_count > told:
        sys.stdout.write(f"  and {result.problem_count - told} more\n")
    sys.stdout.write("the book balances\n" if not result.problem_count else "it does not balance\n")


def write_json(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
