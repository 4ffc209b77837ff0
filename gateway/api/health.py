"""Probes and the front door: none spends a token, none tells versions to strangers."""

from __future__ import annotations

from typing import get_args

from msgspec import Struct

from gateway.api.exchange import Exchange
from gateway.nodes.tier_figures import tell_tiers
from gateway.services import Services
from gateway.upstreams.registry import tell_servers
from policies.contract.wire import Role


class Readiness(Struct, frozen=True):
    """reasons: what is missing while it is not ready."""

    ready: bool
    reasons: list[str]


async def live(_services: Services, exchange: Exchange) -> None:
    """The process answers; nothing more is claimed."""
    await exchange.reply(200, b"ok\n", content_type="text/plain")


async def started(services: Services, exchange: Exchange) -> None:
    """Every listener is up."""
    ok = services.started
    await exchange.reply(
        200 if ok else 503, b"started\n" if ok else b"starting\n", content_type="text/plain"
    )


async def ready(services: Services, exchange: Exchange) -> None:
    """Ready comes from progress: a node whose reports are fresh, and a ledger that takes rows."""
    reasons: list[str] = []
    if not services.started:
        reasons.append("starting")
    if services.draining.is_set():
        reasons.append("draining")
    if not services.fleet.models() and not (services.upstreams and services.upstreams.models()):
        reasons.append("no_node_ready")
    if services.ledger.health().state != "ok":
        reasons.append("ledger_" + services.ledger.health().state)
    await exchange.reply_json(Readiness(not reasons, reasons), status=503 if reasons else 200)


async def root(_services: Services, exchange: Exchange) -> None:
    """The front door says where the API is."""
    await exchange.reply(200, b"kagari: the API is under /v1\n", content_type="text/plain")


async def metrics(services: Services, exchange: Exchange) -> None:
    """Prometheus text; gauges are read at the moment of asking."""
    board = services.metrics
    board.set("kagari_requests_in_flight", services.admission.in_flight)
    board.set("kagari_reserved_tokens", services.admission.reserved_tokens)
    board.set("kagari_ledger_open_rows", services.ledger.health().open_rows)
    nodes = services.fleet.nodes()
    tell_tiers(board, nodes)
    states = [node.state for node in nodes]
    for state in ("joining", "ready", "suspect", "draining", "lost"):
        board.set("kagari_nodes", states.count(state), state=state)
    roles = [node.role for node in nodes if node.state == "ready"]
    for role in get_args(Role):
        board.set("kagari_node_roles", roles.count(role), role=role)
    for outcome, total in services.fleet.pairs.outcomes.items():
        board.reach("kagari_split", total, outcome=outcome)
    for code, total in services.fleet.pairs.failures.items():
        board.reach("kagari_split_failures", total, code=code)
    for gauge in ("kagari_queued_requests", "kagari_queued_tokens"):
        board.clear(gauge)
    for node in nodes:
        for engine in node.engines:
            place = {"node": node.node_id, "model": engine.info.model}
            board.set("kagari_queued_requests", engine.queued_requests, **place)
            board.set("kagari_queued_tokens", engine.queued_tokens, **place)
    for reason, total in services.fleet.queues.sheds.items():
        board.reach("kagari_queue_sheds", total, reason=reason)
    if services.upstreams is not None:
        tell_servers(board, services.upstreams.views())
    await exchange.reply(200, board.text(), content_type="text/plain; version=0.0.4; charset=utf-8")
