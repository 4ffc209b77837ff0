"""The ledger's one writer: opens in small batches, settlements in durable groups, nothing lost.

A row is open on disk before the first byte goes to its client; it settles exactly once, by one
UPDATE guarded by `status = 'open'`. When the disk refuses, opens are refused with it (503) and
settlements wait in memory, no more of them than rows are open.

    open(row) -> _opens ---- at most one batch per 5 ms, synchronous=NORMAL --.
                                                                              +-> one connection
    settle(end) -> _ended -- at most one group per 25 ms, synchronous=FULL ---'
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import aiosqlite
import structlog

from gateway.ledger import schema
from gateway.ledger.billing import Value, check_row, open_values, settle_values
from gateway.ledger.files import LedgerError, take_writer_lock, wal_bytes
from gateway.ledger.rows import Ending, LedgerFull, LedgerHealth, OpenRow, Settlement
from policies.contract.wire import FinishReason, UsageRecord
from policies.residency import slower_tokens, tokens_by_tier

OPEN_EVERY_S = 0.005
SETTLE_EVERY_S = 0.025
OPEN_DEADLINE_S = 5.0
DRAIN_DEADLINE_S = 5.0
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0
GROUP_ROWS = 2048  # one transaction's most, so that no group outlasts its 100 ms
CHECKPOINT_EVERY_S = 1.0  # once idle that long; at most that often
MAX_WAL_BYTES = 64 << 20  # from here on the log is truncated without waiting to be idle
BUSY_TIMEOUT_S = 0.02  # a reader in the way of a checkpoint holds up the opens at most that long

ENDING_BY_REASON: dict[FinishReason, Ending] = {
    "stop": "ok",
    "length": "ok",
    "abort": "client_left",
    "error": "failed",
}
Connect = Callable[[Path], Awaitable[aiosqlite.Connection]]
Synchronous = Literal["NORMAL", "FULL"]
log = structlog.get_logger("kagari.ledger")


@dataclass(frozen=True, slots=True)
class _Opening:
    row: OpenRow
    committed: asyncio.Future[None]
    since: float  # monotonic seconds


async def connect_writer(path: Path) -> aiosqlite.Connection:
    """The one writer connection, in autocommit mode: transactions are written out."""
    connection = await aiosqlite.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        await connection.execute(f"PRAGMA journal_size_limit = {schema.JOURNAL_BYTES}")
    except BaseException:  # its thread would keep the process alive for ever
        await connection.close()
        raise
    return connection


class Ledger:
    """Use as an async context manager; leaving it drains what is known and closes the file.

    After open() was called, call settle() once however the request ends, even if open() was
    cancelled; a settle() whose open() was refused does nothing.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_open_rows: int = 65_536,
        max_waiting_opens: int = 4_096,
        connect: Connect = connect_writer,
    ) -> None:
        self._path = path
        self._max_open_rows = max_open_rows
        self._max_waiting_opens = max_waiting_opens
        self._connect = connect
        self._row_by_id: dict[str, OpenRow] = {}  # opened, not settled
        self._opens: dict[str, _Opening] = {}
        self._expiry: asyncio.TimerHandle | None = None  # of the oldest of _opens, or earlier
        self._ended: dict[str, tuple[float, tuple[Value, ...]]] = {}  # since when; values
        self._wake = asyncio.Event()
        self._trouble = ""
        self._retry_s = RETRY_FIRST_S
        self._retry_at = 0.0
        self._closing = False
        self._closed = True
        self._synchronous: Synchronous | None = None
        self._dirty = False  # the log holds commits that no checkpoint truncated
        self._last_write = self._last_checkpoint = 0.0

    # --- requests' side ---------------------------------------------------------------------------

    async def open(self, row: OpenRow) -> None:
        """Returns when the row is committed. Raises LedgerFull (nothing is billed), ValueError."""
        check_row(row)
        if row.request_id in self._row_by_id or row.request_id in self._ended:
            raise ValueError(f"request_id: {row.request_id} is open already; ids are ours and new")
        self._refuse_if_full()
        committed = asyncio.get_running_loop().create_future()
        self._row_by_id[row.request_id] = row
        if not self._opens:
            self._wake.set()
        self._opens[row.request_id] = _Opening(row, committed, time.monotonic())
        if self._expiry is None:  # one timer for all: one a row cost a request 5 µs
            self._expire_in(OPEN_DEADLINE_S)
        await committed

    def _expire_in(self, seconds: float) -> None:
        self._expiry = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Refuse the opens that waited too long; the oldest are the first."""
        self._expiry = None
        now = time.monotonic()
        for request_id, opening in list(self._opens.items()):
            if opening.committed.done():  # its request was cancelled and settles by itself
                continue
            left_s = opening.since + OPEN_DEADLINE_S - now
            if left_s > 0:
                self._expire_in(left_s)
                return
            # The batch may be under way, so the row may still come to exist: then it bills nothing.
            del self._opens[request_id]
            self.settle(_unserved(opening.row, time.time()))
            why = f"the ledger's disk took over {OPEN_DEADLINE_S:.0f} s"
            opening.committed.set_exception(LedgerFull(why))

    def settle(self, settlement: Settlement) -> None:
        """Never waits and never loses; on disk within 100 ms. Idempotent: the first one counts."""
        row = self._row_by_id.pop(settlement.request_id, None)
        if row is None:
            return
        if self._closed:
            raise LedgerError("the ledger is closed; settle requests before closing it")
        if not self._ended:
            self._wake.set()
        self._ended[row.request_id] = (time.monotonic(), settle_values(row, settlement))

    def settle_from_usage_record(self, record: UsageRecord, ended_at: float) -> None:
        """Settle from a record that a node resent, for a row that no request will settle itself.

        A row that has settled meanwhile, or was orphaned at boot, stays as it is.
        """
        row = self._row_by_id.get(record.request_id)
        if row is None:
            return
        self.settle(_ending(row, record, ended_at))

    def health(self) -> LedgerHealth:
        now = time.monotonic()
        oldest = next((since for since, _ in self._ended.values()), now)
        return LedgerHealth(
            "closed" if self._closed else "full" if self._trouble else "ok",
            self._trouble,
            len(self._row_by_id),
            len(self._opens),
            len(self._ended),
            now - oldest,
            wal_bytes(self._path),
        )

    def _refuse_if_full(self) -> None:
        if self._closed or self._closing:
            raise LedgerFull("the ledger is closing")
        if self._trouble and time.monotonic() < self._retry_at:
            raise LedgerFull(self._trouble)
        if len(self._opens) >= self._max_waiting_opens:
            raise LedgerFull(f"{len(self._opens)} requests wait for the ledger's disk already")
        if len(self._row_by_id) + len(self._ended) >= self._max_open_rows:
            raise LedgerFull(f"{self._max_open_rows} requests are open or unsettled already")

    # --- life -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._lock = take_writer_lock(self._path)  # these two block: nothing is served yet
        try:
            self._boot = schema.prepare(self._path, time.time())
            self._connection = await self._connect(self._path)
        except BaseException:
            os.close(self._lock)
            raise
        self._closed = False
        # Not in a task group: a cancelled parent must not take the writer before it has drained.
        self._writer = asyncio.create_task(self._write(), name="ledger writer")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drain, orphan what no request settled, close; raises LedgerError if the disk refuses."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        await asyncio.wait({self._writer}, timeout=DRAIN_DEADLINE_S + 1.0)
        self._writer.cancel()
        await asyncio.wait({self._writer}, timeout=DRAIN_DEADLINE_S)
        if self._writer.done() and not self._writer.cancelled():
            self._writer.result()  # a fault of the writer's own is not swallowed
        if self._ended:
            raise LedgerError(
                f"{len(self._ended)} settlements are not on disk ({self._trouble}); "
                "their rows become orphaned at the next start"
            )

    # --- the writer -------------------------------------------------------------------------------

    async def _write(self) -> None:
        next_open = next_settle = 0.0
        drain_by = float("inf")
        try:
            while not (self._closing and self._idle()):
                now = time.monotonic()
                if self._closing:
                    drain_by = min(drain_by, now + DRAIN_DEADLINE_S)
                    if now >= drain_by:
                        break
                if self._opens and now >= max(next_open, self._retry_at):
                    next_open = now + OPEN_EVERY_S
                    await self._write_opens()
                elif self._ended and now >= max(next_settle, self._retry_at):
                    next_settle = now + SETTLE_EVERY_S
                    await self._write_ended()
                elif self._trouble and self._idle() and now >= self._retry_at:
                    await self._transact("FULL", schema.PROBE, [(self._boot,)])
                else:
                    await self._pause(now, next_open, next_settle)
            await self._orphan_the_rest()
            await self._checkpoint()
        finally:
            self._closed = True
            if self._expiry is not None:
                self._expiry.cancel()
            for request_id, opening in self._opens.items():
                self._row_by_id.pop(request_id, None)
                if not opening.committed.done():
                    opening.committed.set_exception(LedgerFull("the ledger is closing"))
            self._opens.clear()
            await self._connection.close()
            os.close(self._lock)

    def _idle(self) -> bool:
        return not self._opens and not self._ended

    async def _pause(self, now: float, next_open: float, next_settle: float) -> None:
        """Until the next batch may go, or something comes; idle long enough, truncate the log."""
        due = [max(next_open, self._retry_at)] if self._opens else []
        due += [max(next_settle, self._retry_at)] if self._ended else []
        due += [self._retry_at] if self._trouble else []
        if self._dirty:
            is_big = wal_bytes(self._path) > MAX_WAL_BYTES
            since = (
                self._last_checkpoint if is_big else max(self._last_write, self._last_checkpoint)
            )
            due.append(since + CHECKPOINT_EVERY_S)
            if now >= due[-1]:
                await self._checkpoint()
                return
        self._wake.clear()
        try:
            async with asyncio.timeout(min(due) - now if due else None):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _write_opens(self) -> None:
        batch = list(self._opens.items())[:GROUP_ROWS]
        values = [open_values(opening.row, self._boot) for _, opening in batch]
        refusal = await self._transact("NORMAL", schema.OPEN, values)
        for request_id, opening in batch:
            committed = opening.committed
            self._opens.pop(request_id, None)
            if refusal:
                # A settlement that came first has nothing to settle either.
                self._row_by_id.pop(request_id, None)
                self._ended.pop(request_id, None)
            if committed.done():
                continue
            if refusal:
                committed.set_exception(LedgerFull(refusal))
            else:
                committed.set_result(None)

    async def _write_ended(self) -> None:
        # A row whose open is still queued waits for it.
        group = [item for item in self._ended.items() if item[0] not in self._opens][:GROUP_ROWS]
        values = [values for _, (_, values) in group]
        if not group or await self._transact("FULL", schema.SETTLE, values):
            return
        for request_id, _ in group:
            del self._ended[request_id]

    async def _orphan_the_rest(self) -> None:
        if self._row_by_id:
            log.warning("ledger_closed_over_open_rows", rows=len(self._row_by_id))
            now = time.time()
            await self._transact("FULL", schema.ORPHAN, [(now, now)])  # refused: at the next boot
            self._row_by_id.clear()

    async def _transact(
        self, synchronous: Synchronous, sql: str, values: Iterable[tuple[Value, ...]]
    ) -> str:
        """One transaction; an empty string, or why the disk refused it."""
        try:
            if synchronous != self._synchronous:
                await self._connection.execute(f"PRAGMA synchronous = {synchronous}")
                self._synchronous = synchronous
            await self._connection.execute("BEGIN IMMEDIATE")
            try:
                await self._connection.executemany(sql, values)
                await self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    await self._connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OSError) as error:
            return self._note_trouble(error)
        if self._trouble:
            log.info("ledger_writes_again")
        self._trouble, self._retry_s, self._retry_at = "", RETRY_FIRST_S, 0.0
        self._dirty = True
        self._last_write = time.monotonic()
        return ""

    def _note_trouble(self, error: Exception) -> str:
        if not self._trouble:
            log.error("ledger_refused", error=str(error), unsettled=len(self._ended))
        self._trouble = f"the ledger cannot write: {error}; free space on its disk"
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
        return self._trouble

    async def _checkpoint(self) -> None:
        """Truncate the log. A reader that is in the way makes it wait for the next time."""
        self._last_checkpoint = time.monotonic()
        try:
            cursor = await self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            answer = await cursor.fetchone()
        except (sqlite3.Error, OSError) as error:
            self._note_trouble(error)
            return
        self._dirty = answer is None or answer[0] != 0


def _unserved(row: OpenRow, now: float) -> Settlement:
    return Settlement(
        row.request_id, "failed", "exact", None, None, row.path, 0, 0, {}, (), now, None
    )


def _ending(row: OpenRow, record: UsageRecord, ended_at: float) -> Settlement:
    return Settlement(
        record.request_id, ENDING_BY_REASON[record.reason], "exact", row.node, None, row.path,
        record.usage.cached_tokens, record.usage.completion_tokens,
        tokens_by_tier(record.usage.cached_tokens, slower_tokens(record.usage)), (), ended_at, None,
    )  # fmt: skip
