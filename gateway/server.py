"""The HTTP server: the one module that knows Hypercorn, so that another can take its place.

What Hypercorn 0.18 does by itself and what is added here:
- it listens on sockets that we open, so that port 0 has a number before it serves, the kernel keeps
  a bounded number of bytes for a slow reader, and a reader that never reads is cut in the end;
- HTTP/1.1 headers over 16 KiB and what is no HTTP get a bare status, an unknown transfer encoding
  even a 501: `_Http1` says why in our form;
  HTTP/2 header lists over 64 KiB end the connection;
- over HTTP/2 one odd request ends the whole connection and every other stream on it: `_Http2`
  refuses late pieces of a body, paths that are not ASCII and CONNECT alone;
- an HTTP/2 stream whose reader gives no window is buffered without a bound: `_Buffer` holds the
  writer back;
- a request costs two tasks for the idle time of its connection and three writes for its answer, and
  a connection that its client closed while idle stays open for the whole idle time: `_Connection`
  and `_Http1`;
- a TCP half-close counts as leaving; a second pipelined request hides the leaving until the next
  write; both are Hypercorn's and hold.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import h2.errors
import h2.events
import h2.exceptions
import h11
import hypercorn.asyncio.run
import hypercorn.protocol
import hypercorn.protocol.h2
import hyperframe.exceptions
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response, StreamClosed
from hypercorn.protocol.h2 import (
    BUFFER_HIGH_WATER,
    BUFFER_LOW_WATER,
    BufferCompleteError,
    H2Protocol,
    StreamBuffer,
)
from hypercorn.protocol.h11 import H11Protocol
from starlette.types import ASGIApp

from gateway.api.exchange import new_request_id
from gateway.config import ServerConfig
from gateway.errors import GatewayError

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
    settings = _Settings()
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


class _Settings(Config):
    """Hypercorn's, whose date header is made once a second and not once an answer."""

    _headers: tuple[int, list[tuple[bytes, bytes]]] = (0, [])

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        second = int(time.time())
        if self._headers[0] != second:
            self._headers = (second, super().response_headers(protocol))
        return self._headers[1]


class _Connection(TCPServer):
    """Hypercorn's connection with one task for its idle time, from its first byte to its last."""

    _idle_until: float | None  # on the loop's clock; None while a request runs

    async def run(self) -> None:
        self._idle_until = self.loop.time() + self.config.keep_alive_timeout
        await super().run()

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, Updated):
            await super().protocol_send(event)
        elif not event.idle:
            self._idle_until = None
        else:
            self._idle_until = self.loop.time() + self.config.keep_alive_timeout
            if self.context.terminated.is_set():  # its last request: the connection ends now
                await self.idle_task.restart(self._task_group, self._idle_timeout)

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()  # the client closed; what runs for it learns that by itself

    async def _idle_timeout(self) -> None:
        while not self.context.terminated.is_set():
            now = self.loop.time()
            until = self._idle_until
            if until is not None and until <= now:
                break
            wait_s = self.config.keep_alive_timeout if until is None else until - now
            try:
                await asyncio.wait_for(self.context.terminated.wait(), wait_s)
            except TimeoutError:
                continue
        if self._idle_until is not None:
            await asyncio.shield(self._initiate_server_close())


class _Http1(H11Protocol):
    """Hypercorn's HTTP/1.1 with the head of an answer in one write with what comes after it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._write = self.send
        self.send = self._join
        self._head = b""
        self._is_head = False  # what is being written now

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, StreamClosed) and self._head:
            await self.send(RawData(data=b""))  # a handler that broke off after it
        self._is_head = isinstance(event, Response) and event.status_code >= 200
        try:
            await super().stream_send(event)
        finally:
            self._is_head = False

    async def _send_error_response(self, status_code: int) -> None:
        error = _refusal(status_code)
        if error is None:
            await super()._send_error_response(status_code)
            return
        request_id = new_request_id()
        body = error.body(request_id)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("x-request-id", request_id),
            *error.headers(),
        ]
        encoded = [(name.encode(), value.encode()) for name, value in headers]
        response = h11.Response(
            status_code=error.status, headers=[*encoded, *self.config.response_headers("h11")]
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            await self._send_h11_event(event)

    async def _join(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await self._write(event)
        elif self._is_head:
            self._head = event.data
        else:
            data, self._head = self._head + event.data, b""
            if data:  # the end of an answer of known length has no bytes
                await self._write(RawData(data=data))


def _refusal(status_code: int) -> GatewayError | None:
    """Of a request of which nothing can be read: no route, no key, no log line."""
    if status_code == 431:
        return GatewayError(
            "headers_too_large",
            field="headers",
            found=f"more than {H1_HEADER_BYTES} bytes",
            allowed=f"{H1_HEADER_BYTES} bytes over HTTP/1.1",
            remedy="send fewer or shorter headers",
        )
    if status_code == 400:
        return GatewayError(
            "invalid_request",
            field="request",
            found="bytes that are no HTTP request",
            allowed="well-formed HTTP/2 or HTTP/1.1",
            remedy="send it with an HTTP library",
        )
    if status_code == 501:  # h11's word for it; a request that cannot be read is no fault of ours
        return GatewayError(
            "unsupported_encoding",
            field="transfer-encoding",
            found="another coding than chunked",
            allowed="chunked, or a body of known length",
            remedy="send the body unencoded",
        )
    return None


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


# Hypercorn looks these classes up in these modules for every connection and stream.
setattr(hypercorn.asyncio.run, "TCPServer", _Connection)  # noqa: B010  # as below
setattr(hypercorn.protocol, "H11Protocol", _Http1)  # noqa: B010
setattr(hypercorn.protocol, "H2Protocol", _Http2)  # noqa: B010  # an assignment is a type error
setattr(hypercorn.protocol.h2, "StreamBuffer", _Buffer)  # noqa: B010
