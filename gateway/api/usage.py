"""GET /v1/usage: what the caller's own key used, what it cost, what caching saved, what is left.

    ?from=2026-11-01&to=2026-11-29        UTC days, both inclusive; the last 30 days by default

Sums hold settled requests, which they are within 0.1 s of their end; what still runs is counted in
`open_requests` and in nothing else.
"""

from __future__ import annotations

import time
from datetime import UTC, date, datetime, timedelta
from functools import partial
from urllib.parse import parse_qsl

import msgspec

from gateway.api.exchange import Exchange
from gateway.api.ledger_read import read_ledger
from gateway.errors import GatewayError, quote
from gateway.ledger.account import Account, AccountLine, account_of
from gateway.services import Services
from policies.pricing import usd

MAX_DAYS = 366
DEFAULT_DAYS = 30


async def show_usage(services: Services, exchange: Exchange) -> None:
    key = exchange.key
    assert key is not None, "the route's role is client"
    first, last = read_range(exchange.scope["query_string"], datetime.now(UTC).date())
    account = await read_ledger(
        services.ledger_reader,
        partial(
            account_of,
            key_id=key.key_id,
            tenant=key.tenant,
            first_day=first.isoformat(),
            last_day=last.isoformat(),
        ),
    )
    rate = services.admission.rate(key.key_id, time.monotonic())
    await exchange.reply_json(
        {
            "object": "usage",
            "key": {"id": key.key_id, "name": key.name, "tenant": key.tenant},
            "from": first.isoformat(),
            "to": last.isoformat(),
            **_fields(account.total),
            "open_requests": account.open_requests,
            "remaining": {
                "nano_usd": None,  # a key has no budget
                "usd": None,
                "tokens": None,
                "requests": None if rate is None else rate.remaining,
                "requests_reset_s": None if rate is None else round(rate.reset_s, 3),
            },
            **_groups(account),
        },
        headers=[("cache-control", "no-store")],
    )


def _groups(account: Account) -> dict[str, object]:
    return {
        "by_day": [{"day": day, **_fields(line)} for day, line in account.by_day],
        "by_model": [{"model": model, **_fields(line)} for model, line in account.by_model],
    }


def _fields(line: AccountLine) -> dict[str, object]:
    share = line.cached_tokens / line.prompt_tokens if line.prompt_tokens else 0.0
    return {
        **msgspec.structs.asdict(line),
        "charge_usd": usd(line.charge_nano_usd),
        "saved_usd": usd(line.saved_nano_usd),
        "cached_share": round(share, 6),
    }


def read_range(query: bytes, today: date) -> tuple[date, date]:
    """The first and last day asked for; raises GatewayError (400). Other parameters are ignored."""
    given = {
        name: value
        for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        if name in ("from", "to")
    }
    last = _day("to", given.get("to"), today)
    first = _day("from", given.get("from"), last - timedelta(min(DEFAULT_DAYS - 1, _room(last))))
    days = (last - first).days + 1
    if not 1 <= days <= MAX_DAYS:
        raise GatewayError(
            "invalid_request",
            field="from",
            found=f"{first} to {last}",
            allowed=f"1 to {MAX_DAYS} days, from no later than to",
            remedy="ask for fewer days, several times",
        )
    return first, last


def _room(day: date) -> int:
    return day.toordinal() - 1


def _day(field: str, text: str | None, default: date) -> date:
    if text is None:
        return default
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).date()
    except ValueError:
        raise GatewayError(
            "invalid_request",
            field=field,
            found=quote(text),
            allowed="a UTC day as YYYY-MM-DD",
            remedy="mend it, or leave it out",
        ) from None
