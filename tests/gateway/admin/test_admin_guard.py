"""Who may do what on the admin listener: every route, every caller, every method."""

from __future__ import annotations

import hmac

import httpx
import pytest
from msgspec.structs import fields

from gateway.api import keys as guard
from gateway.routes import ADMIN_ROUTES, PUBLIC_ROUTES, Route
from tests.gateway.api.conftest import KEY, RunningGateway

OPERATORS = [route for route in ADMIN_ROUTES if route.role == "operator"]
SAMPLE = {"{node}": "n1", "{key:rest}": "nobody", "{request}": "0" * 32, "{digest}": "0" * 32}
SAMPLE |= {"{prefix}": "0" * 32, "{tenant:rest}": "nobody"}


def path_of(route: Route) -> str:
    path = route.path
    for name, value in SAMPLE.items():
        path = path.replace(name, value)
    return path


def way(route: Route) -> str:
    return f"{route.methods[0]} {route.path}"


def wrong_callers(gateway: RunningGateway) -> dict[str, dict[str, str]]:
    token = gateway.services.home.admin_token
    return {
        "no token": {},
        "an empty token": {"authorization": "Bearer"},
        "a wrong token": {"authorization": "Bearer " + "0" * len(token)},
        "the token's beginning": {"authorization": "Bearer " + token[:-1]},
        "the token under another scheme": {"authorization": "Basic " + token},
        "a client's key": {"authorization": f"Bearer {KEY}"},
        "a client's key, the other way": {"x-api-key": KEY},
        "the join token": {"authorization": f"Bearer {gateway.services.home.join_token}"},
        "a token that is no ASCII": {"authorization": b"Bearer \xff\xfe"},
    }


@pytest.mark.parametrize("route", OPERATORS, ids=way)
def test_only_the_operators_token_opens_an_admin_route(gateway, admin, route) -> None:
    path = path_of(route)
    with httpx.Client(base_url=gateway.addresses.admin_url, trust_env=False) as client:
        for caller, headers in wrong_callers(gateway).items():
            for method in route.methods:
                refused = client.request(method, path, headers=headers)
                assert refused.status_code == 401, (caller, method)
                assert refused.headers["www-authenticate"] == "Bearer"
        for headers in ({}, dict(admin.headers)):
            assert client.request("OPTIONS", path, headers=headers).status_code == 405
    for method in route.methods:
        allowed = admin.request(method, path, json={} if route.body else None)
        lacks = route.body or (route.query and any(one.required for one in fields(route.query)))
        assert allowed.status_code in ({400} if lacks else {route.status, 404}), allowed.text
        if method == "HEAD":
            assert allowed.content == b""
            assert int(allowed.headers["content-length"]) > 0  # as GET, whose answer has a body
    undone = admin.post("/admin/v1/nodes/n1/undrain")
    assert undone.json()["draining"] is False


def test_the_operators_token_opens_no_clients_route_and_admin_paths_are_not_public(
    gateway, admin
) -> None:
    token = {"authorization": f"Bearer {gateway.services.home.admin_token}"}
    with httpx.Client(base_url=gateway.url, headers=token, trust_env=False) as client:
        for route in PUBLIC_ROUTES:
            if route.role == "client":
                assert client.request(route.methods[0], route.path).status_code == 401
        for route in OPERATORS:
            assert client.request(route.methods[0], path_of(route)).status_code == 404


def test_tokens_are_compared_in_constant_time(gateway, admin, monkeypatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(guard.hmac, "compare_digest", noting)
    assert admin.get("/admin/v1/prices").status_code == 200
    token = gateway.services.home.admin_token.encode()
    assert compared == [(token, token)]
