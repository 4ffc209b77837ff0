"""Prefixes and purges over HTTP: what a node and the operator are told, what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.cache.orders import ORDERS_NAME
from policies.contract import wire
from policies.contract.page_keys import tenant_salt

SYSTEM = {"role": "system", "content": "You are a careful coding agent. " * 4}
NEW = {"name": "agents", "model": "tiny-alias", "messages": [SYSTEM]}


@pytest.fixture(autouse=True)
def tidy(gateway, admin) -> Iterator[None]:
    yield
    node = gateway.node
    node.obeys = True
    for prefix in admin.get("/admin/v1/prefixes").json()["prefixes"]:
        admin.delete(f"/admin/v1/prefixes/{prefix['prefix_id']}")
    node.orders.clear()
    node.pages_by_salt.clear()


def until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def test_a_prefix_is_what_requests_begin_with(gateway, admin, chat) -> None:
    made = admin.post("/admin/v1/prefixes", json=NEW)
    assert made.status_code == 200, made.text
    told = made.json()
    (pin,) = gateway.node.orders
    assert (told["state"], told["model"], told["tenant"]) == ("pinned", "tiny", "default")
    assert (told["prefix_id"], told["pages"]) == (pin.pin_id, told["tokens"] // 16)
    assert told["expires_at"] - told["created_at"] == 86_400
    assert told["nodes"] == [
        {"node_id": "n1", "engine": 0, "state": "pinned", "pages": told["pages"], "code": "",
         "message": ""}
    ]  # fmt: skip
    with gateway.client() as client:
        messages = [SYSTEM, {"role": "user", "content": "hi"}]
        client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    submit = gateway.node.served[-1].submit
    tail = 4 * len("_assistant\n")  # this template lets the assistant speak in any case
    assert submit.prompt.startswith(pin.prompt[:-tail])
    assert submit.salt == pin.salt
    assert "careful" not in json.dumps(told) + admin.get("/admin/v1/prefixes").text
    assert admin.get(f"/admin/v1/prefixes/{pin.pin_id}").json() == told
    assert (gateway.services.home.folder / ORDERS_NAME).stat().st_mode & 0o777 == 0o600
    gone = admin.delete(f"/admin/v1/prefixes/{pin.pin_id}")
    assert gone.json()["name"] == "agents"
    until(lambda: not gateway.node.pins)
    assert admin.get("/admin/v1/prefixes").json() == {"prefixes": []}


def test_an_answer_that_does_not_come_is_not_waited_for(gateway, admin) -> None:
    gateway.node.obeys = False
    begun = time.monotonic()
    made = admin.post("/admin/v1/prefixes", json={**NEW, "wait_s": 0.2})
    assert (made.status_code, made.json()["state"]) == (202, "pending")
    purged = admin.delete("/admin/v1/tenants/default/cache?wait_s=0.2")
    assert (purged.status_code, purged.json()["complete"]) == (202, False)
    assert purged.json()["nodes"][0]["left"] == ["device"]
    assert purged.json()["prefixes_removed"] == 1
    assert time.monotonic() - begun < 15


def test_a_node_that_has_no_room_says_so(gateway, admin) -> None:
    many = {**NEW, "messages": None, "prompt": "x" * 16 * 200}
    assert admin.post("/admin/v1/prefixes", json=many).json()["state"] == "pinned"
    over = admin.post("/admin/v1/prefixes", json={**many, "name": "b"})
    assert (over.status_code, over.json()["error"]["code"]) == (409, "pin_quota_exceeded")
    assert "200 pages beside 200" in over.json()["error"]["found"]


def test_a_purge_uses_the_salt_of_the_tenants_requests(gateway, admin, chat) -> None:
    chat({"say": "x"})
    salt = gateway.node.served[-1].submit.salt
    gateway.node.pages_by_salt.update({salt: 7, bytes(32): 9})
    purged = admin.delete("/admin/v1/tenants/default/cache")
    assert purged.status_code == 200, purged.text
    assert (purged.json()["complete"], purged.json()["pages"]) == (True, 7)
    assert gateway.node.pages_by_salt == {bytes(32): 9}
    assert salt == tenant_salt(gateway.services.home.secret, "default")
    assert [type(order) for order in gateway.node.orders] == [wire.Purge]


def test_tenants_of_any_name_are_purged_and_unknown_ones_refused(gateway, admin) -> None:
    admin.post("/admin/v1/keys", json={"name": "slashed", "tenant": "a/b c"})
    purged = admin.delete("/admin/v1/tenants/a%2Fb%20c/cache")
    assert (purged.status_code, purged.json()["tenant"]) == (200, "a/b c")
    refused = admin.delete("/admin/v1/tenants/a%2Fb%20d/cache")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "tenant_not_found")
    assert "a/b c" in refused.json()["error"]["remedy"]


@pytest.mark.parametrize(
    ("changes", "status", "code", "param"),
    [
        ({"messages": None}, 400, "invalid_request", "messages"),
        ({"prompt": "x"}, 400, "invalid_request", "messages"),
        ({"messages": []}, 400, "invalid_request", "messages"),
        ({"messages": None, "prompt": "short"}, 400, "invalid_request", "prompt"),
        ({"messages": None, "prompt": "x" * 99, "tools": [{}]}, 400, "invalid_request", "tools"),
        ({"tools": [{"type": "function"}]}, 400, "invalid_request", "tools[0].function"),
        ({"model": "nothing"}, 404, "model_not_found", "model"),
        ({"ttl_s": 0}, 400, "invalid_request", "ttl_s"),
        ({"wait_s": 61}, 400, "invalid_request", "wait_s"),
        ({"name": ""}, 400, "invalid_request", "name"),
        ({"tenent": "x"}, 400, "invalid_request", '"tenent"'),
        ({"messages": None, "prompt": "x" * 70_000}, 400, "context_length_exceeded", "prompt"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused_by_field(
    gateway, admin, changes, status, code, param
) -> None:
    refused = admin.post("/admin/v1/prefixes", json={**NEW, **changes})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["found"]
    assert error["allowed"]
    assert error["remedy"]
    assert not gateway.node.orders
    assert admin.get("/admin/v1/prefixes").json() == {"prefixes": []}


def test_the_same_name_twice_and_an_unknown_id(admin) -> None:
    made = admin.post("/admin/v1/prefixes", json=NEW).json()
    twice = admin.post("/admin/v1/prefixes", json=NEW)
    assert (twice.status_code, twice.json()["error"]["code"]) == (409, "prefix_exists")
    for method in ("GET", "DELETE"):
        path = f"/admin/v1/prefixes/{made['prefix_id'][:-1]}0x"
        refused = admin.request(method, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "prefix_not_found")
        assert made["prefix_id"] in refused.json()["error"]["remedy"]


def test_pins_outlive_the_gateway_and_reach_who_joins_later(start, tmp_path) -> None:
    def post(gateway: Any) -> Any:
        headers = {"authorization": f"Bearer {gateway.services.home.admin_token}"}
        url = f"{gateway.addresses.admin_url}/admin/v1/prefixes"
        return httpx.post(url, json=NEW, headers=headers, trust_env=False, timeout=20).json()

    with start(tmp_path, nodes=2) as gateway:
        made = post(gateway)
        assert [node["state"] for node in made["nodes"]] == ["pinned", "pinned"]
    with start(tmp_path) as gateway:
        until(lambda: made["prefix_id"] in gateway.node.pins)


def test_figures_of_tiers_and_capacity_are_told(gateway, admin) -> None:
    text = admin.get("/metrics").text
    assert 'kagari_tier_pages_capacity{model="tiny",node="n1",tier="device"}' in text
    with gateway.client() as client:
        told = client.get("/v1/models/tiny").json()["kagari"]
    assert told["kv_capacity"] == [{"tier": "device", "tokens": 1_600_000}]
    assert (told["page_bytes"], told["kv_precision"]) == (0, "bf16")
