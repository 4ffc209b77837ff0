"""Upstreams for the operator: each of their servers, its state and what runs there."""

from __future__ import annotations

from msgspec import Struct

from gateway.api.exchange import Exchange
from gateway.services import Services
from gateway.upstreams.registry import ServerView


class UpstreamList(Struct, frozen=True):
    upstreams: tuple[ServerView, ...]


async def list_upstreams(services: Services, exchange: Exchange) -> None:
    """List the foreign servers behind this gateway; none where none are configured."""
    views = [] if services.upstreams is None else services.upstreams.views()
    await exchange.reply_json(UpstreamList(tuple(views)))
