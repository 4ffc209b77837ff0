"""What the ledger is told and what it answers: rows, settlements, refusals, health."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from policies.pricing import Rates

RequestPath = Literal["mixed", "split", "bypass", "upstream"]
Ending = Literal["ok", "client_left", "failed"]
Status = Literal["open", "ok", "client_left", "failed", "orphaned"]
Quality = Literal["exact", "partial", "estimated"]


class LedgerFull(Exception):
    """No row can be opened now: answer 503 and ask the client to retry. The message says why."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OpenRow(Struct, frozen=True):
    """A request that was admitted. request_id is ours, never a client's; started_at is wall time.

    prompt_tokens were counted at admission; they are billed only when the row settles.
    """

    request_id: str
    tenant: str
    key_id: str
    model: str
    path: RequestPath
    prompt_tokens: int
    rates: Rates
    price_version: str
    policy_version: str
    node: str | None
    started_at: float
    session_digest: bytes | None = None  # salted, never the client's value
    page_digest: bytes | None = None  # salted digest of the deepest page keys
    idempotency_digest: bytes | None = None  # salted digest of API key, route and client's key


class Attempt(Struct, frozen=True, omit_defaults=True):
    """One try of a request that did not become its answer; its tokens are not billed.

    prefill_node: of a split, the other node.
    """

    attempt: int
    node: str | None
    outcome: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_node: str | None = None


class Settlement(Struct, frozen=True):
    """How a request ended. ended_at is wall time, ttft_s seconds to the first token.

    tiers: cached tokens by the tier that held them. attempts: earlier tries; of a failed request
    the ledger adds the last one itself, with what was produced, because the row bills nothing.
    prompt_tokens: only where admission could not count them (an upstream without a bundle).
    """

    request_id: str
    status: Ending
    quality: Quality
    node: str | None
    prefill_node: str | None
    path: RequestPath
    cached_tokens: int
    completion_tokens: int
    tiers: dict[str, int]
    attempts: tuple[Attempt, ...]
    ended_at: float
    ttft_s: float | None
    prompt_tokens: int | None = None


class LedgerHealth(Struct, frozen=True):
    """full: the disk refuses writes, so opens are refused and settlements wait in memory."""

    state: Literal["ok", "full", "closed"]
    message: str
    open_rows: int  # opened, not yet settled by their request
    waiting_opens: int
    unsettled: int  # settlements not yet on disk
    oldest_unsettled_s: float
    wal_bytes: int
