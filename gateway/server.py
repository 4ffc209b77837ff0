"""The HTTP server: the one module that knows Hypercorn, so that another can take its place.

What Hypercorn 0.18 does by itself and what is added here:
- it listens on sockets that we open, so that port 0 has a number before it serves, the kernel keeps
  a bounded number of bytes for a slow reader, and a reader that never reads is cut in the end;
- HTTP/1.1 headers over 16 KiB get 431, HTTP/2 header lists over 64 KiB end the connection;
- a piece of a body for an HTTP/2 stream that was answered early ends the whole connection with a
  KeyError: `_Http2` refuses that piece alone;
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
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from hypercorn.protocol.h2 import H2Protocol
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
    """Hypercorn's HTTP/2 with one gap closed: late pieces of a body whose answer is complete."""

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                self._refuse_late(event)
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


# The class is looked up in this module for every connection (ProtocolWrapper).
setattr(hypercorn.protocol, "H2Protocol", _Http2)  # noqa: B010  # an assignment is a type error
