"""Reading the ledger while it is written: off the event loop, a few at a time, each with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

Read = TypeVar("Read", covariant=True)
NUM_THREADS = 2
DEADLINE_S = 2.0


class Query(Protocol[Read]):
    def __call__(self, path: Path, /, *, deadline_s: float) -> Read: ...


class LedgerReader:
    """Every query opens a connection of its own and closes it: none outlives its answer.

    A caller that leaves takes its query out of the line; one that runs already ends by itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ledger reader")

    async def read(self, query: Query[Read]) -> Read:
        """Raises what the query does: LedgerError, or ReadTooLong after DEADLINE_S."""
        return await self.work(lambda: query(self._path, deadline_s=DEADLINE_S))

    async def work(self, work: Callable[[], Read]) -> Read:
        """Anything else that waits for a disk, in the same threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
