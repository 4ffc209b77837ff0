"""HTTP/1.1 on one socket with every cut chosen: of the body, of what is sent, of what is read."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import h11

MAX_PIECES = 1000
DEADLINE_S = 30.0  # of one answer; who waits longer has found a hang


@dataclass(frozen=True)
class Cuts:
    """Sizes in bytes, each list taken in turn from its start again; empty: in one piece.

    chunks: of a body in chunked transfer encoding; None: a body of known length.
    """

    chunks: Sequence[int] | None = None
    sends: Sequence[int] = ()
    reads: Sequence[int] = ()


WHOLE = Cuts()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def json(self) -> Any:
        return strict_json(self.body)

    def events(self) -> list[bytes]:
        """The data of each event; comments are left out. Nothing else may be in the body."""
        found: list[bytes] = []
        assert self.body.endswith(b"\n\n"), self.body[-200:]
        for event in self.body[:-2].split(b"\n\n"):
            if event.startswith(b":"):
                continue
            assert event.startswith(b"data: "), event
            assert b"\n" not in event, event
            assert b"\r" not in event, event
            found.append(event.removeprefix(b"data: "))
        return found


def strict_json(data: bytes) -> Any:
    """As a strict reader has it: NaN and Infinity are no JSON."""
    return json.loads(data.decode(), parse_constant=_refused)


def _refused(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


@dataclass
class WireClient:
    """Keeps its connection while both sides do. close() at the end."""

    port: int
    secret: str
    _socket: socket.socket | None = None
    _http: h11.Connection = field(init=False)

    def ask(
        self,
        path: str,
        body: bytes = b"",
        *,
        method: str = "POST",
        headers: Mapping[str, bytes] | None = None,
        cuts: Cuts = WHOLE,
    ) -> Answer:
        """The whole answer. TimeoutError: none came in time."""
        opened = self._open()
        fields: list[tuple[str, str | bytes]] = [("host", "t"), *(headers or {}).items()]
        if "authorization" not in dict(fields):
            fields.append(("authorization", f"Bearer {self.secret}"))
        if cuts.chunks is None:
            fields.append(("content-length", str(len(body))))
            pieces = [body]
        else:
            fields.append(("transfer-encoding", "chunked"))
            pieces = list(cut(body, cuts.chunks))
        request = h11.Request(method=method, target=path, headers=fields)
        events = [request, *[h11.Data(data=piece) for piece in pieces], h11.EndOfMessage()]
        data = b"".join([self._http.send(event) or b"" for event in events])
        try:
            for piece in cut(data, cuts.sends):
                opened.sendall(piece)
        except OSError:
            pass  # refused before its end: the answer says why
        answer = self._read(opened, cuts.reads)
        self._go_on()
        return answer

    def _open(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._http = h11.Connection(h11.CLIENT)
        return self._socket

    def _read(self, opened: socket.socket, sizes: Sequence[int]) -> Answer:
        size_in_turn = cycle(sizes or (1 << 16,))
        head: h11.Response | None = None
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(opened.recv(next(size_in_turn)))
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                named = {name.decode(): value.decode() for name, value in head.headers}
                return Answer(head.status_code, named, bytes(body))

    def _go_on(self) -> None:
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """data in pieces of these sizes, in turn; what is left after MAX_PIECES is one more."""
    place = 0
    for size in islice(cycle(sizes or (len(data) or 1,)), MAX_PIECES):
        if place < len(data):
            yield data[place : place + size]
        place += size
    if place < len(data):
        yield data[place:]
