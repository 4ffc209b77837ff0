"""Who asks: a client by its key's digest, an operator by the admin token."""

from __future__ import annotations

import hmac

from gateway.api.exchange import Exchange
from gateway.errors import GatewayError
from gateway.ledger.keys import Key, Keys


def client_key(exchange: Exchange, keys: Keys) -> Key:
    """Raises GatewayError (401). The key itself is never repeated, logged or compared by prefix."""
    secret = _presented(exchange)
    key = keys.find(secret) if secret is not None else None
    if key is None:
        raise _refused("no key" if secret is None else "a key that is not valid here")
    return key


def check_operator(exchange: Exchange, admin_token: str) -> None:
    """Raises GatewayError (401) unless the admin token is presented."""
    token = _presented(exchange)
    if token is None or not hmac.compare_digest(token.encode(), admin_token.encode()):
        raise _refused("no token" if token is None else "a token that is not the operator's")


def _presented(exchange: Exchange) -> str | None:
    authorization = exchange.headers.get("authorization")
    if authorization is not None:
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "bearer" and value.strip():
            return value.strip()
    return exchange.headers.get("x-api-key") or None


def _refused(found: str) -> GatewayError:
    return GatewayError(
        "invalid_api_key",
        field="authorization",
        found=found,
        allowed='"Bearer <key>"',
        remedy="create a key with `kagari keys create`",
        headers=[("www-authenticate", "Bearer")],
    )
