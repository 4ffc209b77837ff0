"""A block's time limit: asyncio.timeout's meaning for an eighth of its 5 µs, thrice a request."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class TimeLimit:
    """`with TimeLimit(seconds) as limit:` raises TimeoutError when the block took longer.

    A cancellation from elsewhere stays one, also when it comes together with the limit.
    """

    __slots__ = ("_cancelling", "_is_over", "_loop", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_over = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a limit belongs to a task"
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._seconds, self._end)
        return self

    def move(self, deadline: float) -> None:
        """End at another moment, on the loop's clock."""
        if not self._is_over:
            self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._end)

    def _end(self) -> None:
        self._is_over = True
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if (
            self._is_over
            and self._task.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error
