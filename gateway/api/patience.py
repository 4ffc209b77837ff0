"""One timer for all the waits of a stream, so that a bounded wait costs an assignment.

`asyncio.timeout` sets and cancels a timer of its own around each wait: 4 µs, twice a token, which
was half of all that a token cost. Here the timer is set once and looks again when it rings early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

CLOCK_S = 0.002  # a loop's timer may ring a millisecond early


class Patience:
    """Belongs to the task that made it; one wait at a time. Close it when the task is done."""

    __slots__ = ("_cancelling", "_due", "_has_rung", "_loop", "_rings_at", "_task", "_timer")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "made by the task that waits"
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] = task
        self._cancelling = task.cancelling()
        self._due: float | None = None  # None: nobody waits
        self._rings_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._has_rung = False

    async def wait(self, work: Awaitable[T], seconds: float) -> T:
        """What work returns. Raises TimeoutError after seconds; work is cancelled then."""
        due = self._due = self._loop.time() + seconds
        if self._timer is None or due < self._rings_at:
            self._set(due)
        try:
            return await work
        except asyncio.CancelledError:
            if self._has_rung:
                self._has_rung = False
                if self._task.uncancel() <= self._cancelling:  # else somebody else means it
                    raise TimeoutError from None
            raise
        finally:
            self._due = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, at: float) -> None:
        self.close()
        self._rings_at = at
        self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        due = self._due
        if due is None:
            return  # the next wait sets it again
        if self._loop.time() < due - CLOCK_S:
            self._set(due)
            return
        self._due = None
        self._has_rung = True
        self._task.cancel()
