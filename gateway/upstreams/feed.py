"""What a run has read of its upstream and its client has not: bounded, one writer, one reader."""

from __future__ import annotations

import asyncio
from collections import deque

from gateway.errors import GatewayError
from gateway.nodes.streams import Waiter
from gateway.upstreams.events import Event

MAX_HELD_BYTES = 1 << 20  # then the upstream is not read until the client has taken some


class Feed:
    """is_over: nothing more comes, after what is still held; error says why if it should have."""

    def __init__(self) -> None:
        self.whole: bytes | None = None  # of an answer that is not streamed
        self.is_over = False
        self.has_begun = False  # something of the answer came
        self.error: GatewayError | None = None
        self._events: deque[Event] = deque()
        self._held_bytes = 0
        self._room = asyncio.Event()
        self._waiter = Waiter()

    async def put(self, event: Event) -> None:
        self.has_begun = True
        self._events.append(event)
        self._held_bytes += len(event.data)
        self._waiter.wake()
        while self._held_bytes > MAX_HELD_BYTES:
            self._room.clear()
            await self._room.wait()

    def end(self, error: GatewayError | None = None) -> None:
        if not self.is_over:
            self.is_over, self.error = True, error
            self._waiter.wake()

    def take(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        self._held_bytes = 0
        self._room.set()
        return events

    @property
    def is_empty(self) -> bool:
        return not self._events

    async def wait(self, timeout_s: float) -> None:
        """Until something is new. Call it with nothing left to take."""
        if self.is_empty and not self.is_over:
            await self._waiter.wait(timeout_s)
