"""Nodes for the operator: the fleet, one node, its role, and taking it out of routing and back."""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct

from gateway.api.exchange import Exchange
from gateway.api.typed_input import decoded
from gateway.errors import GatewayError, near, quote
from gateway.nodes.fleet import OldNode
from gateway.nodes.views import NodeView
from gateway.services import Services
from policies.contract.wire import SPLIT_VERSION, Role


def named_type(kind: Any) -> Any:
    """A type like this one whose structs have names for fields: on the wire they are positional."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        fields = [
            (field.name, named_type(field.type))
            if field.default is NODEFAULT
            else (field.name, named_type(field.type), field.default)
            for field in msgspec.structs.fields(kind)
        ]
        return msgspec.defstruct(kind.__name__, fields, namespace={"__doc__": kind.__doc__})
    arguments = tuple(map(named_type, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, arguments)
    return GenericAlias(tuple, arguments) if get_origin(kind) is tuple else kind


def named(value: object) -> object:
    """A value of such a type, as a mapping all the way down."""
    if isinstance(value, Struct):
        return {name: named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [named(item) for item in value]
    return value


NodeAnswer = named_type(NodeView)
NodeList = msgspec.defstruct("NodeList", [("nodes", GenericAlias(tuple, (NodeAnswer, ...)))])


class DrainAnswer(Struct, frozen=True):
    node_id: str
    draining: bool


class NewRole(Struct, frozen=True, forbid_unknown_fields=True):
    role: Role


class RoleAnswer(Struct, frozen=True):
    """role: as the node says; next_role: what it will be once it has drained, else null."""

    node_id: str
    role: Role
    next_role: Role | None


_new_role = msgspec.json.Decoder(NewRole).decode


async def list_nodes(services: Services, exchange: Exchange) -> None:
    """List every node that is or lately was linked."""
    nodes = [named(node) for node in services.fleet.nodes()]
    await exchange.reply_json({"nodes": nodes})


async def show_node(services: Services, exchange: Exchange) -> None:
    """Show a node: its state, engines, load, pages and the age of its last report."""
    await exchange.reply_json(named(_find(services, exchange.parameters["node"])))


async def drain(services: Services, exchange: Exchange) -> None:
    """Take a node out of routing; what runs there goes on. It outlives reconnects."""
    await _set_drain(services, exchange, drain=True)


async def undrain(services: Services, exchange: Exchange) -> None:
    """Let a node be chosen again."""
    await _set_drain(services, exchange, drain=False)


async def _set_drain(services: Services, exchange: Exchange, *, drain: bool) -> None:
    node_id = _find(services, exchange.parameters["node"]).node_id
    services.fleet.drain(node_id, drain)
    exchange.notes["node"] = node_id
    await exchange.reply_json(DrainAnswer(node_id, drain))


async def set_role(services: Services, exchange: Exchange) -> None:
    """Give a node another role, once what runs there for the old one has ended."""
    wanted = decoded(exchange.body, _new_role, needs="a role")
    node_id = _find(services, exchange.parameters["node"]).node_id
    exchange.notes["node"] = node_id
    try:
        services.fleet.set_role(node_id, wanted.role)
    except OldNode as error:
        raise GatewayError(
            "unsupported",
            field="node",
            found=str(error),
            allowed=f"a node of wire version {SPLIT_VERSION} or later",
            remedy="upgrade the node, or start it with another --role",
        ) from None
    node = _find(services, node_id)
    answer = RoleAnswer(node_id, node.role, node.next_role)
    await exchange.reply_json(answer, status=202 if node.next_role is not None else 200)


def _find(services: Services, name: str) -> NodeView:
    """Raises GatewayError with the nearest names."""
    nodes = {node.node_id: node for node in services.fleet.nodes()}
    if name in nodes:
        return nodes[name]
    nearest = near(name, list(nodes)) or list(nodes)[:3]
    raise GatewayError(
        "node_not_found",
        field="node",
        found=quote(name),
        allowed="one of GET /admin/v1/nodes",
        remedy="did you mean " + " or ".join(map(quote, nearest)) + "?"
        if nearest
        else "start a node first",
    )
