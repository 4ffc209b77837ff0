"""The HTTP server: the one module that knows Hypercorn, so that another can take its place.

What Hypercorn 0.18 does by itself and what is added here:
- it listens on sockets that we open, so that port 0 has a number before it serves, the kernel keeps
  a bounded number of bytes for a slow reader, and a reader that never reads is cut in the end;
- HTTP/1.1 headers over 16 KiB get 431, HTTP/2 header lists over 64 KiB end the connection;
- over HTTP/2 one odd request ends the whole connection and every other stream on it: `_Http2`
  refuses late pieces of a body, paths that are not ASCII and CONNECT alone;
- an HTTP/2 stream whose reader gives no window is buffered without a bound: `_Buffer` holds the
  writer back;
- a TCP half-close counts as leaving; a second pipelined request hides the leaving until the next
  write; both are Hypercorn's and hold.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h2.errors
import h2.events
import h2.exceptions
import hypercorn.protocol
import hypercorn.protocol.h2
import hyperframe.exceptions
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from hypercorn.events import Closed
from hypercorn.protocol.h2 import (
    BUFFER_HIGH_WATER,
    BUFFER_LOW_WATER,
    BufferCompleteError,
    H2Protocol,
    StreamBuffer,
)
from starlette.types import ASGIApp

from gateway.config import ServerConfig

H1_HEADER_BYTES = 16 << 10
H2_HEADER_BYTES = 64 << 10
READER_GONE_MS = 120_000  # a full window for so long: the kernel gives the connection up


@dataclass(frozen=True, slots=True)
class Listener:
    """An open, listening socket; host and port are the real ones."""

    socket: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def listen(host: str, port: int, config: ServerConfig) -> Listener:
    """Raises OSError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer_bytes)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, READER_GONE_MS)
        opened.bind((host, port))
        opened.listen(config.backlog)
    except OSError:
        opened.close()
        raise
    return Listener(opened, host, opened.getsockname()[1])


async def serve(
    app: ASGIApp,
    listener: Listener,
    config: ServerConfig,
    *,
    stop: Callable[[], Awaitable[object]],
) -> None:
    """Serve until stop() returns, then finish what runs for at most drain_s."""
    settings = Config()
    settings.bind = [f"fd://{listener.socket.detach()}"]
    settings.errorlog = None  # the application logs its own failures, without headers or bodies
    settings.accesslog = None
    settings.include_server_header = False
    settings.backlog = config.backlog
    settings.graceful_timeout = config.drain_s
    settings.keep_alive_timeout = config.keep_alive_s
    settings.keep_alive_max_requests = config.keep_alive_max_requests
    settings.h2_max_concurrent_streams = config.max_streams_per_connection
    settings.h2_max_header_list_size = H2_HEADER_BYTES
    settings.h11_max_incomplete_size = H1_HEADER_BYTES
    await hypercorn_serve(app, settings, shutdown_trigger=stop, mode="asgi")  # type: ignore[arg-type]


class _Http2(H2Protocol):
    """Hypercorn's HTTP/2, in which what is wrong with one stream stays with that stream."""

    async def initiate(
        self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None
    ) -> None:
        try:
            await super().initiate(headers, settings)
        except (h2.exceptions.ProtocolError, hyperframe.exceptions.HyperframeError, ValueError):
            await self.send(Closed())  # an upgrade from HTTP/1.1 with settings that are none

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                self._refuse_late(event)
                await self._flush()
            elif isinstance(event, h2.events.RequestReceived) and not _is_servable(event):
                assert event.stream_id is not None
                self.connection.reset_stream(
                    event.stream_id, h2.errors.ErrorCodes.HTTP_1_1_REQUIRED
                )
                await self._flush()
            else:
                await super()._handle_events([event])

    def _refuse_late(self, event: h2.events.DataReceived) -> None:
        """Give the bytes back to the connection's window, and tell the sender to stop."""
        assert event.stream_id is not None
        try:
            self.connection.acknowledge_received_data(
                event.flow_controlled_length or 0, event.stream_id
            )
            self.connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.NO_ERROR)
        except h2.exceptions.ProtocolError:
            return  # the stream is closed on both sides already


def _is_servable(event: h2.events.RequestReceived) -> bool:
    """Hypercorn decodes method and path as ASCII and takes CONNECT for a WebSocket."""
    pseudo = {name: value for name, value in event.headers or () if name[:1] in (b":", ":")}
    method, path = pseudo.get(b":method"), pseudo.get(b":path")
    return (
        isinstance(method, bytes)
        and isinstance(path, bytes)
        and method.isascii()
        and path.isascii()
        and method.upper() != b"CONNECT"
    )


class _Buffer(StreamBuffer):
    """Hypercorn's buffer of one HTTP/2 stream, with a writer that waits while it is full.

    Hypercorn lets the writer go on after every look at the buffer, also when the reader's window
    was closed and nothing could be taken out.
    """

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


# Hypercorn looks both classes up in these modules for every connection and stream.
setattr(hypercorn.protocol, "H2Protocol", _Http2)  # noqa: B010  # an assignment is a type error
setattr(hypercorn.protocol.h2, "StreamBuffer", _Buffer)  # noqa: B010
