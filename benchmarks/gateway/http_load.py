"""A cheap HTTP/1.1 client: one epoll loop, raw sockets, counts marks in what arrives."""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MARK = b"^"  # a token of its own in byte-level vocabularies; no head of a chunk has it
PATIENCE_S = 30.0
_REQUEST_ID = re.compile(rb"\r\nx-request-id: ([^\r]+)\r\n", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@dataclass
class Answer:
    """One request: when it was sent, and (time, marks) of everything that was read."""

    socket: socket.socket
    sent_at: float
    head: bytes = b""  # and the body, when its length was announced
    request_id: str = ""
    length: int | None = None  # of head and body; None: chunked
    reads: list[tuple[float, int]] = field(default_factory=list)
    done_at: float | None = None


def post(body: bytes, key: str) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: benchmark\r\n"
        b"content-type: application/json\r\nauthorization: Bearer %b\r\n"
        b"content-length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
    )


class Load:
    """Open answers on one epoll; `run` reads until a condition holds."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._epoll = select.epoll()
        self._answers: dict[int, Answer] = {}

    def open(self) -> socket.socket:
        made = socket.create_connection(self._address, timeout=10)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def send(self, request: bytes, connection: socket.socket | None = None) -> Answer:
        """On a new connection, or again on one whose answer is complete."""
        fresh = connection is None
        connection = connection or self.open()
        connection.setblocking(True)
        answer = Answer(connection, time.monotonic())
        connection.sendall(request)
        connection.setblocking(False)
        self._answers[connection.fileno()] = answer
        if fresh:
            self._epoll.register(connection.fileno(), select.EPOLLIN)
        return answer

    def close(self, answer: Answer) -> float:
        """Leave at once; the moment of it."""
        self._epoll.unregister(answer.socket.fileno())
        del self._answers[answer.socket.fileno()]
        now = time.monotonic()
        answer.socket.close()
        return now

    def run(
        self, until: Callable[[], bool], on_done: Callable[[Answer], None] = lambda _: None
    ) -> None:
        quiet_at = time.monotonic() + PATIENCE_S
        while not until():
            ready = self._epoll.poll(0.001)
            for descriptor, _ in ready:
                self._read(self._answers[descriptor], on_done)
            if ready:
                quiet_at = time.monotonic() + PATIENCE_S
            elif time.monotonic() > quiet_at:
                raise TimeoutError(f"nothing came for {PATIENCE_S:.0f} s")

    def until_reads(self, answer: Answer, count: int) -> None:
        self._soon(lambda: len(answer.reads) >= count, answer)

    def until_done(self, answer: Answer) -> None:
        self._soon(lambda: answer.done_at is not None, answer)

    def _soon(self, fact: Callable[[], bool], answer: Answer) -> None:
        end = time.monotonic() + PATIENCE_S
        self.run(lambda: fact() or time.monotonic() >= end)
        if not fact():
            raise TimeoutError(f"an answer stands still: {answer.head[-300:]!r}")

    def for_s(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.run(lambda: time.monotonic() >= end)

    def _read(self, answer: Answer, on_done: Callable[[Answer], None]) -> None:
        try:
            data = answer.socket.recv(1 << 18)
        except BlockingIOError:
            return
        now = time.monotonic()
        if not data:
            raise ConnectionError(f"the gateway closed a connection: {answer.head[:300]!r}")
        if not answer.request_id or answer.length is not None:
            answer.head += data
        if not answer.request_id and not _read_head(answer):
            return
        marks = data.count(MARK)
        if marks:
            answer.reads.append((now, marks))
        whole = answer.length is not None and len(answer.head) >= answer.length
        if whole or data.endswith(b"0\r\n\r\n"):
            answer.done_at = now
            on_done(answer)

    def end(self) -> None:
        for answer in list(self._answers.values()):
            self.close(answer)
        self._epoll.close()


def _read_head(answer: Answer) -> bool:
    """Whether the head is complete; raises ConnectionError for any status but 200."""
    end = answer.head.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = answer.head[: end + 2]
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ConnectionError(f"refused: {answer.head[:600]!r}")
    found = _REQUEST_ID.search(head)
    answer.request_id = found[1].decode() if found is not None else "not told"
    length = _LENGTH.search(head)
    answer.length = end + 4 + int(length[1]) if length is not None else None
    return True
