"""Totals for the operator, from the rollups: by day, tenant, key or model."""

from __future__ import annotations

from datetime import date
from functools import partial

import msgspec
from msgspec import Struct

from gateway.admin.paging import Limit
from gateway.api.exchange import Exchange
from gateway.api.typed_input import read_query, refuse_field
from gateway.errors import GatewayError
from gateway.ledger.reader import LedgerUnreadable
from gateway.ledger.usage import Dimension, Scope, UsageLine, usage_report
from gateway.services import Services


class UsageQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Days are UTC, of the request's end, both ends inclusive."""

    group_by: tuple[Dimension, ...] = ("day",)
    since: date | None = msgspec.field(name="from", default=None)
    until: date | None = msgspec.field(name="to", default=None)
    tenant: str | None = None
    key: str | None = None
    model: str | None = None
    limit: Limit = 1000


class UsageSum(Struct, frozen=True):
    """Settled requests of one group; what was not asked to group by is null.

    Full price = charge + saved; cached_share = cached ÷ prompt tokens.
    """

    day: str | None
    tenant: str | None
    key_id: str | None
    model: str | None
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charge_nano_usd: int
    saved_nano_usd: int
    cached_share: float


class UsageAnswer(Struct, frozen=True):
    """total is over all groups, also those beyond the limit, where is_cut says so."""

    group_by: tuple[Dimension, ...]
    lines: tuple[UsageSum, ...]
    total: UsageSum
    is_cut: bool


async def show_usage(services: Services, exchange: Exchange) -> None:
    """Show requests, tokens, charge and what caching saved, in groups and in total."""
    query = read_query(exchange, UsageQuery)
    if len(set(query.group_by)) < len(query.group_by):
        raise refuse_field("group_by", "a group twice", "each once", "name it once")
    days = {
        name: day.isoformat()
        for name, day in (("since_day", query.since), ("until_day", query.until))
        if day is not None
    }
    scope = Scope(tenant=query.tenant, key_id=query.key, model=query.model, **days)
    try:
        report = await services.ledger_reader.read(
            partial(usage_report, dimensions=query.group_by, scope=scope, max_lines=query.limit)
        )
    except LedgerUnreadable:
        raise GatewayError(
            "ledger_unreadable",
            field="from",
            found="totals that could not be read in time",
            allowed="what can be summed within seconds",
            remedy="ask for fewer days, or name a tenant, key or model",
            retry_after_s=1.0,
        ) from None
    await exchange.reply_json(
        UsageAnswer(
            query.group_by, tuple(map(_sum, report.lines)), _sum(report.total), report.is_cut
        )
    )


def _sum(line: UsageLine) -> UsageSum:
    figures = msgspec.structs.asdict(line)
    return UsageSum(**figures, cached_share=round(line.cached_share, 4))
