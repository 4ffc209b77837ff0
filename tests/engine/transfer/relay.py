"""Somebody between two movers who reads along: passes messages on, or does to one what a test says.

Messages are sealed and not secret, so a relay can tell them apart. What it does to a connection is
chosen by the transfer's id, so that many faulty ones run beside each other.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from engine.transfer.channel import _HEAD
from engine.transfer.messages import (
    MAC_BYTES,
    Hello,
    Pages,
    decode_greeting,
    decode_message,
)

Deed = Literal["pass", "cut", "stall", "lose", "repeat", "alter", "truncate", "slow"]
SLOW_S = 0.05


@dataclass(frozen=True, slots=True)
class Frame:
    name: str  # of its message's type
    nth: int  # of that name on this connection, from 0
    data: bytes  # as it is on the wire, pages included


Judge = Callable[[Frame], Deed]


def pass_all(frame: Frame) -> Deed:
    return "pass"


class Relay:
    """Listens; each connection goes on to target. judges: by transfer id."""

    def __init__(self, target: str, page_bytes: int) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._page_bytes = page_bytes
        self.judges: dict[bytes, Judge] = {}
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._server]
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._start(self._accept)

    def close(self) -> None:
        self._is_closed = True
        for one in self._sockets:
            _shut(one)
        for thread in self._threads:
            thread.join(5.0)
            assert not thread.is_alive()
        for one in self._sockets:
            one.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=run, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                dialler, _ = self._server.accept()
                listener = socket.create_connection(self._target)
            except OSError:
                continue
            self._sockets += [dialler, listener]
            judge: list[Judge] = [pass_all]
            self._start(self._pump, dialler, listener, judge)
            self._start(self._pump, listener, dialler, judge)

    def _pump(self, source: socket.socket, target: socket.socket, judge: list[Judge]) -> None:
        with suppress(OSError):
            for frame in self._frames(source, judge):
                deed = judge[0](frame)
                if deed == "slow":
                    time.sleep(SLOW_S)
                if deed == "stall":  # the connection stays, and says nothing more
                    while source.recv(1 << 16):
                        pass
                    return
                if deed == "cut":
                    break
                data = frame.data
                if deed == "alter":
                    at = len(data) - 1 if frame.name == "Pages" else len(data) // 2
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                if deed == "truncate":
                    target.sendall(data[: len(data) // 2])
                    break
                if deed != "lose":
                    target.sendall(data * (2 if deed == "repeat" else 1))
        _shut(source)
        _shut(target)

    def _frames(self, source: socket.socket, judge: list[Judge]) -> Iterator[Frame]:
        names: dict[str, int] = {}
        is_sealed = False
        while head := _read(source, _HEAD.size):
            body = _read(source, _HEAD.unpack(head)[0])
            mac = _read(source, MAC_BYTES) if is_sealed else b""
            message = decode_message(body) if is_sealed else decode_greeting(body)
            if isinstance(message, Hello):
                judge[0] = self.judges.get(message.transfer_id, pass_all)
            is_sealed = True  # from each side's first message on
            pages = b""
            if isinstance(message, Pages) and not message.places:
                pages = _read(source, len(message.digests) * self._page_bytes)
            name = type(message).__name__
            nth = names[name] = names.get(name, -1) + 1
            yield Frame(name, nth, head + body + mac + pages)


def _read(source: socket.socket, num_bytes: int) -> bytes:
    """b"" at the end."""
    data = bytearray()
    while len(data) < num_bytes:
        piece = source.recv(num_bytes - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
