"""All connections to one foreign server. The one module with httpx, so that it can be exchanged;
imported only where upstreams are, because that takes 0.2 s.

A request belongs to the task that makes it: cancelling that task closes the connection, which is
how a server learns that nobody waits any more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import cast

import httpx

from gateway.api.stall import StallGuard
from gateway.api.time_limit import TimeLimit
from gateway.upstreams.faults import TransportFault

KEPT_S = 4.0  # idle connections go before uvicorn's 5 s end them under a request
PROBE_BYTES = 4 << 20


class Answer:
    """An answer whose head has come; `piece` gives its body as it comes."""

    def __init__(self, response: httpx.Response, guard: StallGuard, first_byte_s: float) -> None:
        self.status = response.status_code
        self.source = cast("AsyncGenerator[bytes, None]", response.aiter_bytes())
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
                return await self._guard.send(anext(self.source, None))
            with TimeLimit(self._first_byte_s):
                piece = await anext(self.source, None)
            self._first_byte_s = None
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
    """One client object a server: httpx looks through all of a client's connections each time."""

    def __init__(
        self, base: str, *, api_key: str | None, max_connections: int, connect_s: float
    ) -> None:
        # Nothing of this process's environment: no proxy, no .netrc. No compression: events would
        # wait for a block to fill.
        headers = {"accept-encoding": "identity", "user-agent": "kagari"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            base_url=base,
            headers=headers,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=connect_s, pool=connect_s),
            limits=httpx.Limits(
                max_connections=max_connections,
                max_keepalive_connections=max_connections,
                keepalive_expiry=KEPT_S,
            ),
        )

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
        sent = {"content-type": "application/json", **headers}
        request = self._client.build_request("POST", path, content=body, headers=sent)
        with _translated(), TimeLimit(first_byte_s):
            response = await self._client.send(request, stream=True)
        answer: Answer | None = None
        try:
            with _translated():  # the guard ends the block with a TimeoutError
                async with StallGuard(idle_s) as guard:
                    answer = Answer(response, guard, first_byte_s)
                    yield answer
        finally:
            if answer is not None:
                await answer.source.aclose()
            await response.aclose()

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """A small answer, whole. Raises TransportFault."""
        with _translated(), TimeLimit(timeout_s):
            async with self._client.stream("GET", path) as response:
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > PROBE_BYTES:
                        raise TransportFault("lost", "a list that has no end")
                return response.status_code, bytes(body)

    async def close(self) -> None:
        await self._client.aclose()


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
