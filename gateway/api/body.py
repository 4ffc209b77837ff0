"""Reading a request's body: bounded in bytes, in time and in memory, and refused early.

Hypercorn keeps at most ten unread pieces and then stops reading the socket, so somebody must go on
taking pieces even after a refusal, or the refusal itself would wait for room.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from gateway.api.exchange import Exchange
from gateway.api.time_limit import TimeLimit
from gateway.config import LimitsConfig
from gateway.errors import GatewayError, quote

LINGER_S = 1.0  # how long a refused upload is discarded, so that its sender can read the refusal
LINGER_BYTES = 8 << 20


class ClientLeft(Exception):
    """The client closed the connection or reset the stream; nobody waits for an answer."""


@dataclass(slots=True)
class BodyBudget:
    """Bytes of bodies that are being read right now, over all requests of this gateway."""

    limit_bytes: int
    held_bytes: int = 0


async def read_body(
    exchange: Exchange, *, limit_bytes: int, limits: LimitsConfig, budget: BodyBudget
) -> bytes:
    """The whole body. Raises GatewayError (408, 413, 415, 429) or ClientLeft."""
    _refuse_encoding(exchange)
    declared = _declared_length(exchange)
    if declared is not None and declared > limit_bytes:
        raise _too_large(f"{declared} bytes", limit_bytes)
    # One buffer, not a list of pieces: pieces of one byte would take a hundred times their room.
    body = bytearray()
    started = asyncio.get_running_loop().time()
    allowed_s = limits.body_grace_s
    try:
        with TimeLimit(allowed_s) as limit:
            while True:
                message = await exchange.receive()
                if message["type"] == "http.disconnect":
                    exchange.client_left = True
                    raise ClientLeft
                piece: bytes = message.get("body", b"")
                if len(body) + len(piece) > limit_bytes:
                    raise _too_large(f"more than {limit_bytes} bytes", limit_bytes)
                if budget.held_bytes + len(piece) > budget.limit_bytes:
                    raise GatewayError(
                        "capacity_exceeded",
                        found="too many bodies being uploaded at once",
                        allowed=f"{budget.limit_bytes} bytes over all requests",
                        remedy="send the request again",
                        retry_after_s=1.0,
                    )
                budget.held_bytes += len(piece)
                body += piece
                if not message.get("more_body", False):
                    exchange.body_done = True
                    return bytes(body)
                if len(body) != declared:  # else only the end is missing, which costs no time
                    # A byte a second never ends by itself: each byte buys only its share of time.
                    allowed_s = limits.body_grace_s + len(body) / limits.body_min_bytes_per_s
                    limit.move(started + allowed_s)
    except TimeoutError:
        raise GatewayError(
            "body_timeout",
            found=f"{len(body)} bytes after {allowed_s:.1f} s",
            allowed=f"{limits.body_min_bytes_per_s} bytes/s after {limits.body_grace_s:g} s",
            remedy="send the body at once",
        ) from None
    finally:
        budget.held_bytes -= len(body)


async def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Answer with error although the body was not read; discard a bounded rest of it meanwhile."""
    data = error.body(exchange.request_id)
    headers = [
        ("content-type", "application/json"),
        ("content-length", str(len(data))),
        *error.headers(),
    ]
    if exchange.scope["http_version"].startswith("1"):
        headers.append(("connection", "close"))
    await exchange.start(error.status, headers)
    await exchange.write(data)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await _discard(exchange, LINGER_BYTES)
    # While the answer is completed the server may still be waiting to hand over a piece.
    rest = asyncio.create_task(_discard(exchange, None))
    try:
        await exchange.end()
    finally:
        rest.cancel()
        await asyncio.wait((rest,))


async def _discard(exchange: Exchange, most_bytes: int | None) -> None:
    """Until the body or the connection ends, or most_bytes have passed."""
    discarded = 0
    while most_bytes is None or discarded <= most_bytes:
        message = await exchange.receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        discarded += len(message.get("body", b""))


def _too_large(found: str, limit_bytes: int) -> GatewayError:
    return GatewayError(
        "request_too_large",
        field="body",
        found=found,
        allowed=f"{limit_bytes} bytes",
        remedy="send less, or raise limits.body_bytes",
    )


def _refuse_encoding(exchange: Exchange) -> None:
    encoding = exchange.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise GatewayError(
            "unsupported_encoding",
            field="content-encoding",
            found=quote(encoding),
            allowed="identity",
            remedy="send the body uncompressed",
        )


def _declared_length(exchange: Exchange) -> int | None:
    text = exchange.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
