"""Which conversation a request belongs to, read from what agent harnesses already send.

The order of precedence is that of the field: an explicit affinity header first, then the session
headers of known clients, then fields of the body. A value is a hint and never an authorisation: it
is always combined with tenant and model, and one that breaks the limits is ignored and counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import msgspec

MAX_CHARS = 256
DIGEST_BYTES = 16

HEADERS = (
    "x-session-affinity",  # Workers AI; OpenCode, Crush, pi, Agents SDK
    "x-session-id",  # OpenCode, Crush
    "session-id",  # Codex
    "session_id",  # pi, older Codex
    "thread-id",  # Codex
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-grok-conv-id",
    "x-affinity",  # pi towards Mistral
)
# x-client-request-id is left out on purpose: most SDKs change it with every request.

_LEGACY_USER = re.compile(r"user_[0-9a-f]{64}_account_[0-9a-fA-F-]*_session_([0-9a-zA-Z-]+)")


class BodyHints(msgspec.Struct, frozen=True):
    """The fields of a request body that may name a conversation; any JSON value is tolerated."""

    prompt_cache_key: object = None
    session_id: object = None
    metadata: object = None


@dataclass(frozen=True, slots=True)
class Signal:
    """The first usable value, where it came from, and the sources that broke the limits."""

    value: str | None
    source: str | None
    ignored: tuple[str, ...] = ()


def find_signal(headers: Mapping[str, str], hints: BodyHints) -> Signal:
    """Walk the precedence list. Header names are lower case; an empty value counts as absent."""
    ignored: list[str] = []
    for source, value in _candidates(headers, hints):
        if value is None or value == "":
            continue
        if is_usable(value):
            return Signal(value=value, source=source, ignored=tuple(ignored))
        ignored.append(source)
    return Signal(value=None, source=None, ignored=tuple(ignored))


def is_usable(value: str) -> bool:
    return 1 <= len(value) <= MAX_CHARS and value.isprintable()


def scoped_digest(*, tenant: str, model: str, value: str) -> bytes:
    """16 bytes that stand for the session inside one tenant and model, and for nothing outside.

    Each part is framed by its length, so two different triples never share their bytes.
    """
    digest = sha256(b"kagari-session-1")
    for part in (tenant, model, value):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.digest()[:DIGEST_BYTES]


def _candidates(headers: Mapping[str, str], hints: BodyHints) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = [(name, headers.get(name)) for name in HEADERS]
    metadata = hints.metadata if isinstance(hints.metadata, Mapping) else {}
    found += [
        ("prompt_cache_key", _text(hints.prompt_cache_key)),
        ("session_id (body)", _text(hints.session_id)),
        ("metadata.sessionId", _text(metadata.get("sessionId"))),
        ("metadata.user_id", session_of_user_id(_text(metadata.get("user_id")))),
    ]
    return found


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def session_of_user_id(user_id: str | None) -> str | None:
    """Claude Code's session: the tail of its legacy string, or session_id of its JSON string."""
    if user_id is None:
        return None
    if user_id.startswith("{"):
        try:
            fields = msgspec.json.decode(user_id)
        except (msgspec.DecodeError, RecursionError):
            return None
        return _text(fields.get("session_id")) if isinstance(fields, dict) else None
    match = _LEGACY_USER.fullmatch(user_id)
    return match.group(1) if match else None
