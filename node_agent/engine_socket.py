"""The agent's end of the socketpair with one engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from engine.framing import FrameError, FrameReader
from node_agent.outbox import EngineOutbox

WRITE_HIGH_BYTES = 256 << 10


class EngineSocket(asyncio.Protocol):
    """Whole frames in; frames out of an outbox as fast as the engine reads them.

    on_frame must not raise. `closed` is done when the engine is gone, with the reason.
    """

    def __init__(self, outbox: EngineOutbox, on_frame: Callable[[int, bytes], None]) -> None:
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._outbox = outbox
        self._on_frame = on_frame
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's, only the same in use.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self.pump()

    def data_received(self, data: bytes) -> None:
        try:
            for channel, message in self._frames.feed(data):
                self._on_frame(channel, message)
        except FrameError as error:
            self._end(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"socket closed: {error}" if error else "socket closed")

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.pump()

    def pump(self) -> None:
        """Write what waits, until the engine's buffer is full."""
        if self._transport is None:
            return
        while not self._is_paused and not self.closed.done():
            data = self._outbox.pop()
            if data is None:
                return
            self._transport.write(data)

    def close(self) -> None:
        self._end("closed by the agent")

    def _end(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        if self._transport is not None:
            self._transport.abort()
