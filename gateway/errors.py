"""One table of everything a client may be told has gone wrong, and the one way it is told.

Whose fault is in the type column: invalid_request_error is the caller's, rate_limit_error is load,
server_error is ours. `docs/errors.md` has a section for each code; a test holds page and table
together. Texts of libraries never reach a client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import msgspec

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
]


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """status: HTTP. number: the Workers AI or Cloudflare API number. should_retry: x-should-retry,
    None leaves it to the client's own rule for the status."""

    code: str
    status: int
    number: int
    type: ErrorType
    should_retry: bool | None
    summary: str


_KINDS = (
    ErrorKind("invalid_json", 400, 5004, "invalid_request_error", False, "The body is not JSON."),
    ErrorKind("missing_body", 400, 3003, "invalid_request_error", False, "The body is empty."),
    ErrorKind(
        "invalid_request",
        400,
        5004,
        "invalid_request_error",
        False,
        "A field is missing, of a wrong type, or out of its range.",
    ),
    ErrorKind(
        "unsupported",
        400,
        5004,
        "invalid_request_error",
        False,
        "A field asks for something that this version cannot do.",
    ),
    ErrorKind(
        "context_length_exceeded",
        400,
        5004,
        "invalid_request_error",
        False,
        "The prompt leaves no room in the model's context.",
    ),
    ErrorKind(
        "no_chat_template",
        400,
        5004,
        "invalid_request_error",
        False,
        "The model was published without a chat template.",
    ),
    ErrorKind(
        "invalid_api_key",
        401,
        10000,
        "authentication_error",
        False,
        "The key is missing or is not one of this gateway's.",
    ),
    ErrorKind("not_found", 404, 7000, "invalid_request_error", False, "No route has that path."),
    ErrorKind(
        "model_not_found", 404, 5007, "invalid_request_error", False, "No such model is served now."
    ),
    ErrorKind(
        "node_not_found", 404, 7003, "invalid_request_error", False, "No node has that name."
    ),
    ErrorKind("key_not_found", 404, 7003, "invalid_request_error", False, "No key has that name."),
    ErrorKind(
        "request_not_found", 404, 7003, "invalid_request_error", False, "No row has that id."
    ),
    ErrorKind(
        "session_not_found", 404, 7003, "invalid_request_error", False, "No such session is known."
    ),
    ErrorKind(
        "prefix_not_found", 404, 7003, "invalid_request_error", False, "No prefix has that id."
    ),
    ErrorKind(
        "tenant_not_found", 404, 7003, "invalid_request_error", False, "No key is of that tenant."
    ),
    ErrorKind(
        "method_not_allowed",
        405,
        7001,
        "invalid_request_error",
        False,
        "The route exists, but not with that method.",
    ),
    ErrorKind(
        "body_timeout",
        408,
        3007,
        "invalid_request_error",
        True,
        "The body arrived too slowly.",
    ),
    ErrorKind(
        "deadline_exceeded",
        408,
        3007,
        "server_error",
        True,
        "The answer was not complete within the request's deadline.",
    ),
    ErrorKind(
        "aborted", 408, 3008, "server_error", True, "The stream was given up before its end."
    ),
    ErrorKind(
        "key_exists", 409, 10014, "invalid_request_error", False, "A live key has that name."
    ),
    ErrorKind(
        "prefix_exists",
        409,
        10014,
        "invalid_request_error",
        False,
        "The tenant has a prefix of that name.",
    ),
    ErrorKind(
        "pin_quota_exceeded",
        409,
        5004,
        "invalid_request_error",
        False,
        "The tenant would pin more pages than it may.",
    ),
    ErrorKind(
        "idempotency_in_progress",
        409,
        3040,
        "invalid_request_error",
        True,
        "The request that came with this idempotency key has not ended, and cannot be joined.",
    ),
    ErrorKind(
        "idempotent_answer_gone",
        409,
        5004,
        "invalid_request_error",
        False,
        "This idempotency key was served and billed once; its answer is no longer kept.",
    ),
    ErrorKind(
        "request_too_large",
        413,
        3006,
        "invalid_request_error",
        False,
        "The body is larger than this route takes.",
    ),
    ErrorKind(
        "unsupported_encoding",
        415,
        5004,
        "invalid_request_error",
        False,
        "The body is compressed or is not JSON by its content type.",
    ),
    ErrorKind(
        "idempotency_key_reused",
        422,
        5004,
        "invalid_request_error",
        False,
        "The idempotency key came with another request before.",
    ),
    ErrorKind(
        "rate_limit_exceeded",
        429,
        3040,
        "rate_limit_error",
        True,
        "The key sent more requests a minute, or at a time, than it may.",
    ),
    ErrorKind(
        "capacity_exceeded",
        429,
        3040,
        "rate_limit_error",
        True,
        "The fleet has no room for this request right now.",
    ),
    ErrorKind(
        "quota_exceeded",
        429,
        3036,
        "rate_limit_error",
        False,
        "The key has used up what it was given; waiting a moment does not help.",
    ),
    ErrorKind(
        "headers_too_large",
        431,
        3006,
        "invalid_request_error",
        False,
        "The request's headers are larger than the gateway takes.",
    ),
    ErrorKind(
        "server_error", 500, 5000, "server_error", True, "A fault of ours that has no better name."
    ),
    ErrorKind(
        "engine_error",
        502,
        5000,
        "server_error",
        True,
        "The engine that ran the request ended or broke it off.",
    ),
    ErrorKind(
        "page_integrity",
        502,
        5000,
        "server_error",
        True,
        "A page of the KV cache did not carry the expected tag; only this request was ended.",
    ),
    ErrorKind(
        "logits_not_finite",
        502,
        5000,
        "server_error",
        True,
        "The model's logits overflowed or were not numbers; only this request was ended.",
    ),
    ErrorKind("node_lost", 502, 5000, "server_error", True, "The link to the node was cut."),
    ErrorKind("engine_lost", 502, 5000, "server_error", True, "The engine's process ended."),
    ErrorKind(
        "transfer_refused",
        502,
        5000,
        "server_error",
        True,
        "An engine would not take part in moving a prompt's pages.",
    ),
    ErrorKind(
        "transfer_lost",
        502,
        5000,
        "server_error",
        True,
        "The connection that brought a prompt's pages broke.",
    ),
    ErrorKind(
        "transfer_timeout",
        502,
        5000,
        "server_error",
        True,
        "A prompt's pages did not come in time.",
    ),
    ErrorKind(
        "transfer_corrupt",
        502,
        5000,
        "server_error",
        True,
        "A prompt's pages did not arrive as they were sent.",
    ),
    ErrorKind(
        "transfer_layout",
        502,
        5000,
        "server_error",
        True,
        "The two engines' pages cannot be converted into each other.",
    ),
    ErrorKind(
        "upstream_error",
        502,
        5000,
        "server_error",
        True,
        "The foreign server that ran the request failed or broke it off.",
    ),
    ErrorKind(
        "upstream_refused",
        502,
        5000,
        "server_error",
        False,
        "The foreign server does not take this gateway's key.",
    ),
    ErrorKind(
        "upstream_timeout",
        504,
        3007,
        "server_error",
        True,
        "The foreign server that ran the request sent nothing for too long.",
    ),
    ErrorKind(
        "slow_reader",
        408,
        3008,
        "invalid_request_error",
        False,
        "The client read so slowly that too many tokens were waiting for it.",
    ),
    ErrorKind("no_node", 503, 3040, "server_error", True, "No node can serve the model now."),
    ErrorKind(
        "ledger_full",
        503,
        3040,
        "server_error",
        True,
        "The ledger cannot take the request's row; nothing is served that cannot be billed.",
    ),
    ErrorKind(
        "ledger_unreadable",
        503,
        3040,
        "server_error",
        True,
        "The ledger could not be read in time.",
    ),
    ErrorKind("draining", 503, 3040, "server_error", True, "The gateway is shutting down."),
)

KINDS: dict[str, ErrorKind] = {kind.code: kind for kind in _KINDS}


class ErrorDetail(msgspec.Struct, frozen=True):
    """The wire form: OpenAI's four members first, then ours."""

    message: str
    type: str
    param: str | None
    code: str
    number: int
    found: str | None = None
    allowed: str | None = None
    remedy: str | None = None
    docs: str | None = None
    request_id: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class GatewayError(Exception):
    """Raised anywhere before the first byte; `gateway/app.py` turns it into a response."""

    def __init__(
        self,
        code: str,
        *,
        field: str | None = None,
        found: str = "",
        allowed: str = "",
        remedy: str = "",
        message: str | None = None,
        retry_after_s: float | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.kind = KINDS[code]
        self.field = field
        self.found = found
        self.allowed = allowed
        self.remedy = remedy
        self.message = message or sentence(self.kind, field, found, allowed, remedy)
        self.retry_after_s = retry_after_s
        self.extra_headers = tuple(headers)
        super().__init__(f"{code}: {self.message}")

    @property
    def status(self) -> int:
        return self.kind.status

    @property
    def code(self) -> str:
        return self.kind.code

    def body(self, request_id: str | None = None) -> bytes:
        return msgspec.json.encode(
            ErrorBody(
                ErrorDetail(
                    message=self.message,
                    type=self.kind.type,
                    param=self.field,
                    code=self.kind.code,
                    number=self.kind.number,
                    found=self.found or None,
                    allowed=self.allowed or None,
                    remedy=self.remedy or None,
                    docs=f"docs/errors.md#{self.kind.code}",
                    request_id=request_id,
                )
            )
        )

    def headers(self) -> list[tuple[str, str]]:
        """Retry advice that the official SDKs and the harnesses obey, and what the raiser added."""
        found = list(self.extra_headers)
        if self.kind.should_retry is not None:
            found.append(("x-should-retry", "true" if self.kind.should_retry else "false"))
        if self.retry_after_s is not None:
            milliseconds = max(1, math.ceil(self.retry_after_s * 1000))
            found.append(("retry-after", str(math.ceil(milliseconds / 1000))))
            found.append(("retry-after-ms", str(milliseconds)))
        return found


def sentence(kind: ErrorKind, field: str | None, found: str, allowed: str, remedy: str) -> str:
    """The four parts as one sentence; a part that is empty is left out."""
    text = f"{field}: " if field else ""
    text += kind.summary.removesuffix(".")
    if found:
        text += f" — found {found}"
    if allowed:
        text += f", allowed is {allowed}"
    if remedy:
        text += f"; {remedy}"
    return text + "."


# Names that engines and agents use between themselves, and what a client is told instead.
CLIENT_CODE = {
    "engine_full": "capacity_exceeded",
    "node_draining": "no_node",
    "pool_too_small": "context_length_exceeded",
    "ttft_missed": "capacity_exceeded",
}
FOUND = {"node_draining": "a node that takes nothing new, and no other that serves the model"}


def fault(code: str) -> GatewayError:
    """An engine's or node's failure by its name; a name we do not know is engine_error.

    The node's own words are not passed on: they may hold paths or addresses of the node.
    """
    told = CLIENT_CODE.get(code, code)
    kind = KINDS.get(told, KINDS["engine_error"])
    return GatewayError(
        kind.code,
        found=FOUND.get(code, "a stream that broke off before its end"),
        allowed="a stream with an end",
        remedy="send the request again; nothing of it was billed"
        if kind.should_retry
        else f"see docs/errors.md#{kind.code}",
        retry_after_s=1.0 if kind.status in (429, 503) else None,
    )


def late_first_token(expected_s: float | None, retry_after_s: float) -> GatewayError:
    """No engine would answer within what the key allows. expected_s: after which the best would."""
    found = "a first token that would come later"
    if expected_s is not None:
        found = f"a first token after {expected_s:.3g} s at best"
    return GatewayError(
        "capacity_exceeded",
        field="model",
        found=found,
        allowed="one within the key's ttft_deadline_ms",
        remedy="send the request again when there is less to do, or raise the key's deadline",
        retry_after_s=retry_after_s,
    )


def quote(value: str, limit: int = 80) -> str:
    """What a client sent, fit for an error text: printable, short, in quotes."""
    shown = value if len(value) <= limit else value[:limit] + "…"
    return '"' + "".join(c if c.isprintable() else "·" for c in shown) + '"'


def near(name: str, names: Sequence[str], limit: int = 3) -> list[str]:
    """The nearest of names, best first; the comparison is bounded for hostile lengths."""
    return get_close_matches(name[:200], [n for n in names if len(n) <= 200], n=limit, cutoff=0.5)
