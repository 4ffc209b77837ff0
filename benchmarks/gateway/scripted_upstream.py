"""An inference server that answers every chat completion with the same bytes: what a router needs.

One uvloop process, no parsing beyond the length of a body, so that it is never what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from typing import cast

import uvloop

from gateway.api.choice import Turn
from gateway.api.sse import chat_choice, completion
from gateway.text.deltas import Text
from policies.contract.wire import Usage

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
ABSENT = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Connection(asyncio.Protocol):
    """One request after another; a head may come in pieces, a body is only counted."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._head = b""
        self._missing = 0  # bytes of the body that have not come
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._head, 0, end + 2)
            size = int(length[1]) if length is not None else 0
            self._missing = size - (len(self._head) - end - 4)
        if self._missing == 0:
            head, self._head = self._head, b""
            if head.startswith(CHAT):
                self._transport.write(self._answer)
            else:
                self._transport.write(HEALTHY if head.startswith(b"GET ") else ABSENT)


def answer_of(text: str) -> bytes:
    """Of the gateway's own shape and size."""
    body = completion(
        completion_id="chatcmpl-" + "0" * 32,
        created=1,
        model="scripted",
        choices=[chat_choice(0, [Turn(0, [Text(text)], "length")])],
        usage=Usage(189, 0, len(text)),
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


async def main(options: argparse.Namespace) -> None:
    answer = answer_of("^" * 40)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answer), "127.0.0.1", options.port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--port", type=int, default=0)
    flags.add_argument("--core", type=int)
    chosen = flags.parse_args()
    if chosen.core is not None:
        os.sched_setaffinity(0, {chosen.core})
    uvloop.run(main(chosen))
