"""Standing orders, kept in home: prefixes to pin on every node, tenants to forget on every node.

They outlive the gateway, because nodes come and go: one that joins later is told then.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from gateway.api.chat_request import ChatMessage

ORDERS_NAME = "cache.json"
MAX_PREFIXES = 1024
MAX_PURGES = 256  # the oldest go; a later purge of a tenant replaces the earlier one
MAX_PURGE_S = 365 * 86_400.0  # then a node that never came back is not waited for


class OrdersError(OSError):
    """The file cannot be used; the message says what to do."""


class Prefix(Struct, frozen=True):
    """A prompt that many requests begin with; either messages (with tools) or prompt is given.

    Its text is kept, not its tokens: it is rendered for each tokenizer that serves the model.
    Times are wall seconds. tokens and pages: as rendered when it was made.
    """

    prefix_id: str
    name: str
    tenant: str
    model: str
    created_at: float
    expires_at: float
    tokens: int
    pages: int
    messages: tuple[ChatMessage, ...] | None = None
    tools: tuple[dict[str, object], ...] = ()
    prompt: str | None = None


class Purge(Struct, frozen=True):
    """done: (node_id, model) of engines that have forgotten the tenant since."""

    purge_id: str
    tenant: str
    asked_at: float
    done: frozenset[tuple[str, str]] = frozenset()


class Orders(Struct, frozen=True):
    prefixes: tuple[Prefix, ...] = ()
    purges: tuple[Purge, ...] = ()


def new_id() -> str:
    return secrets.token_hex(16)


def load_orders(path: Path) -> Orders:
    """Raises OrdersError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Orders)
    except FileNotFoundError:
        return Orders()
    except (OSError, msgspec.MsgspecError) as error:
        raise OrdersError(
            f"{path}: found {error}; allowed is a file that this gateway wrote; restore it from a"
            " backup, or move it away: then nothing is pinned, and nodes that are away now keep"
            " what they were to forget"
        ) from error


def save_orders(path: Path, orders: Orders) -> None:
    """Whole or not at all, and on disk when it returns. Blocks."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(orders))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
