"""Connections to one foreign server. The one module with httpx, so that it can be exchanged;
imported only where upstreams are, because that takes 0.2 s.

A request belongs to the task that makes it: cancelling that task closes the connection, which is
how a server learns that nobody waits any more. httpx's pool loses a place for ever when a task is
cancelled within its closing or connecting (encode/httpcore#1099), so no two requests share a pool:
each has a transport of its own, which is used again only after an answer that was read to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import cast

import httpx

from gateway.api.stall import StallGuard
from gateway.api.time_limit import TimeLimit
from gateway.upstreams.faults import TransportFault

KEPT_S = 4.0  # idle connections go before uvicorn's 5 s end them under a request
MAX_KEPT = 64
PROBE_BYTES = 4 << 20
CLOSE_WITHIN_S = 1.0


class Answer:
    """An answer whose head has come; `piece` gives its body as it comes."""

    def __init__(self, response: httpx.Response, guard: StallGuard, first_byte_s: float) -> None:
        self.status = response.status_code
        self.source = cast("AsyncGenerator[bytes, None]", response.aiter_bytes())
        self.is_read = False  # to its end
        self._header = response.headers.get
        self._guard = guard
        self._first_byte_s: float | None = first_byte_s

    def header(self, name: str) -> str:
        """Of a header that did not come, nothing."""
        return str(self._header(name, ""))

    async def piece(self) -> bytes | None:
        """The next bytes; None is the end. Raises TransportFault."""
        with _translated():
            if self._first_byte_s is None:
                piece = await self._guard.send(anext(self.source, None))
            else:
                with TimeLimit(self._first_byte_s):
                    piece = await anext(self.source, None)
                self._first_byte_s = None
        self.is_read = piece is None
        return piece

    async def whole(self, limit_bytes: int) -> bytes:
        """The whole body. Raises TransportFault, also when it is longer than that."""
        body = bytearray()
        while (piece := await self.piece()) is not None:
            body += piece
            if len(body) > limit_bytes:
                raise TransportFault("lost", f"an answer of more than {limit_bytes} bytes")
        return bytes(body)


class Connections:
    """As many as there are requests, and some that wait for the next."""

    def __init__(self, base: str, *, api_key: str | None, connect_s: float) -> None:
        # No compression: events would wait for a block to fill.
        self._headers = {"accept-encoding": "identity", "user-agent": "kagari"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._base = base
        self._timeout = {"connect": connect_s, "pool": connect_s, "read": None, "write": None}
        # Nothing of this process's environment: no proxy, no certificates of its own.
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._kept: list[httpx.AsyncHTTPTransport] = []  # the last one used at the end
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def post(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        first_byte_s: float,
        idle_s: float,
    ) -> AsyncIterator[Answer]:
        """Send JSON; the block has the answer from its head on. Raises TransportFault.

        first_byte_s bounds both the wait for the head and the one for the body's first piece.
        """
        sent = {**self._headers, "content-type": "application/json", **headers}
        request = self._request("POST", path, sent, body)
        async with self._asked(request, first_byte_s, idle_s) as answer:
            yield answer

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """A small answer, whole. Raises TransportFault."""
        request = self._request("GET", path, self._headers)
        async with self._asked(request, timeout_s, timeout_s) as answer:
            return answer.status, await answer.whole(PROBE_BYTES)

    async def close(self) -> None:
        for transport in self._kept:
            self._shut(transport, None)
        self._kept.clear()
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_WITHIN_S)

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> httpx.Request:
        extensions = {"timeout": self._timeout}
        url = self._base + path
        return httpx.Request(method, url, headers=headers, content=body, extensions=extensions)

    @asynccontextmanager
    async def _asked(
        self, request: httpx.Request, first_byte_s: float, idle_s: float
    ) -> AsyncIterator[Answer]:
        transport = self._kept.pop() if self._kept else self._made()
        answer: Answer | None = None
        try:
            with _translated(), TimeLimit(first_byte_s):
                response = await transport.handle_async_request(request)
            response.request = request
            with _translated():  # the guard ends the block with a TimeoutError
                async with StallGuard(idle_s) as guard:
                    answer = Answer(response, guard, first_byte_s)
                    yield answer
        finally:
            if answer is not None and answer.is_read and len(self._kept) < MAX_KEPT:
                self._kept.append(transport)
            else:
                self._shut(transport, answer)

    def _made(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=KEPT_S)
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)

    def _shut(self, transport: httpx.AsyncHTTPTransport, answer: Answer | None) -> None:
        """At once, in a task that nobody cancels."""
        closing = asyncio.create_task(_close(transport, answer))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _close(transport: httpx.AsyncHTTPTransport, answer: Answer | None) -> None:
    with suppress(httpx.HTTPError):
        if answer is not None:
            await answer.source.aclose()
        await transport.aclose()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise TransportFault("connect", f"{type(error).__name__}: {error}") from error
    except (TimeoutError, httpx.TimeoutException) as error:
        raise TransportFault("silent", "nothing came for too long") from error
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
        raise TransportFault("lost", f"{type(error).__name__}: {error}") from error
