"""From a request's end to the figures of its row: what is billed, what was saved, what is kept.

Whatever it is given, the result fits the schema: a settlement that the file refuses for ever would
hold up every other one behind it.
"""

from __future__ import annotations

import math

import msgspec

from gateway.ledger.rows import Attempt, OpenRow, Settlement
from policies.contract.wire import Usage
from policies.pricing import charge

MAX_TOKENS = (1 << 31) - 1
Value = str | int | float | bytes | None


def check_row(row: OpenRow) -> None:
    """Raise ValueError for a row that could not be written or billed."""
    texts = (row.request_id, row.tenant, row.key_id, row.model, row.path, row.price_version)
    for text in (*texts, row.policy_version, row.node or "-"):
        text.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
    if not all(texts) or not math.isfinite(row.started_at):
        raise ValueError(f"ledger row: an empty id or no time: {row}")
    if not 0 <= row.prompt_tokens <= MAX_TOKENS:
        raise ValueError(f"prompt_tokens: found {row.prompt_tokens}; allowed 0 to {MAX_TOKENS}")
    if not 0 <= row.rates.cached <= row.rates.input or row.rates.output < 0:
        raise ValueError(f"rates: found {row.rates}; allowed 0 <= cached <= input and output >= 0")


def open_values(row: OpenRow, boot: int) -> tuple[Value, ...]:
    """The parameters of schema.OPEN."""
    return (
        row.request_id, boot, row.tenant, row.key_id, row.model, row.path, row.node,
        row.prompt_tokens, row.rates.input, row.rates.cached, row.rates.output,
        row.price_version, row.policy_version, row.started_at,
        row.session_digest, row.page_digest, row.idempotency_digest,
    )  # fmt: skip


def settle_values(row: OpenRow, end: Settlement) -> tuple[Value, ...]:
    """The parameters of schema.SETTLE. A fault of ours bills nothing; its work is an attempt."""
    counted = row.prompt_tokens if end.prompt_tokens is None else _tokens(end.prompt_tokens)
    produced = Usage(
        counted, min(_tokens(end.cached_tokens), counted), _tokens(end.completion_tokens)
    )
    attempts = end.attempts
    billed = produced
    status = end.status if end.status in ("ok", "client_left") else "failed"
    quality = end.quality if end.quality in ("exact", "partial") else "estimated"
    if status == "failed":
        attempts = (*attempts, _failed_attempt(end, produced))
        billed = Usage()
    # What nodes say of tiers is kept where it adds up, and nowhere else.
    tiers = end.tiers if sum(end.tiers.values()) == produced.cached_tokens else {}
    price = charge(billed, row.rates)
    ended_at = end.ended_at if math.isfinite(end.ended_at) else row.started_at
    return (
        status, quality, _text(end.path), _text(end.node), _text(end.prefill_node),
        billed.prompt_tokens, billed.cached_tokens, billed.completion_tokens,
        price.bill, price.discount, ended_at, ended_at,
        end.ttft_s if end.ttft_s is not None and math.isfinite(end.ttft_s) else None,
        _json(tiers, "{}"), _json(attempts, "[]"), row.request_id,
    )  # fmt: skip


def _failed_attempt(end: Settlement, produced: Usage) -> Attempt:
    return Attempt(
        len(end.attempts) + 1,
        end.node,
        "failed",
        produced.prompt_tokens,
        produced.cached_tokens,
        produced.completion_tokens,
        end.prefill_node,
    )


def _tokens(count: int) -> int:
    return min(max(count, 0), MAX_TOKENS)


def _text(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "replace").decode()


def _json(value: object, otherwise: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, TypeError):  # a lone surrogate in a foreign message
        return otherwise
