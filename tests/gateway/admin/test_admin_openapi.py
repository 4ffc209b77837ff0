"""The OpenAPI documents are the tables of routes, and the answers are what the documents say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from gateway.openapi import document
from gateway.routes import ADMIN_ROUTES, PUBLIC_ROUTES
from tests.gateway.admin.json_schema import problems, resolve

TABLES = {"public": PUBLIC_ROUTES, "admin": ADMIN_ROUTES}


def operations(told: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, by_method in told["paths"].items():
        for method, operation in by_method.items():
            yield path, method, operation


@pytest.mark.parametrize("name", TABLES)
def test_a_document_has_each_route_once_and_nothing_else(name) -> None:
    told = document("t", TABLES[name])
    routed = {
        (re.sub(r":rest}", "}", route.path), method.lower())
        for route in TABLES[name]
        for method in route.methods
        if method != "HEAD"
    }
    assert {(path, method) for path, method, _ in operations(told)} == routed


@pytest.mark.parametrize("name", TABLES)
def test_a_document_has_the_form_of_openapi_3_1(name) -> None:
    told = document("t", TABLES[name])
    assert re.fullmatch(r"3\.1\.\d+", told["openapi"])
    assert set(told["info"]) >= {"title", "version"}
    ids = [operation["operationId"] for _, _, operation in operations(told)]
    assert len(set(ids)) == len(ids)
    for path, method, operation in operations(told):
        assert method in {"get", "post", "patch", "delete", "put"}
        assert path.startswith("/")
        assert operation["summary"]
        assert "\n" not in operation["summary"]
        in_path = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path))
        assert all(one["required"] for one in operation["parameters"] if one["in"] == "path")
        names = [(one["in"], one["name"]) for one in operation["parameters"]]
        assert len(set(names)) == len(names)
        assert "default" in operation["responses"]
        for response in operation["responses"].values():
            assert response["description"]
            assert all("schema" in content for content in response["content"].values())
        for requirement in operation["security"]:
            assert set(requirement) <= set(told["components"]["securitySchemes"])
    references = set(re.findall(r'"\$ref": "(.*?)"', json.dumps(told)))
    for reference in references:
        resolve(reference, told)
    used = {reference.rsplit("/", 1)[1] for reference in references}
    assert used == set(told["components"]["schemas"])  # nothing is told that no route uses


@pytest.mark.parametrize("name", TABLES)
def test_a_guarded_route_says_so(name) -> None:
    told = document("t", TABLES[name])
    for route in TABLES[name]:
        operation = told["paths"][route.path.replace(":rest}", "}")][route.methods[0].lower()]
        wanted = {"client": ["apiKey"], "operator": ["operatorToken"], "public": []}[route.role]
        assert [next(iter(one)) for one in operation["security"]] == wanted


def test_both_listeners_serve_their_document(gateway, admin) -> None:
    told = admin.get("/admin/v1/openapi.json").json()
    assert told == json.loads(msgspec.json.encode(document("Kagari admin", ADMIN_ROUTES)))
    with gateway.client() as client:
        told = client.get("/v1/openapi.json").json()
    assert told == json.loads(msgspec.json.encode(document("Kagari", PUBLIC_ROUTES)))


def test_every_answer_is_what_its_document_says(gateway, admin, chat) -> None:
    request_id = chat({"say": "x", "pad": "z" * 99}, x_session_affinity="conversation-9")
    failed = chat({"fail": "engine_error"})
    row = admin.get(f"/admin/v1/requests/{request_id}").json()
    made = admin.post("/admin/v1/keys", json={"name": "schema"})
    told = document("t", ADMIN_ROUTES)
    bodies = {
        "/admin/v1/keys": {"name": "schema-2"},
        "/admin/v1/keys/{key}": {"name": "schema-3"},
        "/admin/v1/nodes/{node}/role": {"role": "mixed"},
        "/admin/v1/prefixes": {"name": "schema", "model": "tiny", "prompt": "x" * 40},
        "/admin/v1/routing/explain": {"model": "tiny", "prompt": [1, 2, 3]},
        "/admin/v1/session-lookup": {"value": "conversation-9", "model": "tiny"},
    }
    pinned = admin.post("/admin/v1/prefixes", json={**bodies["/admin/v1/prefixes"], "name": "p"})
    names = {"key": made.json()["key_id"], "request": request_id, "digest": row["session"]}
    names["prefix"] = pinned.json()["prefix_id"]
    for route in ADMIN_ROUTES:
        if route.methods[0] == "DELETE":
            continue
        template = route.path.replace(":rest}", "}")
        path = template.format(node="n1", **names)
        if (route.methods[0], template) == ("GET", "/admin/v1/routing/explain"):
            path += f"?request_id={request_id}"
        answer = admin.request(route.methods[0], path, json=bodies.get(template))
        assert answer.status_code == route.status, answer.text
        operation = told["paths"][template][route.methods[0].lower()]
        check(answer, operation, told)
        for wrong in (f"{path.partition('?')[0]}?no_such_field=1", f"{path}/nowhere"):
            refused = admin.request(route.methods[0], wrong, json=bodies.get(template))
            if refused.status_code >= 400:
                check(refused, operation, told)
    ended = admin.delete(f"/admin/v1/keys/{names['key']}")
    check(ended, told["paths"]["/admin/v1/keys/{key}"]["delete"], told)
    for path in ("/admin/v1/prefixes/{prefix}", "/admin/v1/tenants/{tenant}/cache"):
        gone = admin.delete(path.format(tenant="default", **names))
        assert gone.status_code == 200, gone.text
        check(gone, told["paths"][path]["delete"], told)
    one = admin.get(f"/admin/v1/requests/{failed}")
    check(one, told["paths"]["/admin/v1/requests/{request}"]["get"], told)
    lists = document("t", PUBLIC_ROUTES)
    with gateway.client() as client:
        check(client.get("/v1/models"), lists["paths"]["/v1/models"]["get"], lists)
        check(client.get("/v1/models/tiny"), lists["paths"]["/v1/models/{model}"]["get"], lists)


def check(answer: Any, operation: dict[str, Any], told: dict[str, Any]) -> None:
    responses = operation["responses"]
    content = responses.get(str(answer.status_code), responses["default"])["content"]
    kind = answer.headers["content-type"].split(";")[0]
    assert kind in content, (answer.url, kind)
    value = answer.json() if kind == "application/json" else answer.text
    assert problems(value, content[kind]["schema"], told) == [], answer.url
