"""A small client of our own gateway for the commands: JSON calls and one streamed chat.

On the standard library, because a command must start quickly and speaks to one known server.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class HttpError(Exception):
    """The server answered with a status of 400 or more."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body[:500]}")
        self.status = status
        self.body = body


class StreamFailed(Exception):
    """The stream ended in an error event."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where to call and with what secret; url has a scheme, a host and a port."""

    url: str
    secret: str

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        return http.client.HTTPConnection(
            parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s
        )

    def headers(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            "authorization": f"Bearer {self.secret}",
            "content-type": "application/json",
            **(more or {}),
        }


def call(server: Server, method: str, path: str, body: Any = None, timeout_s: float = 10) -> Any:
    """One JSON call. Raises HttpError, or OSError and HTTPException when there is no answer."""
    connection = server.connect(timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, server.headers())
        response = connection.getresponse()
        text = response.read().decode()
        if response.status >= 400:
            raise HttpError(response.status, text)
        return json.loads(text) if text else None
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What one streamed chat completion came to; times in seconds from the request.

    started_at and pieces_at are moments of the monotonic clock: the request's, and each at which
    text came. prefill_node: empty where the node computed the prompt itself.
    """

    request_id: str
    node: str
    prefill_node: str
    path: str
    affinity: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    started_at: float
    pieces_at: tuple[float, ...]
    total_s: float

    @property
    def ttft_s(self) -> float:
        return self.pieces_at[0] - self.started_at if self.pieces_at else self.total_s


def sse_data(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The JSON of each data event until [DONE]; comments are skipped.

    Raises StreamFailed when the stream ends without it: what came may not be the whole answer.
    """
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        yield event
        if "error" in event:
            return
    raise StreamFailed("the stream ended without [DONE]")


def stream_chat(
    server: Server,
    body: dict[str, Any],
    headers: Mapping[str, str],
    timeout_s: float = 120,
    *,
    on_text: Callable[[], object] = lambda: None,
) -> ChatReply:
    """Raises HttpError before the first byte, StreamFailed on an error event after it.

    on_text is called for each piece of text as it comes.
    """
    connection = server.connect(timeout_s)
    started_at = time.monotonic()
    pieces_at: list[float] = []
    text: list[str] = []
    usage: dict[str, Any] = {}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(asked), server.headers(headers)
        )
        response = connection.getresponse()
        if response.status >= 400:
            raise HttpError(response.status, response.read().decode())
        for event in sse_data(response):
            if "error" in event:
                raise StreamFailed(f"the stream ended in an error: {event['error']}")
            for choice in event.get("choices", ()):
                piece = choice["delta"].get("content")
                if piece:
                    pieces_at.append(time.monotonic())
                    text.append(piece)
                    on_text()
            usage = event.get("usage") or usage
        total_s = time.monotonic() - started_at
        return ChatReply(
            request_id=response.headers.get("x-request-id", ""),
            node=response.headers.get("x-kagari-node", ""),
            prefill_node=response.headers.get("x-kagari-prefill-node", ""),
            path=response.headers.get("x-kagari-path", ""),
            affinity=response.headers.get("x-kagari-affinity", ""),
            text="".join(text),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
            started_at=started_at,
            pieces_at=tuple(pieces_at),
            total_s=total_s,
        )
    finally:
        connection.close()
