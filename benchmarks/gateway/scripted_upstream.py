"""An inference server that answers every chat completion with the same bytes: what a router needs.

A streamed answer gets a token with every tick, all of them together, as the scripted nodes' do.
One uvloop process, no parsing beyond the length of a body and two facts of it, so that it is never
what is measured. When what was sent is written at the end, by the machine's one monotonic clock:
{"firsts": {question: its first step}, "steps": [time, …]}.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import uvloop

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": ?true')
_QUESTION = re.compile(rb"Question (\d+)")
ABSENT = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Sent(msgspec.Struct):
    """What was streamed when."""

    firsts: dict[str, int] = {}
    steps: list[float] = []


@dataclass
class Streams:
    """The streamed answers under way; a step is a token for each."""

    token: bytes
    sent: Sent = field(default_factory=Sent)
    transports: set[asyncio.Transport] = field(default_factory=set)

    def begin(self, transport: asyncio.Transport, body: bytes) -> None:
        transport.write(STREAM_HEAD)
        question = _QUESTION.search(body)
        if question is not None:
            self.sent.firsts[question[1].decode()] = len(self.sent.steps)
        self.transports.add(transport)

    async def step(self, tick_s: float) -> None:
        due = time.monotonic()
        while True:
            due += tick_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.sent.steps.append(time.monotonic())
            for transport in self.transports:
                transport.write(self.token)


class Connection(asyncio.Protocol):
    """One request after another; head and body may come in pieces."""

    def __init__(self, answer: bytes, streams: Streams) -> None:
        self._answer = answer
        self._streams = streams
        self._head = b""
        self._body: list[bytes] = []
        self._missing = 0  # bytes of the body that have not come
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def connection_lost(self, _error: Exception | None) -> None:
        self._streams.transports.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
            self._body.append(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._head, 0, end + 2)
            size = int(length[1]) if length is not None else 0
            self._body = [self._head[end + 4 :]]
            self._missing = size - len(self._body[0])
        if self._missing == 0:
            head, self._head = self._head, b""
            if not head.startswith(CHAT):
                self._transport.write(HEALTHY if head.startswith(b"GET ") else ABSENT)
            elif _STREAM.search(body := b"".join(self._body)):
                self._streams.begin(self._transport, body)
            else:
                self._transport.write(self._answer)


def answer_of(text: str) -> bytes:
    """Of the gateway's own shape and size."""
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 189, "completion_tokens": len(text), "total_tokens": 189 + len(text)}
    answer = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion", "created": 1}
    body = msgspec.json.encode({**answer, "model": "m", "choices": [choice], "usage": usage})
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def chunk_of(text: str) -> bytes:
    """One event of a stream, as a chunk of the transfer."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    event = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "created": 1}
    data = b"data: %b\n\n" % msgspec.json.encode({**event, "model": "m", "choices": [choice]})
    return b"%x\r\n%b\r\n" % (len(data), data)


async def main(options: argparse.Namespace, streams: Streams) -> None:
    answer = answer_of("^" * 40)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_server(
        lambda: Connection(answer, streams), "127.0.0.1", options.port
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    stepping = asyncio.create_task(streams.step(options.tick_s)) if options.tick_s else None
    await stop.wait()
    if stepping is not None:
        stepping.cancel()


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--port", type=int, default=0)
    flags.add_argument("--core", type=int)
    flags.add_argument("--tick-s", type=float, default=0.0)
    flags.add_argument("--log")
    chosen = flags.parse_args()
    if chosen.core is not None:
        os.sched_setaffinity(0, {chosen.core})
    made = Streams(chunk_of("^"))
    uvloop.run(main(chosen, made))
    if chosen.log:
        Path(chosen.log).write_bytes(msgspec.json.encode(made.sent))
