"""A read of the ledger on behalf of a client, whose failure is told like any other."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from gateway.errors import GatewayError
from gateway.ledger.reader import LedgerReader, LedgerUnreadable

T = TypeVar("T")


async def read_ledger(reader: LedgerReader, query: Callable[[sqlite3.Connection], T]) -> T:
    """Raises GatewayError (503)."""
    try:
        return await reader.read(query)
    except LedgerUnreadable:
        raise GatewayError(
            "ledger_unreadable",
            found="a ledger that does not answer",
            allowed="an answer within seconds",
            remedy="send the request again",
            retry_after_s=1.0,
        ) from None
