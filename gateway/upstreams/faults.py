"""An upstream's refusals and faults as ours: whose it is, whether another server may be asked.

What it says of the request itself (4xx) keeps its meaning and its words, for only they can tell
what to mend. What it says of us (401, 403) is our operator's to mend. The words of its faults stay
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from gateway.errors import GatewayError, quote
from policies.breaker import Outcome

if TYPE_CHECKING:
    from gateway.upstreams.server import Server

MESSAGE_CHARS = 400
LONGEST_ADVICE_S = 60.0
# How servers say that a prompt is too long; harnesses compact at our code for it.
TOO_LONG = ("context length", "context window", "context size", "maximum input length", "too long")


class TransportFault(Exception):
    """connect: no connection came about. lost: it broke, or what came was no HTTP. silent: nothing
    came for too long. The message is for the operator: it may name hosts."""

    def __init__(self, kind: Literal["connect", "lost", "silent"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class UpstreamFault(Exception):
    """error: for the client. may_retry: another server may do better, if nothing was sent yet.
    outcome: what it says of the server. told: for the log."""

    def __init__(
        self, error: GatewayError, *, may_retry: bool, outcome: Outcome, told: str
    ) -> None:
        super().__init__(told)
        self.error = error
        self.may_retry = may_retry
        self.outcome = outcome
        self.server: Server | None = None

    def at(self, server: Server) -> UpstreamFault:
        """Where it happened; the first to say so knows."""
        self.server = self.server or server
        return self


class ErrorWords(Struct, frozen=True):
    message: object = None
    code: object = None
    param: object = None
    type: object = None


class _Body(Struct, frozen=True):
    error: ErrorWords | str | None = None
    message: object = None
    code: object = None
    detail: object = None


def read_words(body: bytes) -> ErrorWords:
    """OpenAI's error object, or what older servers write at the top; no error at all is empty."""
    try:
        found = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ErrorWords()
    if isinstance(found.error, ErrorWords):
        return found.error
    return ErrorWords(found.error or found.message or found.detail, found.code)


def refused(status: int, body: bytes, retry_after: str = "") -> UpstreamFault:
    """An answer with another status than 200, or an event that stands for one."""
    words = read_words(body)
    told = f"status {status}: {_shown(words.message)}"
    if status in (401, 403):
        return UpstreamFault(_key_refused(status), may_retry=True, outcome="failed", told=told)
    if status == 429:
        busy = GatewayError(
            "capacity_exceeded",
            field="model",
            found="an upstream that has no room",
            allowed="one that takes requests",
            remedy="wait and send the request again",
            retry_after_s=_seconds(retry_after),
        )
        return UpstreamFault(busy, may_retry=False, outcome="neither", told=told)
    if status == 408 or not 400 <= status < 500:
        outcome: Outcome = "failed" if status != 408 else "neither"
        return UpstreamFault(broken(), may_retry=status >= 500, outcome=outcome, told=told)
    return UpstreamFault(
        _about_request(status, words), may_retry=False, outcome="neither", told=told
    )


def unreachable(fault: TransportFault) -> UpstreamFault:
    """A connection that failed, broke or stayed silent."""
    if fault.kind == "silent":
        late = GatewayError(
            "upstream_timeout",
            found="an upstream that sent nothing for too long",
            allowed="its first byte, and each next one, in time",
            remedy="send the request again",
        )
        return UpstreamFault(late, may_retry=False, outcome="failed", told=str(fault))
    return UpstreamFault(broken(), may_retry=True, outcome="failed", told=str(fault))


def garbled(told: str) -> UpstreamFault:
    """What came was no answer."""
    return UpstreamFault(broken(), may_retry=False, outcome="failed", told=told)


def broken() -> GatewayError:
    return GatewayError(
        "upstream_error",
        found="an upstream that failed before its end",
        allowed="an answer with an end",
        remedy="send the request again; nothing of it was billed",
    )


def _key_refused(status: int) -> GatewayError:
    return GatewayError(
        "upstream_refused",
        found=f"status {status} of the upstream",
        allowed="a server that takes this gateway's key",
        remedy="ask the operator to mend api_key_file of that upstream",
    )


def _about_request(status: int, words: ErrorWords) -> GatewayError:
    message = _shown(words.message)
    lowered = message.lower()
    parameter = words.param if isinstance(words.param, str) and words.param else None
    field = None if parameter is None else quote(parameter).strip('"')
    code = "invalid_request"
    if words.code == "context_length_exceeded" or any(mark in lowered for mark in TOO_LONG):
        code = "context_length_exceeded"
    elif status == 404 and (words.code == "model_not_found" or "model" in lowered):
        code = "model_not_found"
    elif status in (404, 405, 501):
        code = "unsupported"
    elif status == 413:
        code = "request_too_large"
    return GatewayError(
        code,
        field=field,
        found=f"the upstream's refusal: {message}"
        if message
        else f"the upstream's status {status}",
        allowed="what the upstream takes",
        remedy="mend the request",
    )


def _shown(message: object) -> str:
    """Printable, on one line, short."""
    text = message if isinstance(message, str) else "" if message is None else str(message)
    return quote(text, MESSAGE_CHARS)[1:-1]


def _seconds(retry_after: str) -> float:
    try:
        return min(max(float(retry_after), 0.1), LONGEST_ADVICE_S)
    except ValueError:
        return 1.0
