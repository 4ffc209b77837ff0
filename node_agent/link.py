"""One gateway's link: dialled, greeted, kept, and dialled again when it is cut."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from node_agent.reports import PageStream, UsageBacklog
from policies.contract.wire import (
    BUNDLE_PART_BYTES,
    MAX_FRAME_BYTES,
    MIN_WIRE_VERSION,
    WIRE_VERSION,
    BundlePart,
    GatewayToNode,
    Hello,
    Refused,
    Welcome,
    decode_from_gateway,
    encode,
)


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Seconds, and the bound of what waits to be sent."""

    welcome_s: float = 5.0
    backoff_s: float = 0.1  # doubled with each failure, halved at most by jitter
    backoff_cap_s: float = 3.0
    ping_interval_s: float = 2.0
    ping_timeout_s: float = 4.0
    max_waiting_bytes: int = 32 << 20


class LinkOwner(Protocol):
    """Who is asked and told; all calls are synchronous and must not raise."""

    def hello(self, link: GatewayLink) -> Hello: ...
    def on_open(self, link: GatewayLink, welcome: Welcome) -> None: ...
    def on_message(self, link: GatewayLink, message: GatewayToNode) -> None: ...
    def on_cut(self, link: GatewayLink) -> None: ...


class LinkCut(Exception):
    """The link is over; the text says why."""


class GatewayLink:
    """Frames go out in the order of `send`; reports pass them, bundle parts wait for them.

    What is sent while the link is not open is dropped: a new link begins with a snapshot.
    `usage` and nothing else survives a cut.
    """

    def __init__(
        self,
        index: int,
        url: str,
        token: str,
        *,
        owner: LinkOwner,
        jitter: Callable[[], float],
        timing: LinkTiming | None = None,
    ) -> None:
        self.index = index
        self.url = url
        self.channel = 0  # on the engine sockets; 0 while the link is not open
        self.usage = UsageBacklog()
        self.pages = PageStream()
        self.unknown_frames = 0
        self._token = token
        self._owner = owner
        self._jitter = jitter  # 0 … 1
        self._timing = timing or LinkTiming()
        self._is_open = False
        self._report: bytes | None = None
        self._frames: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._parts: deque[tuple[str, bytes, int]] = deque()
        self._is_sending = False
        self._wake = asyncio.Event()
        self._broken = asyncio.Event()
        self._idle = asyncio.Event()
        self._log = structlog.get_logger().bind(gateway=url)

    @property
    def is_open(self) -> bool:
        return self._is_open

    # --- sending ---------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """In order. A gateway that does not read until the bound is reached loses its link."""
        if not self._is_open:
            return
        self._frames.append(data)
        self._waiting_bytes += len(data)
        self._idle.clear()
        self._wake.set()
        if self._waiting_bytes > self._timing.max_waiting_bytes:
            self._broken.set()

    def send_report(self, data: bytes) -> None:
        """In front of all; an earlier one that still waits is replaced."""
        if self._is_open:
            self._report = data
            self._idle.clear()
            self._wake.set()

    def send_bundle(self, digest: str, encoded: bytes) -> None:
        """In parts, each only when no frame waits; not again while parts of it wait."""
        if not self._is_open or any(part[0] == digest for part in self._parts):
            return
        count = max(1, -(-len(encoded) // BUNDLE_PART_BYTES))
        self._parts.extend((digest, encoded, index) for index in range(count))
        self._idle.clear()
        self._wake.set()

    async def flushed(self, timeout_s: float) -> bool:
        """True once nothing waits; False when the time is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._is_open and self._waits():
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _waits(self) -> bool:
        return bool(self._is_sending or self._report or self._frames or self._parts)

    def _pop(self) -> bytes | None:
        if self._report is not None:
            data, self._report = self._report, None
            return data
        if self._frames:
            data = self._frames.popleft()
            self._waiting_bytes -= len(data)
            return data
        if not self._parts:
            return None
        digest, encoded, index = self._parts.popleft()
        start = index * BUNDLE_PART_BYTES
        count = max(1, -(-len(encoded) // BUNDLE_PART_BYTES))
        part = encoded[start : start + BUNDLE_PART_BYTES]
        return encode(BundlePart(digest, index, count, part))

    # --- living ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        timing = self._timing
        backoff_s, last_reason = timing.backoff_s, ""
        while True:
            was_open, reason = await self._one_connection()
            if was_open:
                backoff_s = timing.backoff_s
            if reason != last_reason or was_open:
                self._log.warning("link_cut", reason=reason, was_open=was_open)
                last_reason = reason
            await asyncio.sleep(backoff_s * (0.5 + 0.5 * self._jitter()))
            backoff_s = min(backoff_s * 2, timing.backoff_cap_s)

    async def _one_connection(self) -> tuple[bool, str]:
        """(was it open, why it ended)."""
        was_open = False
        try:
            async with connect(
                self.url,
                additional_headers={"Authorization": f"Bearer {self._token}"},
                compression=None,
                max_size=MAX_FRAME_BYTES,
                max_queue=64,
                write_limit=1 << 20,
                ping_interval=self._timing.ping_interval_s,
                ping_timeout=self._timing.ping_timeout_s,
                open_timeout=5,
                close_timeout=1,
                proxy=None,
            ) as socket:
                welcome = await self._greet(socket)
                was_open = True
                self._open(welcome)
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self._read(socket))
                        tasks.create_task(self._write(socket))
                        tasks.create_task(self._guard())
                finally:
                    self._close()
                    if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                        await socket.close(1001, "the node stops")
        except ExceptionGroup as group:
            causes, others = group.split((LinkCut, WebSocketException, OSError))
            if others is not None:
                raise others from None
            assert causes is not None
            return was_open, str(causes.exceptions[0])
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403):
                return was_open, f"join token refused ({status}): pass the gateway's own token"
            return was_open, f"handshake answered {status}: is this the gateway's link port?"
        except (LinkCut, WebSocketException, OSError, TimeoutError) as error:
            return was_open, str(error) or type(error).__name__
        return was_open, "closed"

    async def _greet(self, socket: ClientConnection) -> Welcome:
        await socket.send(encode(self._owner.hello(self)))
        try:
            async with asyncio.timeout(self._timing.welcome_s):
                first = await socket.recv(decode=False)
        except TimeoutError:
            raise LinkCut(f"no welcome within {self._timing.welcome_s} s") from None
        try:
            message = decode_from_gateway(first)
        except msgspec.MsgspecError as error:
            raise LinkCut(f"the first frame is none of ours: {error}") from error
        match message:
            case Welcome(version=version) if MIN_WIRE_VERSION <= version <= WIRE_VERSION:
                return message
            case Welcome(version=version):
                raise LinkCut(
                    f"wire version: found {version}, allowed {MIN_WIRE_VERSION} to {WIRE_VERSION}; "
                    "run the same release on gateway and node"
                )
            case Refused(code=code, message=text):
                raise LinkCut(f"refused, {code}: {text}")
        raise LinkCut(f"the first frame is {type(message).__name__}, not Welcome")

    def _open(self, welcome: Welcome) -> None:
        self._report = None
        self._frames.clear()
        self._parts.clear()
        self._waiting_bytes = 0
        self._broken.clear()
        self.pages = PageStream()
        self._is_open = True
        self._log.info("link_open", gateway_id=welcome.gateway_id)
        self._owner.on_open(self, welcome)

    def _close(self) -> None:
        self._is_open = False
        self._owner.on_cut(self)
        self._idle.set()

    async def _read(self, socket: ClientConnection) -> None:
        async for data in socket:
            if isinstance(data, str):
                self.unknown_frames += 1
                continue
            try:
                message = decode_from_gateway(data)
            except msgspec.MsgspecError as error:
                self.unknown_frames += 1
                self._log.warning("unknown_gateway_frame", error=str(error))
                continue
            self._owner.on_message(self, message)
        raise LinkCut(f"closed by the gateway: {socket.close_code} {socket.close_reason}")

    async def _write(self, socket: ClientConnection) -> None:
        while True:
            data = self._pop()
            if data is None:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            self._is_sending = True
            try:
                await socket.send(data)
            finally:
                self._is_sending = False

    async def _guard(self) -> None:
        await self._broken.wait()
        raise LinkCut(f"gateway reads too slowly: over {self._timing.max_waiting_bytes} bytes wait")
