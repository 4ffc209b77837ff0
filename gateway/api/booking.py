"""The ledger's row and the metrics of a completion, whoever computes it: our engines or another."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gateway.api.exchange import Exchange
from gateway.errors import GatewayError
from gateway.ledger.keys import Key
from gateway.ledger.rows import Ending, LedgerFull, OpenRow, RequestPath
from gateway.services import Services
from gateway.telemetry import Metrics
from policies.contract.wire import Usage
from policies.pricing import Rates


async def open_row(
    services: Services,
    exchange: Exchange,
    key: Key,
    *,
    model: str,
    path: RequestPath,
    prompt_tokens: int,
    rates: Rates,
    node: str,
    session: bytes | None,
    deepest_key: bytes | None,
) -> None:
    """Returns when the row is committed; nothing is sent to the client before. LedgerFull."""
    salted = services.home.salted
    await services.ledger.open(
        OpenRow(
            request_id=exchange.request_id,
            tenant=key.tenant,
            key_id=key.key_id,
            model=model,
            path=path,
            prompt_tokens=prompt_tokens,
            rates=rates,
            price_version=services.prices.version,
            policy_version=services.policy_version,
            node=node,
            started_at=time.time(),
            session_digest=None if session is None else salted(session),
            page_digest=None if deepest_key is None else salted(deepest_key),
            idempotency_digest=exchange.idempotency_digest,
        )
    )


def ledger_full(refusal: LedgerFull) -> GatewayError:
    return GatewayError(
        "ledger_full",
        found="a ledger that takes no rows",
        allowed="requests that can be billed",
        remedy="send the request again; the operator sees the reason at /readyz",
        retry_after_s=refusal.retry_after_s,
    )


def tell_completion(
    metrics: Metrics,
    model: str,
    status: Ending,
    usage: Usage,
    tiers: Mapping[str, int],
    ttft_s: float | None,
    path: RequestPath,
) -> None:
    """Tokens count as the ledger counts them: what failed bills none."""
    metrics.count("kagari_completions", model=model, outcome=status)
    metrics.count("kagari_paths", model=model, path=path)
    if status != "failed":
        for tier, tokens in tiers.items():
            metrics.count("kagari_cached_tier_tokens", tokens, model=model, tier=tier)
        metrics.count("kagari_prompt_tokens", usage.prompt_tokens, model=model)
        metrics.count("kagari_cached_tokens", usage.cached_tokens, model=model)
        metrics.count("kagari_completion_tokens", usage.completion_tokens, model=model)
    if ttft_s is not None:
        metrics.observe("kagari_ttft_seconds", ttft_s, model=model)
