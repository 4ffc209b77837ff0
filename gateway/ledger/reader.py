"""Reads of the ledger's file while a gateway serves: off the event loop, never by the writer.

Each read has a connection of its own that ends with it: one that stayed open would keep the
write-ahead log from being truncated. Waiting, running and the number of both are bounded.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from gateway.ledger.files import LedgerError, reading

T = TypeVar("T")

NUM_THREADS = 2
MAX_WAITING = 256
DEADLINE_S = 2.0
LOOK_EVERY = 10_000  # of SQLite's instructions: some 0.1 ms


class LedgerUnreadable(Exception):
    """Not now: too many wait, it took too long, or the file cannot be read. Says which."""


class LedgerReader:
    """Use as an async context manager on the loop that reads."""

    def __init__(self, path: Path, *, deadline_s: float = DEADLINE_S) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ledger reader")
        self.waiting = 0

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """query's result from a read-only connection. Raises LedgerUnreadable."""
        if self.waiting >= MAX_WAITING:
            raise LedgerUnreadable(f"{self.waiting} others wait for it")
        deadline = time.monotonic() + self._deadline_s
        loop = asyncio.get_running_loop()
        self.waiting += 1
        try:
            async with asyncio.timeout(self._deadline_s):
                return await loop.run_in_executor(self._threads, self._read, query, deadline)
        except (TimeoutError, LedgerError) as error:
            raise LedgerUnreadable(str(error) or f"it took {self._deadline_s:g} s") from error
        finally:
            self.waiting -= 1

    def _read(self, query: Callable[[sqlite3.Connection], T], deadline: float) -> T:
        with reading(self._path) as connection:
            left_s = deadline - time.monotonic()
            connection.execute(f"PRAGMA busy_timeout = {max(1, round(left_s * 1000))}")
            connection.set_progress_handler(lambda: time.monotonic() > deadline, LOOK_EVERY)
            return query(connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
