"""One connection of a transfer: frames on a socket that never blocks, each sealed once both ends
have proven the secret, and pages read and written where they lie, without a copy.

A frame is 4 bytes of length (little endian, of the message alone), one msgpack message and, once
sealed, its 32-byte MAC; behind a Pages message without places follow its pages' bytes. Whoever says
nothing for SILENT_S is dead to us, whatever its kernel answers; and who was asked to connect and
has not for CONNECT_S, of whatever it died.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from struct import Struct
from typing import Protocol

from engine.transfer.machine import Fault
from engine.transfer.messages import (
    MAC_BYTES,
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    Ping,
    encode,
)
from engine.transfer.seal import Seal

PING_S = 1.0
SILENT_S = 3.0
CONNECT_S = 30.0  # longer than a step: between two of them an engine hears what it is asked
_TURN_BYTES = 4 << 20  # read at once; then it is another connection's turn
_AT_ONCE = 64  # buffers of one sendmsg
_HEAD = Struct("<I")
_PING = encode(Ping())


class Broken(Exception):
    """The connection is of no use any more."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.fault = Fault(code, message)


class Owner(Protocol):
    """Whose connection it is."""

    def heard(self, body: bytes) -> None:
        """A whole message, proven if the channel is sealed; it may call expect or skip."""

    def filled(self) -> None:
        """The views of expect hold the pages."""

    def flush(self, now: float) -> None:
        """Send what was said."""

    def tick(self, now: float) -> None:
        """Time has passed."""

    def cut(self, fault: Fault) -> None:
        """The connection is of no use."""


class Channel:
    """now: of one clock in all calls. Everything but the constructor may raise Broken."""

    def __init__(self, connection: socket.socket, owner: Owner, now: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.owner = owner
        self.is_open = True
        self._sealing: Seal | None = None
        self._proving: Seal | None = None
        self._out: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._said_at = self._heard_at = now
        self._head = memoryview(bytearray(_HEAD.size))
        self._body: memoryview | None = None
        self._pages: deque[memoryview] = deque()  # to be filled before the next frame
        self._is_filling = False  # and then its owner is told
        self._skipping = 0  # bytes of pages that nobody wants
        self._target = self._head
        self._at = 0  # bytes of the target that have come

    @property
    def is_local(self) -> bool:
        """Whether both ends have one address: a hint, and no proof, of one machine."""
        try:
            return bool(self.socket.getsockname()[0] == self.socket.getpeername()[0])
        except OSError:
            return False

    @property
    def has_more(self) -> bool:
        """Something waits to be sent."""
        return bool(self._out)

    def seal(self, sealing: Seal, proving: Seal) -> None:
        """From the next message on, both ways."""
        self._sealing, self._proving = sealing, proving

    def close(self) -> None:
        """Nothing that was given to say or expect is touched from here on."""
        if self.is_open:
            self.is_open = False
            self.socket.close()
            for _, after in self._out:
                if after is not None:
                    after()
            self._out.clear()
            self._pages.clear()

    def end(self) -> None:
        """Nothing more will be said."""
        with suppress(OSError):  # it is gone
            self.socket.shutdown(socket.SHUT_WR)

    # --- out ------------------------------------------------------------------------------------

    def say(
        self, body: bytes, pages: Iterable[memoryview] = (), after: Callable[[], None] | None = None
    ) -> None:
        """after: called once, when the pages have been read, or never will be."""
        mac = b"" if self._sealing is None else self._sealing.mac(body)
        self._out.append((memoryview(_HEAD.pack(len(body)) + body + mac), None))
        self._out.extend((page, None) for page in pages)
        if after is not None:
            self._out[-1] = (self._out[-1][0], after)

    def send(self, now: float) -> None:
        """As much of what was said as the socket takes."""
        while self._out:
            views = [view for view, _ in islice(self._out, _AT_ONCE)]
            try:
                sent = self.socket.sendmsg(views)
            except BlockingIOError:
                return
            except OSError as error:
                raise Broken("transfer_lost", f"connection: found {error}") from error
            self._said_at = now
            while sent:
                view, after = self._out[0]
                if sent < len(view):
                    self._out[0] = (view[sent:], after)
                    break
                sent -= len(view)
                self._out.popleft()
                if after is not None:
                    after()

    # --- in -------------------------------------------------------------------------------------

    def receive(self, now: float) -> None:
        """What has come, message by message, for a turn's worth of bytes."""
        left = _TURN_BYTES
        while self.is_open and left > 0:
            try:
                got = self.socket.recv_into(self._target[self._at :])
            except BlockingIOError:
                return
            except OSError as error:
                raise Broken("transfer_lost", f"connection: found {error}") from error
            if not got:
                raise Broken("transfer_lost", "connection: found closed by the peer")
            self._heard_at = now
            self._at += got
            left -= got
            if self._at == len(self._target):
                self._advance()

    def expect(self, pages: Iterable[memoryview]) -> None:
        """The bytes that follow go there."""
        self._pages.extend(pages)
        self._is_filling = True

    def skip(self, num_bytes: int) -> None:
        """Nobody wants the bytes that follow."""
        self._skipping = num_bytes

    def skip_rest(self) -> None:
        """Nobody wants what is still to come of expected pages; nothing is written there again."""
        if not self._is_filling:
            return
        self._is_filling = False
        self._skipping = sum(map(len, self._pages))
        self._pages.clear()
        if self._target is not self._body:  # a page, half of which is here
            self._skipping += len(self._target) - self._at
            self._next()

    def _advance(self) -> None:
        """The target is full."""
        if self._target is self._head:
            (size,) = _HEAD.unpack(self._head)
            limit = MAX_GREETING_BYTES if self._proving is None else MAX_MESSAGE_BYTES
            if not 0 < size <= limit:
                raise Broken("transfer_corrupt", f"frame: found {size} bytes, allowed {limit}")
            mac_bytes = 0 if self._proving is None else MAC_BYTES
            self._body = memoryview(bytearray(size + mac_bytes))
            self._target, self._at = self._body, 0
            return
        if self._target is self._body:
            body = bytes(self._body)
            if self._proving is not None:
                body, mac = body[:-MAC_BYTES], body[-MAC_BYTES:]
                if not self._proving.proves(body, mac):
                    raise Broken("transfer_corrupt", "frame: found one that is not the peer's")
            self.owner.heard(body)
        self._next()

    def _next(self) -> None:
        """What the bytes that follow are for."""
        self._at = 0
        if self._pages:
            self._target = self._pages.popleft()
        elif self._skipping:
            self._target = memoryview(bytearray(min(self._skipping, 1 << 16)))
            self._skipping -= len(self._target)
        else:
            self._target = self._head
            if self._is_filling:
                self._is_filling = False
                self.owner.filled()

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Say that we live; find out whether the peer does."""
        if now - self._heard_at > SILENT_S:
            raise Broken(
                "transfer_timeout", f"peer: found silent for {SILENT_S:g} s, allowed {PING_S:g} s"
            )
        if now - self._said_at >= PING_S and not self._out and self._sealing is not None:
            self.say(_PING)
