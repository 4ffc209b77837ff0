"""Does the ledger balance? Every row is billed again and every rollup summed again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
from msgspec import Struct

from gateway.ledger.files import LedgerError, has_writer, reading
from gateway.ledger.schema import APPLICATION_ID, MIGRATIONS
from policies.contract.wire import Usage
from policies.pricing import Rates, charge

MAX_PROBLEMS = 100  # told; the rest is counted
decode_tiers = msgspec.json.Decoder(dict[str, int]).decode

TWICE = """
SELECT group_concat(request_id, ' and ') FROM requests
WHERE idempotency_digest IS NOT NULL AND status IN ('ok', 'client_left')
GROUP BY idempotency_digest HAVING count(*) > 1
"""
UNBALANCED = """
WITH summed AS (
    SELECT day, tenant, key_id, model, count(*) AS requests,
        sum(status IN ('failed', 'orphaned')) AS failed, sum(prompt_tokens) AS prompt_tokens,
        sum(cached_tokens) AS cached_tokens, sum(completion_tokens) AS completion_tokens,
        sum(charge_nano_usd) AS charge_nano_usd, sum(saved_nano_usd) AS saved_nano_usd
    FROM requests WHERE status <> 'open' GROUP BY day, tenant, key_id, model
)
SELECT 'rollup without such rows', day, tenant, key_id, model FROM
    (SELECT * FROM rollups EXCEPT SELECT * FROM summed)
UNION ALL
SELECT 'rows without such a rollup', day, tenant, key_id, model FROM
    (SELECT * FROM summed EXCEPT SELECT * FROM rollups)
"""


class Verification(Struct, frozen=True):
    """rows and sums as read in one transaction; problems holds the first of problem_count."""

    rows: int
    open_rows: int
    charge_nano_usd: int
    saved_nano_usd: int
    problem_count: int
    problems: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        return 1 if self.problem_count else 0


def verify(path: Path) -> Verification:
    """Reads the whole ledger, a row at a time; raises LedgerError if it is absent or no ledger."""
    with reading(path) as connection:
        connection.execute("BEGIN")
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise LedgerError(f"{path} is no ledger of ours; look under another --home")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if not 1 <= version <= len(MIGRATIONS):  # the next start migrates an older one
            raise LedgerError(f"{path} has schema {version}, this build {len(MIGRATIONS)}")
        return _verify(connection, has_writer(path), has_idempotency=version > 1)


def _verify(
    connection: sqlite3.Connection, is_written: bool, *, has_idempotency: bool
) -> Verification:
    problems: list[str] = []
    problem_count = rows = open_rows = bill = saved = 0

    def note(problem: str) -> None:
        nonlocal problem_count
        problem_count += 1
        if len(problems) < MAX_PROBLEMS:
            problems.append(problem)

    for (answer,) in connection.execute(f"PRAGMA quick_check({MAX_PROBLEMS})"):
        if answer != "ok":
            note(f"file: {answer}")
    boot = connection.execute("SELECT max(boot) FROM boots").fetchone()[0]
    for (
        request_id,
        row_boot,
        status,
        prompt,
        cached,
        completion,
        tiers,
        *figures,
    ) in connection.execute(
        "SELECT request_id, boot, status, prompt_tokens, cached_tokens, completion_tokens,"
        " tiers, rate_input, rate_cached, rate_output, charge_nano_usd, saved_nano_usd"
        " FROM requests"
    ):
        rows += 1
        rates, charged, discounted = Rates(*figures[:3]), figures[3], figures[4]
        bill, saved = bill + charged, saved + discounted
        try:
            right = charge(Usage(prompt, cached, completion), rates)
        except ValueError as error:
            note(f"{request_id}: {error}")
            continue
        if (charged, discounted) != (right.bill, right.discount):
            note(
                f"{request_id}: found charge {charged}, saved {discounted};"
                f" its tokens and rates give {right.bill}, {right.discount}"
            )
        if status not in ("ok", "client_left") and (prompt or completion):
            note(f"{request_id}: {status}, yet {prompt} + {completion} tokens are billed")
        if status in ("ok", "client_left") and not _adds_up(tiers, cached):
            note(f"{request_id}: {cached} cached tokens, but its tiers say {tiers[:80]}")
        if status == "open":
            open_rows += 1
            if row_boot != boot or not is_written:
                note(f"{request_id}: open, but its process is gone; start the gateway to settle it")
    for (request_ids,) in connection.execute(TWICE) if has_idempotency else ():
        note(f"{request_ids}: one idempotency key, billed more than once")
    for what, *group in connection.execute(UNBALANCED):
        note(f"{what}: {' / '.join(group)}")
    return Verification(rows, open_rows, bill, saved, problem_count, tuple(problems))


def _adds_up(tiers: str, cached: int) -> bool:
    """No tier at all: nobody told, as of rows that a resent usage settled."""
    try:
        told = decode_tiers(tiers)
    except msgspec.MsgspecError:
        return False
    return not told or sum(told.values()) == cached
