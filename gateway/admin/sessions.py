"""A session for the operator: its home and its pages. Clients' own values are never shown.

A session is asked for by what the client sent, or by the salted digest that its rows carry.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gateway.api.exchange import Exchange
from gateway.api.typed_input import decoded, refuse_field
from gateway.errors import GatewayError, quote
from gateway.nodes.views import Residence
from gateway.services import Services
from policies.affinity import DIGEST_BYTES, MAX_CHARS, is_usable, scoped_digest

KEYS_A_TURN = 500  # digests computed before others may run: half a millisecond


class SessionLookup(Struct, frozen=True, forbid_unknown_fields=True):
    """What a client sent to name its conversation, and for which tenant and model."""

    value: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
    model: str
    tenant: str = "default"


class SessionAnswer(Struct, frozen=True):
    """Times are wall seconds. session: the digest that the ledger's rows carry, in hex.

    home: the node of its last turn, since home_since. resident: the engines that hold the deepest
    of the prompt_pages full pages of its last prompt, and with it, as a rule, all before it.
    """

    session: str
    home: str
    home_since: float
    last_seen: float
    prompt_pages: int
    resident: tuple[Residence, ...]


_lookup = msgspec.json.Decoder(SessionLookup).decode


async def look_up_session(services: Services, exchange: Exchange) -> None:
    """Find a session by the client's own value, its tenant and its model."""
    asked = decoded(exchange.body, _lookup, needs="value and model")
    if not is_usable(asked.value):
        raise refuse_field(
            "value",
            "characters that are not printable",
            "printable characters",
            "send the value as the client sends it",
        )
    served = services.fleet.model(asked.model)
    model = asked.model if served is None else served.alias_of or served.name
    key = scoped_digest(tenant=asked.tenant, model=model, value=asked.value)
    await _reply(services, exchange, key, found="a value that no turn came with lately")


async def show_session(services: Services, exchange: Exchange) -> None:
    """Find a session by the digest that the ledger's rows carry."""
    text = exchange.parameters["digest"]
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_BYTES:
        raise refuse_field(
            "digest",
            quote(text),
            f"{2 * DIGEST_BYTES} hexadecimal digits",
            "copy `session` of a row of GET /admin/v1/requests",
        )
    key = await _find(services, digest)
    await _reply(services, exchange, key, found=quote(text))


async def _find(services: Services, digest: bytes) -> bytes | None:
    """The session whose salted digest this is. The book knows only unsalted ones: try them all."""
    for number, key in enumerate(services.fleet.session_keys()):
        if services.home.salted(key) == digest:
            return key
        if number % KEYS_A_TURN == KEYS_A_TURN - 1:
            await asyncio.sleep(0)
    return None


async def _reply(services: Services, exchange: Exchange, key: bytes | None, *, found: str) -> None:
    session = None if key is None else services.fleet.session(key)
    if key is None or session is None:
        raise GatewayError(
            "session_not_found",
            field="session",
            found=found,
            allowed="a session that this gateway has placed and not forgotten since",
            remedy="check value, tenant and model; its rows are in GET /admin/v1/requests",
        )
    now = time.time()
    await exchange.reply_json(
        SessionAnswer(
            session=services.home.salted(key).hex(),
            home=session.home,
            home_since=now - session.home_age_s,
            last_seen=now - session.idle_s,
            prompt_pages=session.prompt_pages,
            resident=session.resident,
        )
    )
