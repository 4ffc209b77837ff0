"""Ends an answer whose other side stands still: one timer an answer, not one a chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class StallGuard:
    """`async with StallGuard(limit_s) as guard:` then `await guard.send(exchange.write(data))`.

    The block raises TimeoutError when one send took limit_s. A timer for each chunk cost so much
    that 256 × 200 tokens/s filled a core: chunk delay p50 18 ms, with this 7 ms
    (benchmarks.gateway --quick --only "streaming 256").
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._since: float | None = None  # when the send under way began
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> StallGuard:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, at)

    async def send(self, sending: Awaitable[T]) -> T:
        """Or any other wait for the other side, such as for a foreign server's next piece."""
        self._since = self._loop.time()
        try:
            return await sending
        finally:
            self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._limit_s
        if now >= due:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_at(due, self._look)
