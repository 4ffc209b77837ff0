"""The WebSocket that nodes dial: handshake, one reader and one writer per link, the fleet's clock.

Settings are measured ones: no compression, bounded frames, pings that prove the peer's event loop
(reports prove its engine).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import msgspec
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from gateway.nodes.fleet import TICK_S, Fleet
from gateway.nodes.outbox import Outbox
from gateway.nodes.session import Session
from policies.contract import wire
from policies.contract.wire import Hello, Refused

LINK_PATH: Final = "/link/v1"
HELLO_TIMEOUT_S: Final = 5.0
REFUSED_CODE: Final = 4403  # close code (private range) after Refused; the reason begins its code
FRAMES_A_TURN: Final = 16  # then the other links and streams get the loop
MAX_REASON_BYTES: Final = 120  # RFC 6455 allows 123 in a close frame

SETTINGS: Final = {
    "compression": None,
    "max_size": wire.MAX_FRAME_BYTES,
    "max_queue": 64,
    "write_limit": 1 << 20,
    "ping_interval": 2,
    "ping_timeout": 4,
    "close_timeout": 1,
    "open_timeout": 5,
}

_logger = logging.getLogger("kagari.link")


class LinkServer:
    """Serves links for a fleet in the running event loop.

    join_token is what nodes send as `Authorization: Bearer …`.
    """

    def __init__(self, fleet: Fleet, *, join_token: str) -> None:
        if not join_token:
            raise ValueError("join_token is empty: anybody could join as a node")
        self._fleet = fleet
        self._credential = f"Bearer {join_token}".encode()

    @asynccontextmanager
    async def serve(self, host: str, port: int) -> AsyncIterator[int]:
        """Listen until the block ends; gives the port. Leaving it cuts all links."""
        async with asyncio.TaskGroup() as tasks:
            owned = [
                tasks.create_task(self._fleet.bundles.run()),
                tasks.create_task(self._tick()),
            ]
            try:
                async with serve(
                    self._on_link,
                    host,
                    port,
                    process_request=self._check,
                    server_header=None,
                    logger=_logger,
                    **SETTINGS,  # type: ignore[arg-type]
                ) as server:
                    yield next(iter(server.sockets)).getsockname()[1]
            finally:
                for task in owned:
                    task.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._fleet.tick()

    def _check(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != LINK_PATH:
            return connection.respond(HTTPStatus.NOT_FOUND, f"the link is at {LINK_PATH}\n")
        given = request.headers.get_all("Authorization")
        credential = given[0].encode("utf-8", "surrogateescape") if len(given) == 1 else b""
        if not hmac.compare_digest(credential, self._credential):
            return connection.respond(
                HTTPStatus.UNAUTHORIZED, "join token wrong or absent; give the gateway's own\n"
            )
        return None

    async def _on_link(self, socket: ServerConnection) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = _decode_hello(await socket.recv())
        except ConnectionClosed:
            return
        except TimeoutError:
            hello = Refused("hello_late", f"no hello within {HELLO_TIMEOUT_S:.0f} s")
        opened = self._fleet.attach(hello) if isinstance(hello, Hello) else hello
        if isinstance(opened, Refused):
            await _refuse(socket, opened)
            return
        writer = asyncio.create_task(_write(socket, opened.outbox))
        why = "the link was closed"
        try:
            await self._read(socket, opened)
        except ConnectionClosed as closed:
            why = f"the link broke: {closed}"
        finally:
            # First the streams, synchronously; the socket's end may take a while.
            self._fleet.detach(opened, why)
            writer.cancel()
            await asyncio.wait([writer])
            if not writer.cancelled() and (fault := writer.exception()) is not None:
                raise fault

    async def _read(self, socket: ServerConnection, session: Session) -> None:
        receive = self._fleet.receive
        frames = 0
        async for frame in socket:
            receive(session, frame)  # type: ignore[arg-type]  # a text frame is counted and skipped
            frames += 1
            if frames % FRAMES_A_TURN == 0:
                await asyncio.sleep(0)


async def _write(socket: ServerConnection, outbox: Outbox) -> None:
    try:
        while True:
            while (frame := outbox.pop()) is not None:
                await socket.send(frame)
            if outbox.closing is not None:
                code, reason = outbox.closing
                await socket.close(code, _clip(reason))
                return
            await outbox.wait()
    except ConnectionClosed:
        return  # the reader sees it too and tells the fleet


async def _refuse(socket: ServerConnection, refused: Refused) -> None:
    try:
        await socket.send(wire.encode(refused))
    except ConnectionClosed:
        return
    await socket.close(REFUSED_CODE, _clip(f"{refused.code}: {refused.message}"))


def _decode_hello(frame: bytes | str) -> Hello | Refused:
    try:
        message = wire.decode_from_node(frame)  # type: ignore[arg-type]  # text raises TypeError
    except (msgspec.MsgspecError, TypeError):
        return Refused("bad_hello", "the first frame could not be read; it must be a hello")
    if isinstance(message, Hello):
        return message
    return Refused("bad_hello", f"the first frame was {type(message).__name__}, want Hello")


def _clip(reason: str) -> str:
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
