"""The running listeners are exactly the table of routes: nothing hidden, every guard in place."""

from __future__ import annotations

import pytest

from gateway.errors import GatewayError
from gateway.routes import ADMIN_ROUTES, PUBLIC_ROUTES, Route, find_route

SAMPLE = {
    "account": "acc",
    "model:rest": "tiny/x",
    **{"node": "n1", "key:rest": "key_1", "request": "0" * 32, "digest": "0" * 32},
    **{"prefix": "0" * 32, "tenant:rest": "a/b"},
}


def path_of(route: Route) -> str:
    path = route.path
    for name, value in SAMPLE.items():
        path = path.replace("{" + name + "}", value)
    return path


@pytest.mark.parametrize("table", [PUBLIC_ROUTES, ADMIN_ROUTES])
def test_every_route_finds_itself_and_no_two_share_a_way(table) -> None:
    for route in table:
        for method in route.methods:
            assert find_route(table, path_of(route), method)[0] is route
    ways = [(route.path, method) for route in table for method in route.methods]
    assert len(set(ways)) == len(ways)


def test_no_admin_path_is_on_the_public_listener() -> None:
    assert not [route for route in PUBLIC_ROUTES if route.path.startswith("/admin")]
    assert all(r.role == "operator" for r in ADMIN_ROUTES if r.path.startswith("/admin"))


def test_only_probes_and_the_front_door_are_open() -> None:
    open_paths = {route.path for route in PUBLIC_ROUTES if route.role == "public"}
    assert open_paths == {"/", "/livez", "/readyz", "/startupz"}


def test_model_names_may_hold_slashes() -> None:
    _, parameters = find_route(PUBLIC_ROUTES, "/v1/models/@cf/meta/llama", "GET")
    assert parameters == {"model": "@cf/meta/llama"}


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/v1", "", "/V1/models", "/v1/models\n", "//v1/models"]
)
def test_near_misses_are_not_routes(path) -> None:
    with pytest.raises(GatewayError) as caught:
        find_route(PUBLIC_ROUTES, path, "GET")
    assert caught.value.code == "not_found"


def test_head_is_offered_wherever_get_is() -> None:
    for route in (*PUBLIC_ROUTES, *ADMIN_ROUTES):
        assert ("GET" in route.methods) == ("HEAD" in route.methods)
