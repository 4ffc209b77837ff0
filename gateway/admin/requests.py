"""Rows of the ledger for the operator: pages of them, and one with its charge worked out."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.admin.paging import After, Limit, read_cursor, write_cursor
from gateway.api.exchange import Exchange
from gateway.api.ledger_read import read_ledger
from gateway.api.typed_input import read_query
from gateway.errors import GatewayError, quote
from gateway.ledger.requests import (
    RequestDetail,
    RequestRow,
    Wanted,
    find_request,
    newest_requests,
)
from gateway.ledger.rows import Status
from gateway.services import Services
from policies.contract.wire import Usage
from policies.pricing import charge

Moment = Annotated[datetime, Meta(tz=True, description="RFC 3339, with its offset or Z.")]
Sequence = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class RequestsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """from <= started_at < to."""

    limit: Limit = 100
    after: After | None = None
    tenant: str | None = None
    key: str | None = None
    model: str | None = None
    status: Status | None = None
    since: Moment | None = msgspec.field(name="from", default=None)
    until: Moment | None = msgspec.field(name="to", default=None)
    request_id: str | None = None


class RequestList(Struct, frozen=True):
    """Newest first. A page may come short, even empty: the end is where next is null."""

    requests: tuple[RequestRow, ...]
    next: str | None


class ChargeTerm(Struct, frozen=True):
    """tokens x rate, exactly."""

    what: Literal["input", "cached", "output"]
    tokens: int
    rate_pico_usd: int
    pico_usd: int


class Arithmetic(Struct, frozen=True):
    """How the charge comes about: the sum of the terms, rounded half up to nano-USD, once.

    full_nano_usd: the same without the cache; what was saved is the difference.
    """

    terms: tuple[ChargeTerm, ...]
    pico_usd: int
    charge_nano_usd: int
    full_nano_usd: int
    saved_nano_usd: int


class RequestAnswer(RequestDetail, frozen=True):
    arithmetic: Arithmetic


async def list_requests(services: Services, exchange: Exchange) -> None:
    """List requests, newest first; never what a client said or was told."""
    query = read_query(exchange, RequestsQuery)
    if query.request_id is not None:
        await exchange.reply_json(await _the_one(services, query, query.request_id))
        return
    before = None if query.after is None else read_cursor(query.after, Sequence)
    page = await read_ledger(
        services.ledger_reader,
        partial(newest_requests, wanted=_wanted(query), limit=query.limit, before=before),
    )
    cursor = None if page.next is None else write_cursor(page.next)
    await exchange.reply_json(RequestList(tuple(page.rows), cursor))


async def show_request(services: Services, exchange: Exchange) -> None:
    """Show a request: its row, tries, tiers, and how its charge was worked out."""
    request_id = exchange.parameters["request"]
    found = await read_ledger(services.ledger_reader, partial(find_request, request_id=request_id))
    if found is None:
        raise GatewayError(
            "request_not_found",
            field="request",
            found=quote(request_id),
            allowed="an x-request-id that this gateway answered and billed",
            remedy="see GET /admin/v1/requests; what was refused has no row",
        )
    fields = {name: getattr(found, name) for name in RequestDetail.__struct_fields__}
    await exchange.reply_json(RequestAnswer(**fields, arithmetic=arithmetic(found)))


def arithmetic(row: RequestRow) -> Arithmetic:
    """From the row's own tokens and rates: a reader can check it against the row's charge."""
    usage = Usage(row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    parts: tuple[tuple[Literal["input", "cached", "output"], int, int], ...] = (
        ("input", usage.prompt_tokens - usage.cached_tokens, row.rates.input),
        ("cached", usage.cached_tokens, row.rates.cached),
        ("output", usage.completion_tokens, row.rates.output),
    )
    terms = tuple(ChargeTerm(what, tokens, rate, tokens * rate) for what, tokens, rate in parts)
    price = charge(usage, row.rates)
    pico_usd = sum(term.pico_usd for term in terms)
    return Arithmetic(terms, pico_usd, price.bill, price.full, price.discount)


def _wanted(query: RequestsQuery) -> Wanted:
    return Wanted(
        tenant=query.tenant,
        key_id=query.key,
        model=query.model,
        status=query.status,
        since=None if query.since is None else query.since.timestamp(),
        until=None if query.until is None else query.until.timestamp(),
    )


async def _the_one(services: Services, query: RequestsQuery, request_id: str) -> RequestList:
    """A list of the row with this id, if the other filters want it too."""
    row = await read_ledger(services.ledger_reader, partial(find_request, request_id=request_id))
    if row is None or not _wanted(query).matches(row):
        return RequestList((), None)
    names = RequestRow.__struct_fields__
    return RequestList((RequestRow(*(getattr(row, name) for name in names)),), None)
