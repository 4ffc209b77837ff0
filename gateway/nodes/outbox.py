"""What waits to be sent on one link: urgent first, bounded in bytes, drained by one writer."""

from __future__ import annotations

import asyncio
from collections import deque

OUTBOX_BYTES = 32 << 20


class Outbox:
    """Two queues and one waiter; nothing here awaits except `wait`.

    Submits are refused once the bound is reached; urgent frames (aborts, acknowledgements) are
    small and few (at most one per lane or batch), so they are always taken.
    """

    def __init__(self, limit_bytes: int = OUTBOX_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.closing: tuple[int, str] | None = None  # close code and reason
        self._urgent: deque[bytes] = deque()
        self._submit_by_lane: dict[int, bytes] = {}  # in order of arrival
        self._waiter: asyncio.Future[None] | None = None

    def has_room(self, frame_bytes: int = 0) -> bool:
        return self.size_bytes + frame_bytes <= self.limit_bytes

    @property
    def has_submits(self) -> bool:
        return bool(self._submit_by_lane)

    def send_urgent(self, frame: bytes) -> None:
        self._urgent.append(frame)
        self.size_bytes += len(frame)
        self._wake()

    def send_submit(self, lane: int, frame: bytes) -> None:
        """lane: the first of its lanes."""
        self._submit_by_lane[lane] = frame
        self.size_bytes += len(frame)
        self._wake()

    def withdraw(self, lane: int) -> bool:
        """Take back a Submit that was not sent: an Abort would overtake it and be lost."""
        frame = self._submit_by_lane.pop(lane, None)
        if frame is None:
            return False
        self.size_bytes -= len(frame)
        return True

    def close(self, code: int, reason: str) -> None:
        """End the link after what is urgent; waiting Submits are dropped."""
        if self.closing is None:
            self.closing = (code, reason)
        for lane in list(self._submit_by_lane):
            self.withdraw(lane)
        self._wake()

    def pop(self) -> bytes | None:
        """The next frame to send, or None."""
        if self._urgent:
            frame = self._urgent.popleft()
        elif self._submit_by_lane:
            lane = next(iter(self._submit_by_lane))
            frame = self._submit_by_lane.pop(lane)
        else:
            return None
        self.size_bytes -= len(frame)
        return frame

    async def wait(self) -> None:
        """Until there is something to send or the link is to be closed; one caller."""
        while not self._urgent and not self._submit_by_lane and self.closing is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
