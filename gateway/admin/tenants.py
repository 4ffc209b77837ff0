"""Forgetting a tenant: its pages leave every tier of every node, and it is told what is left."""

from __future__ import annotations

from msgspec import Struct

from gateway.admin.keys import change_keys
from gateway.admin.prefixes import Wait
from gateway.api.exchange import Exchange
from gateway.api.typed_input import read_query
from gateway.cache.keeper import PurgedOn
from gateway.errors import GatewayError, near, quote
from gateway.services import Services

OWN_TENANT = "default"  # of keys that are given on the command line, which no book has


class PurgeQuery(Struct, frozen=True, forbid_unknown_fields=True):
    wait_s: Wait = 15.0


class PurgeAnswer(Struct, frozen=True):
    """complete: every engine that is or lately was linked has answered, and nothing is left.

    What is not complete goes on: a node that is away is told when it comes back, also by a gateway
    that was restarted meanwhile. pages: removed so far, all tiers together.
    """

    purge_id: str
    tenant: str
    complete: bool
    pages: int
    prefixes_removed: int
    nodes: tuple[PurgedOn, ...]


async def purge_cache(services: Services, exchange: Exchange) -> None:
    """Remove a tenant's pages from all tiers of all nodes, and its prefixes."""
    query = read_query(exchange, PurgeQuery)
    tenant = await _known(services, exchange.parameters["tenant"])
    keeper = services.keeper
    purge, num_prefixes = await keeper.purge(tenant)
    await keeper.wait(lambda: keeper.is_answered(purge), query.wait_s)
    nodes = tuple(keeper.purged_on(purge))
    complete = all([one.state == "purged" for one in nodes])
    exchange.notes.update(purge_id=purge.purge_id, tenant=tenant, complete=complete)
    await exchange.reply_json(
        PurgeAnswer(
            purge_id=purge.purge_id,
            tenant=tenant,
            complete=complete,
            pages=sum([one.pages for one in nodes]),
            prefixes_removed=num_prefixes,
            nodes=nodes,
        ),
        status=200 if complete else 202,
    )


async def _known(services: Services, name: str) -> str:
    """A name that was misspelt would purge nothing and look like success."""
    keys = await change_keys(services, lambda book: book.list())
    tenants = {OWN_TENANT, *(key.tenant for key in keys)}
    if name in tenants:
        return name
    nearest = near(name, sorted(tenants))
    raise GatewayError(
        "tenant_not_found",
        field="tenant",
        found=quote(name),
        allowed="the tenant of a key, revoked ones too",
        remedy=f"did you mean {quote(nearest[0])}?" if nearest else "see GET /admin/v1/keys",
    )
