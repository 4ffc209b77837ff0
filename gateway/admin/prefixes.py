"""Prefixes for the operator: prompts that many requests begin with, kept computed on all nodes."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.admin.keys import Name
from gateway.api.chat_request import ChatMessage, read_messages
from gateway.api.completion_begin import find_served, tokenised, too_long
from gateway.api.exchange import Exchange
from gateway.api.models import window_of
from gateway.api.tools_request import read_functions
from gateway.api.typed_input import decoded, refuse_field
from gateway.cache.keeper import PinnedOn, render
from gateway.cache.orders import Prefix, new_id
from gateway.errors import GatewayError, near, quote
from gateway.services import Services

MAX_TTL_S = 365 * 86_400.0
MAX_WAIT_S = 60.0
Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT_S, description="Longest wait for nodes' answers.")]


class NewPrefix(Struct, frozen=True, forbid_unknown_fields=True):
    """Give messages, with tools as requests will send them, or prompt, as for /v1/completions."""

    name: Name
    model: str
    tenant: Name = "default"
    messages: tuple[ChatMessage, ...] | None = None
    tools: tuple[dict[str, object], ...] = ()
    prompt: str | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] = 86_400.0
    wait_s: Wait = 15.0


class PrefixAnswer(Struct, frozen=True):
    """Times are wall seconds. pages: the full ones of its tokens, which are what can be kept.

    state: pinned on every engine that serves the model, pending where one has not answered, failed
    where one refused; nodes say which. Its text is not shown.
    """

    prefix_id: str
    name: str
    tenant: str
    model: str
    tokens: int
    pages: int
    created_at: float
    expires_at: float
    state: Literal["pinned", "pending", "failed"]
    nodes: tuple[PinnedOn, ...]


class PrefixList(Struct, frozen=True):
    """Oldest first."""

    prefixes: tuple[PrefixAnswer, ...]


_new_prefix = msgspec.json.Decoder(NewPrefix).decode


async def list_prefixes(services: Services, exchange: Exchange) -> None:
    """List prefixes that have not expired, oldest first."""
    prefixes = tuple(_told(services, prefix) for prefix in services.keeper.prefixes())
    await exchange.reply_json(PrefixList(prefixes))


async def show_prefix(services: Services, exchange: Exchange) -> None:
    """Show a prefix by its id, and what each node says of it."""
    await exchange.reply_json(_told(services, _find(services, exchange.parameters["prefix"])))


async def create_prefix(services: Services, exchange: Exchange) -> None:
    """Pin a prompt on every node that serves its model, and on those that join later."""
    new = decoded(exchange.body, _new_prefix, needs="name, model, and messages or prompt")
    exchange.body = b""
    _check(new)
    served = find_served(services, exchange, new.model)
    now = time.time()
    prefix = Prefix(
        prefix_id=new_id(),
        name=new.name,
        tenant=new.tenant,
        model=served.alias_of or served.name,
        created_at=now,
        expires_at=now + new.ttl_s,
        tokens=0,
        pages=0,
        messages=new.messages,
        tools=new.tools,
        prompt=new.prompt,
    )
    field = "messages" if new.prompt is None else "prompt"
    num_tokens = len(await tokenised(services, served, field, render(prefix, served.text)))
    if num_tokens >= window_of(served.info):
        raise too_long(served, field, f"{num_tokens} tokens")
    size = served.info.page_size
    if num_tokens < size:
        raise refuse_field(
            field, f"{num_tokens} tokens", f"at least a page of {size}", "pin a longer prompt"
        )
    pages = num_tokens // size
    prefix = msgspec.structs.replace(prefix, tokens=num_tokens, pages=pages)
    keeper = services.keeper
    await keeper.pin(prefix)
    exchange.notes["prefix_id"] = prefix.prefix_id
    await keeper.wait(lambda: _told(services, prefix).state != "pending", new.wait_s)
    told = _told(services, prefix)
    await exchange.reply_json(told, status=202 if told.state == "pending" else 200)


async def delete_prefix(services: Services, exchange: Exchange) -> None:
    """Unpin a prefix: its pages are evicted as any others from now on."""
    prefix = _find(services, exchange.parameters["prefix"])
    told = _told(services, prefix)
    exchange.notes["prefix_id"] = prefix.prefix_id
    await services.keeper.unpin(prefix.prefix_id)
    await exchange.reply_json(told)


def _check(new: NewPrefix) -> None:
    if (new.prompt is None) == (new.messages is None):
        found = "neither" if new.prompt is None else "both"
        raise refuse_field("messages", found, "messages or prompt", "send one of the two")
    if new.messages is None and new.tools:
        raise refuse_field(
            "tools", "tools beside a prompt", "tools with messages", "leave them out"
        )
    if new.messages is not None:
        read_messages(new.messages)
        read_functions(new.tools)


def _told(services: Services, prefix: Prefix) -> PrefixAnswer:
    nodes = tuple(services.keeper.pinned_on(prefix))
    states = {node.state for node in nodes} or {"pending"}
    order: tuple[Literal["pending", "failed", "pinned"], ...] = ("pending", "failed", "pinned")
    return PrefixAnswer(
        prefix_id=prefix.prefix_id,
        name=prefix.name,
        tenant=prefix.tenant,
        model=prefix.model,
        tokens=prefix.tokens,
        pages=prefix.pages,
        created_at=prefix.created_at,
        expires_at=prefix.expires_at,
        state=next(state for state in order if state in states),
        nodes=nodes,
    )


def _find(services: Services, prefix_id: str) -> Prefix:
    prefixes = {prefix.prefix_id: prefix for prefix in services.keeper.prefixes()}
    if prefix_id in prefixes:
        return prefixes[prefix_id]
    named = [one.prefix_id for one in prefixes.values() if one.name == prefix_id]
    nearest = named or near(prefix_id, list(prefixes))
    raise GatewayError(
        "prefix_not_found",
        field="prefix",
        found=quote(prefix_id),
        allowed="one of GET /admin/v1/prefixes",
        remedy=f"did you mean {quote(nearest[0])}?" if nearest else "its time may be over",
    )
