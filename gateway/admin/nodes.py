"""The operator's view of the fleet: GET /admin/v1/nodes, and draining one node."""

from __future__ import annotations

import msgspec

from gateway.api.exchange import Exchange
from gateway.errors import GatewayError, near, quote
from gateway.services import Services


async def list_nodes(services: Services, exchange: Exchange) -> None:
    nodes = [named(node) for node in services.fleet.nodes()]
    await exchange.reply_json({"nodes": nodes})


def named(value: object) -> object:
    """A struct as a mapping, all the way down: on the wire fields are positional, here named."""
    if isinstance(value, msgspec.Struct):
        return {name: named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [named(item) for item in value]
    return value


async def drain(services: Services, exchange: Exchange) -> None:
    await _set_drain(services, exchange, drain=True)


async def undrain(services: Services, exchange: Exchange) -> None:
    await _set_drain(services, exchange, drain=False)


async def _set_drain(services: Services, exchange: Exchange, *, drain: bool) -> None:
    name = exchange.parameters["node"]
    ids = [node.node_id for node in services.fleet.nodes()]
    if name not in ids:
        nearest = near(name, ids) or ids[:3]
        raise GatewayError(
            "node_not_found",
            field="node",
            found=quote(name),
            allowed="one of GET /admin/v1/nodes",
            remedy="did you mean " + " or ".join(map(quote, nearest)) + "?"
            if nearest
            else "start a node first",
        )
    services.fleet.drain(name, drain)
    await exchange.reply_json({"node_id": name, "draining": drain})
