"""A foreign server that speaks exchanges exactly: the pieces it is given, cut where they are cut.

An exchange is what one POST is answered with: a status, headers, and pieces of a body, each sent as
one write. Between them may stand a pause ("wait", seconds), "reset" (the connection breaks), "hang"
(nothing more comes until the client goes) and "until" (an event of the test's). GET /v1/models
lists its models. What was asked is kept, and whether the client left before the end.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Step = bytes | tuple[str, Any]


@dataclass
class Exchange:
    pieces: Sequence[Step] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    headers: Sequence[tuple[str, str]] = ()
    is_chunked: bool = True  # else the body ends with the connection, or by its length


@dataclass
class Asked:
    """One POST as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    at: float
    is_answered: bool = False
    client_left: bool = False


Script = Callable[[Asked], Exchange]


@dataclass
class ScriptedUpstream:
    """script: what each POST is answered with. models: None refuses the list with 404."""

    script: Script
    models: Sequence[str | dict[str, Any]] | None = ("their-model",)
    list_status: int = 200
    asked: list[Asked] = field(default_factory=list)
    port: int = 0
    num_connections: int = 0
    num_open: int = 0
    probes: int = 0
    held: socket.socket | None = None  # bound already, so that nobody else takes its port
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_asked(self, count: int, seconds: float = 20.0) -> list[Asked]:
        self._wait(lambda: len(self.asked) >= count, seconds, f"{count} requests")
        return self.asked

    def wait_left(self, seconds: float = 20.0) -> None:
        """Every client that left is seen to have left, and nothing runs any more."""
        done = lambda: all(one.is_answered or one.client_left for one in self.asked)  # noqa: E731
        self._wait(done, seconds, "the end of all requests")

    def _wait(self, is_done: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not is_done():
            assert time.monotonic() < deadline, f"{what} did not come: {self.asked}"
            time.sleep(0.01)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            ahead: bytes | None = b""
            while ahead is not None:
                ahead = await self._one(ahead, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    async def _one(
        self, ahead: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes | None:
        """ahead: read of the request already. What was read of the next; None: no next."""
        head = (ahead + await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
        if method == "GET":
            self.probes += 1
            await self._get(path, writer)
            return b""
        raw = await reader.readexactly(int(headers["content-length"]))
        asked = Asked(path, headers, json.loads(raw), raw, time.monotonic())
        self.asked.append(asked)
        left = asyncio.create_task(reader.read(1))  # a client that waits sends nothing
        answer = asyncio.create_task(self._answer(self.script(asked), writer))
        await asyncio.wait({left, answer}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            asked.client_left = True
            answer.cancel()
            await asyncio.wait({answer})
            return None
        left.cancel()
        await asyncio.wait({left})
        try:
            goes_on = answer.result()
        except ConnectionError:
            asked.client_left = True
            return None
        asked.is_answered = True
        return None if not goes_on else b"" if left.cancelled() else left.result()

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path != "/v1/models" or self.models is None:
            status, body = (200, b"ok") if path == "/health" else (404, b"{}")
        else:
            listed = [{"id": one} if isinstance(one, str) else one for one in self.models]
            status, body = self.list_status, json.dumps({"object": "list", "data": listed}).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()

    async def _answer(self, exchange: Exchange, writer: asyncio.StreamWriter) -> bool:
        head = [f"HTTP/1.1 {exchange.status} X", f"content-type: {exchange.content_type}"]
        head += [f"{name}: {value}" for name, value in exchange.headers]
        head.append("transfer-encoding: chunked" if exchange.is_chunked else "connection: close")
        is_sent = False
        for step in exchange.pieces:
            if isinstance(step, tuple):
                kind, value = step
                if kind == "wait":
                    await asyncio.sleep(value)
                elif kind == "until":
                    await asyncio.to_thread(value.wait, 20)
                elif kind == "hang":
                    await asyncio.sleep(60)
                elif kind == "reset":
                    reset = writer.get_extra_info("socket")
                    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    writer.transport.abort()
                    return False
                continue
            if not is_sent:
                writer.write("\r\n".join([*head, "", ""]).encode())
                is_sent = True
            writer.write(b"%x\r\n%b\r\n" % (len(step), step) if exchange.is_chunked else step)
            await writer.drain()
        if not is_sent:
            writer.write("\r\n".join([*head, "", ""]).encode())
        if exchange.is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return exchange.is_chunked


@contextmanager
def start_upstream(script: Script, **fields: Any) -> Iterator[ScriptedUpstream]:
    """Serves on a free port of this machine, in a thread of its own."""
    upstream = ScriptedUpstream(script, **fields)
    up, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        if upstream.held is not None:
            server = await asyncio.start_server(upstream.serve, sock=upstream.held)
        else:
            server = await asyncio.start_server(upstream.serve, "127.0.0.1", upstream.port)
        upstream.port = server.sockets[0].getsockname()[1]
        upstream.loop = asyncio.get_running_loop()
        up.set()
        await stop.wait()
        server.close()
        for _ in range(5):  # of a connection that was just accepted nobody is there yet to close it
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert up.wait(20)
    assert upstream.loop is not None
    try:
        yield upstream
    finally:
        upstream.loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive()


def sse(*data: Any, separator: str = "\n\n") -> bytes:
    """Events of these values; a text stands as it is."""
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in data]
    return "".join(f"data: {text}{separator}" for text in texts).encode()


def chunk(text: str | None = None, *, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chat chunk as vLLM words it."""
    delta = {} if text is None else {"content": text}
    return {
        "id": "chatcmpl-theirs",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "their-model",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        **fields,
    }


def usage_chunk(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }
    return {**chunk(), "choices": [], "usage": usage}


def whole_answer(text: str, prompt: int, completion: int, **fields: Any) -> bytes:
    return json.dumps(
        {
            "id": "chatcmpl-theirs",
            "object": "chat.completion",
            "created": 1,
            "model": "their-model",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                }
            ],
            "usage": usage_chunk(prompt, completion, 0)["usage"],
            **fields,
        }
    ).encode()
