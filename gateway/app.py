"""The gateway's composition root: everything is built here once and handed to who needs it.

    home → keys, ledger → fleet (bundles, routing) → link server ┐
                          admission, prices, metrics ────────────┼─ public and admin listeners
                                                                 ┘
One event loop runs the API, the links and the ledger's batches.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
from structlog.typing import FilteringBoundLogger

from gateway.admin.tenants import OWN_TENANT
from gateway.api.body import BodyBudget
from gateway.api.exchange import Exchange
from gateway.api.idempotency import Idempotency
from gateway.asgi import Application
from gateway.cache.keeper import Keeper
from gateway.cache.orders import ORDERS_NAME
from gateway.config import GatewayConfig, read_secret
from gateway.home import open_home, told_addresses
from gateway.ledger.files import KEYS_NAME, LEDGER_NAME
from gateway.ledger.keys import Keys
from gateway.ledger.ledger import Ledger
from gateway.ledger.prices import load_prices
from gateway.ledger.reader import LedgerReader
from gateway.nodes.bundles import Bundles
from gateway.nodes.fleet import Fleet, FleetConfig, default_pairing, default_parameters
from gateway.nodes.link import LINK_PATH, LinkServer
from gateway.routes import ADMIN_ROUTES, PUBLIC_ROUTES
from gateway.server import Listener, listen, serve
from gateway.services import Services
from gateway.telemetry import Metrics
from gateway.text.model import TextModel
from policies import pairing
from policies.admission import Admission
from policies.pricing import PriceTable
from policies.queue import QueueBounds
from policies.routing import RoutingParameters, parse_parameters

Emit = Callable[[dict[str, object]], None]

CUT_AFTER_S = 2.0  # what is left after the drain has this long to clean up


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running gateway listens; the ports are the real ones."""

    url: str
    link_url: str
    admin_url: str


def silent(_line: dict[str, object]) -> None:
    """For who wants no stage lines."""


@asynccontextmanager
async def build(
    config: GatewayConfig,
    *,
    api_keys: tuple[str, ...] = (),
    log: FilteringBoundLogger | None = None,
    emit: Emit = silent,
) -> AsyncIterator[Services]:
    """All services, without listeners. Raises OSError, LedgerError, ConfigError, PriceError."""
    async with AsyncExitStack() as stack:
        with _stage(emit, "home", config.home):
            home = open_home(
                Path(config.home),
                gateway_id=config.region.gateway_id,
                join_token=_secret(config.keys.join_token_file),
            )
        with _stage(emit, "keys", ""):
            keys = stack.enter_context(Keys(home.folder / KEYS_NAME))
            configured = _secret(config.keys.api_key_file)
            for key in (*api_keys, *((configured,) if configured else ())):
                keys.import_literal(key)
        with _stage(emit, "ledger", ""):
            ledger = await stack.enter_async_context(Ledger(home.folder / LEDGER_NAME))
            reader = await stack.enter_async_context(LedgerReader(home.folder / LEDGER_NAME))
        with _stage(emit, "fleet", ""):
            parameters = _parameters(config.routing.parameters_file)
            fleet = Fleet(
                Bundles(TextModel.load, home.folder / "bundles"),
                FleetConfig(
                    gateway_id=home.gateway_id,
                    policy=config.routing.policy,
                    parameters=parameters,
                    default_models=config.models.default,
                    max_in_flight=config.routing.max_in_flight_per_node,
                    queue=QueueBounds(
                        config.routing.queue_requests_per_engine,
                        config.routing.queue_tokens_per_engine,
                    ),
                    split=config.routing.split,
                    pairing=_pairing(config.routing.pairing_file),
                    moves_roles=config.routing.roles == "auto",
                ),
                on_usage_record=lambda record: ledger.settle_from_usage_record(record, time.time()),
                on_order_result=lambda node_id, answer: keeper.take(node_id, answer),
            )
            keeper = Keeper(
                home.folder / ORDERS_NAME,
                home,
                fleet,
                max_pages_per_tenant=config.prefixes.max_pages_per_tenant,
                quotas=config.tiering.quotas,
            )
            await stack.enter_async_context(keeper.keeping())
            prices = _prices(config.models.prices_file)
        upstreams = None
        if config.upstreams:
            from gateway.upstreams.build import running_upstreams  # httpx takes 0.2 s to import

            with _stage(emit, "upstreams", ""):
                upstreams = await stack.enter_async_context(
                    running_upstreams(config.upstreams, home, parameters)
                )
        metrics, log = Metrics(), log or structlog.get_logger("kagari.gateway")
        tenants = {OWN_TENANT, *(key.tenant for key in keys.list())}
        if strangers := sorted(config.tiering.quotas.keys() - tenants):
            # One that was misspelt would protect nobody, and a key may still be made for one.
            log.warning("quotas_of_tenants_without_a_key", tenants=strangers)

        def tell_outlived(exchange: Exchange) -> None:
            log.info(
                "request_outlived_its_client", request_id=exchange.request_id, **exchange.notes
            )

        yield Services(
            config=config,
            home=home,
            fleet=fleet,
            keeper=keeper,
            ledger=ledger,
            ledger_reader=reader,
            idempotency=Idempotency(
                config, home.secret, reader, metrics, on_outlived=tell_outlived
            ),
            keys=keys,
            prices=prices,
            policy_version=parameters.version,
            admission=Admission(config.admission),
            body_budget=BodyBudget(config.limits.body_bytes_in_flight),
            metrics=metrics,
            log=log,
            upstreams=upstreams,
        )


@asynccontextmanager
async def running(services: Services, *, emit: Emit = silent) -> AsyncIterator[Addresses]:
    """Listen until the block ends; then take nothing new, finish what runs, and cut the rest."""
    server = services.config.server
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        with _stage(emit, "listen", ""):
            public = listen(server.host, server.port, server)
            stack.callback(public.socket.close)
            admin = listen(server.admin_host, server.admin_port, server)
            stack.callback(admin.socket.close)
        link_host = server.link_host or server.host
        links = LinkServer(services.fleet, join_token=services.home.join_token)
        link_port = await stack.enter_async_context(links.serve(link_host, server.link_port))
        stack.push_async_callback(services.idempotency.close)
        tasks = [
            asyncio.create_task(_serve(services, listener, routes_app, stop))
            for listener, routes_app in (
                (public, Application(services, PUBLIC_ROUTES)),
                (admin, Application(services, ADMIN_ROUTES)),
            )
        ]
        try:
            services.started = True
            netloc = f"[{link_host}]" if ":" in link_host else link_host
            addresses = Addresses(
                url=public.url,
                link_url=f"ws://{netloc}:{link_port}{LINK_PATH}",
                admin_url=admin.url,
            )
            with told_addresses(services.home.folder, **asdict(addresses)):
                yield addresses
            services.draining.set()
            stop.set()
            await asyncio.wait(tasks, timeout=server.drain_s + CUT_AFTER_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()


async def _serve(
    services: Services, listener: Listener, app: Application, stop: asyncio.Event
) -> None:
    await serve(app, listener, services.config.server, stop=stop.wait)


async def run(config: GatewayConfig, *, api_keys: tuple[str, ...], emit: Emit) -> None:
    """Serve until SIGINT or SIGTERM; the first drains, a second ends at once."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue(16)

    def on_signal(number: int) -> None:
        if not signals.full():
            signals.put_nowait(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    loop.set_exception_handler(_log_loop_error)
    began = time.monotonic()
    work = asyncio.current_task()
    assert work is not None
    async with build(config, api_keys=api_keys, emit=emit) as services:
        async with running(services, emit=emit) as addresses:
            # Long-lived objects leave the collector's sight: its pauses are a stream's stutter.
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 20)
            emit(
                {
                    "event": "ready",
                    "url": addresses.url,
                    "link_url": addresses.link_url,
                    "admin_url": addresses.admin_url,
                    "seconds": round(time.monotonic() - began, 3),
                }
            )
            await signals.get()
            emit({"event": "draining"})
            second = asyncio.create_task(_cancel_on_second(signals, work))
        second.cancel()
        await asyncio.wait((second,))


async def _cancel_on_second(signals: asyncio.Queue[int], work: asyncio.Task[object]) -> None:
    await signals.get()
    work.cancel()


def _log_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """What a callback raised, as a log line. A connection that the drain cut is no error."""
    error = context.get("exception")
    if isinstance(error, asyncio.CancelledError):
        return
    log = structlog.get_logger("kagari.gateway")
    log.error("loop_error", what=str(context.get("message")), error=repr(error))


def _secret(path: str | None) -> str | None:
    return None if path is None else read_secret(path)


def _prices(path: str | None) -> PriceTable:
    return load_prices(None if path is None else Path(path).expanduser())


def _parameters(path: str | None) -> RoutingParameters:
    if path is None:
        return default_parameters()
    return parse_parameters(Path(path).expanduser().read_text("utf-8"))


def _pairing(path: str | None) -> pairing.PairingParameters:
    if path is None:
        return default_pairing()
    return pairing.parse_parameters(Path(path).expanduser().read_text("utf-8"))


@contextmanager
def _stage(emit: Emit, name: str, detail: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    emit(
        {
            "event": "stage",
            "stage": name,
            "seconds": round(time.monotonic() - began, 3),
            "detail": detail,
        }
    )
