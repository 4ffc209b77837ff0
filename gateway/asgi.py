"""From an ASGI call to a handler and back: route, key, body, handler, error, log line.

Plain ASGI on purpose: no middleware stands between a stream and its client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from functools import partial

from starlette.types import Receive, Scope, Send

from gateway.api.body import ClientLeft, read_body, refuse
from gateway.api.connected import while_connected
from gateway.api.exchange import Exchange, clean_client_id, new_request_id
from gateway.api.idempotency import HEADER
from gateway.api.keys import check_operator, client_key
from gateway.api.sse import error_event
from gateway.errors import GatewayError
from gateway.routes import Route, find_route
from gateway.services import Services


class Application:
    """One listener's ASGI application over its table of routes."""

    def __init__(self, services: Services, routes: Sequence[Route]) -> None:
        self.services = services
        self.routes = tuple(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._exchange(_open(scope, receive, send))
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _exchange(self, exchange: Exchange) -> None:
        try:
            await self._serve(self._handle(exchange), exchange)
        except ClientLeft:
            return
        finally:
            self._tell(exchange)

    async def _serve(self, work: Awaitable[None], exchange: Exchange) -> None:
        """Whatever work raises is answered, unless nobody is there to be answered."""
        try:
            await work
            return
        except GatewayError as raised:
            error = raised
        except ClientLeft:
            raise
        except Exception:
            self.services.log.exception("handler_failed", request_id=exchange.request_id)
            error = GatewayError(
                "server_error",
                found="a fault that the operator sees in the log",
                allowed="an answer",
                remedy="send the request again",
            )
        self.services.metrics.count("kagari_errors", code=error.code)
        exchange.notes["error"] = error.code
        await self._reply(exchange, error)

    async def _handle(self, exchange: Exchange) -> None:
        services = self.services
        route = self._route(exchange)
        exchange.route, exchange.is_public = route.path, route.role == "public"
        await self._prepare(route, exchange)
        if route.generates and HEADER in exchange.headers:
            handler = partial(route.handler, services)
            work: Awaitable[None] = services.idempotency.answer(
                exchange, route.path, handler, self._serve
            )
        else:
            work = route.handler(services, exchange)
        await while_connected(exchange, work)

    def _route(self, exchange: Exchange) -> Route:
        limit = self.services.config.limits.header_bytes
        size = sum(len(name) + len(value) + 4 for name, value in exchange.scope["headers"])
        if size > limit:
            raise GatewayError(
                "headers_too_large",
                field="headers",
                found=f"{size} bytes",
                allowed=f"{limit} bytes",
                remedy="send fewer or shorter headers",
            )
        route, exchange.parameters = find_route(
            self.routes, str(exchange.scope["path"]), exchange.method
        )
        return route

    async def _prepare(self, route: Route, exchange: Exchange) -> None:
        """The caller first, then the body: strangers do not get to upload."""
        services = self.services
        if services.draining.is_set() and route.role == "client":
            raise GatewayError(
                "draining",
                found="a gateway that is shutting down",
                allowed="requests that came before",
                remedy="send the request again",
                retry_after_s=1.0,
            )
        if route.role == "client":
            exchange.key = client_key(exchange, services.keys)
            exchange.notes.update(tenant=exchange.key.tenant, key_id=exchange.key.key_id)
        elif route.role == "operator":
            check_operator(exchange, services.home.admin_token)
        limits = services.config.limits
        exchange.body = await read_body(
            exchange,
            limit_bytes=limits.body_bytes if route.body_bytes is None else route.body_bytes,
            limits=limits,
            budget=services.body_budget,
        )

    async def _reply(self, exchange: Exchange, error: GatewayError) -> None:
        """Before the first byte a status; after it, all that is left is the stream's last event."""
        if exchange.ending:
            return
        stall_s = self.services.config.stream.send_stall_s
        try:
            async with asyncio.timeout(stall_s):
                if exchange.status is not None:
                    await exchange.end(error_event(error.body(exchange.request_id)))
                elif exchange.body_done:
                    await exchange.reply_error(error)
                else:
                    await refuse(exchange, error)
        except TimeoutError:
            raise ClientLeft from None

    def _tell(self, exchange: Exchange) -> None:
        duration_s = time.monotonic() - exchange.started
        name = exchange.route
        status = str(exchange.status) if exchange.status is not None else "left"
        metrics = self.services.metrics
        metrics.count("kagari_requests", route=name, status=status)
        metrics.observe("kagari_request_seconds", duration_s, route=name)
        quiet = exchange.is_public and exchange.status == 200
        if self.services.config.log.requests and not quiet:
            self.services.log.info(
                "request",
                request_id=exchange.request_id,
                client_request_id=clean_client_id(
                    exchange.headers.get("x-request-id")
                    or exchange.headers.get("x-client-request-id")
                ),
                method=exchange.method,
                route=name,
                status=exchange.status,
                client_left=exchange.client_left,
                duration_s=round(duration_s, 4),
                **exchange.notes,
            )


def _open(scope: Scope, receive: Receive, send: Send) -> Exchange:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return Exchange(
        scope=scope,
        receive=receive,
        send=send,
        request_id=new_request_id(),
        started=time.monotonic(),
        headers=headers,
    )


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing starts or ends with a listener: `gateway/app.py` owns what it serves."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
