"""One request and its one answer over plain ASGI: what a handler gets, and how it replies."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.errors import GatewayError
from gateway.ledger.keys import Key

Headers = Sequence[tuple[str, str]]

# For ids and sampling seeds, which must differ and need not be secret. The kernel's randomness is
# cheap by itself but lets go of the interpreter's lock, perhaps to the ledger's thread: a request
# took 367 to 381 µs of CPU with this, 374 to 445 with os.urandom (benchmarks.gateway --only json).
# Not the module's functions: those share their state with everybody.
dice = random.Random()


@dataclass(slots=True)
class Exchange:
    """scope["path"] alone decides what is asked for; a Host header never does."""

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    started: float  # monotonic seconds
    headers: dict[str, str]  # lower-case names; of a repeated header the first
    route: str = "none"  # the route's path, as the table has it
    is_public: bool = False  # a route that anybody may call
    parameters: dict[str, str] = field(default_factory=dict)  # from the route's path
    notes: dict[str, object] = field(default_factory=dict)  # fields of the log line
    common_headers: list[tuple[str, str]] = field(default_factory=list)  # of any answer
    status: int | None = None  # set when the answer's head was sent
    body_done: bool = False  # the request's body was read to its end
    body: bytes = b""
    key: Key | None = None  # who asks; set for routes of role client
    client_left: bool = False
    idempotency_digest: bytes | None = None  # salted; of the key that this request came with
    is_billed: bool = False  # its row settled with a bill, so it must not run again
    ending: bool = False  # the last piece of the answer is being sent

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head: from here on a failure can no longer become a status."""
        assert self.status is None, "an answer has one head"
        self.status = status
        encoded = [
            (name.encode("ascii"), header_value(value))
            for name, value in (*headers, *self.common_headers)
        ]
        encoded.append((b"x-request-id", self.request_id.encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        self.ending = True
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def reply(
        self,
        status: int,
        data: bytes,
        *,
        headers: Headers = (),
        content_type: str = "application/json",
    ) -> None:
        await self.start(
            status,
            [("content-type", content_type), ("content-length", str(len(data))), *headers],
        )
        await self.end(data)

    async def reply_json(self, value: object, *, status: int = 200, headers: Headers = ()) -> None:
        await self.reply(status, msgspec.json.encode(value), headers=headers)

    async def reply_error(self, error: GatewayError) -> None:
        await self.reply(error.status, error.body(self.request_id), headers=error.headers())


def header_value(value: str) -> bytes:
    """A header holds printable ASCII; a node's or a region's name may be anything."""
    if value.isascii() and value.isprintable():
        return value.encode()
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in value).encode()


def new_request_id() -> str:
    """Ordered by time like a UUID of version 7: 48 bits of milliseconds, then 80 random bits."""
    milliseconds = time.time_ns() // 1_000_000
    return f"{milliseconds:012x}{dice.getrandbits(80):020x}"


def clean_client_id(value: str | None) -> str | None:
    """A client's own request id, fit for a log line: only harmless characters, at most 64."""
    if not value:
        return None
    return "".join(c for c in value[:64] if c.isascii() and (c.isalnum() or c in "-_.:")) or None
