"""The OpenAPI 3.1 document of a listener, made from its table of routes and their types alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from gateway.errors import ErrorBody

if TYPE_CHECKING:
    from gateway.api.exchange import Exchange
    from gateway.routes import Handler, Route
    from gateway.services import Services

OPENAPI_VERSION = "3.1.0"
REFERENCE = "#/components/schemas/{name}"
ANY_OBJECT = {"type": "object"}
SECURITY_NAME = {"client": "apiKey", "operator": "operatorToken"}


def serving(title: str, routes: Callable[[], Sequence[Route]]) -> Handler:
    """A handler that answers with the document of these routes, its own among them."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(title, routes()))

    async def show_openapi(_services: Services, exchange: Exchange) -> None:
        """This document."""
        await exchange.reply(200, encoded())

    return show_openapi


def document(title: str, routes: Sequence[Route]) -> dict[str, Any]:
    kinds = [kind for route in routes for kind in (route.body, route.answer) if _has_schema(kind)]
    schemas, components = msgspec.json.schema_components(
        [*kinds, ErrorBody], ref_template=REFERENCE, schema_hook=_any_json
    )
    schema_by_kind = dict(zip([*kinds, ErrorBody], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operations = paths.setdefault(route.path.replace(":rest}", "}"), {})
        for method in route.methods:
            if method != "HEAD":  # as GET, without the body
                operations[method.lower()] = _operation(route, method, schema_by_kind)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer"} for name in SECURITY_NAME.values()
            },
        },
    }


def _any_json(_kind: type) -> dict[str, Any]:
    """`object`: a field that is taken as it comes."""
    return {"description": "Any JSON value."}


def _has_schema(kind: object) -> bool:
    return kind not in (None, str)


def _operation(route: Route, method: str, schema_by_kind: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{route.path}").strip("_"),
        "summary": (route.handler.__doc__ or route.path).strip().splitlines()[0],
        "parameters": [*_path_parameters(route), *_query_parameters(route.query)],
        "responses": {
            str(route.status): {
                "description": "The answer.",
                "content": _content(route, schema_by_kind),
            },
            **_pending(route, schema_by_kind),
            "default": {
                "description": "What went wrong, in four parts.",
                "content": _json(schema_by_kind[ErrorBody]),
            },
        },
        "security": [{SECURITY_NAME[route.role]: []}] if route.role in SECURITY_NAME else [],
    }
    if route.body_type == "json":
        schema = schema_by_kind.get(route.body, ANY_OBJECT)
        operation["requestBody"] = {"required": True, "content": _json(schema)}
    return operation


def _pending(route: Route, schema_by_kind: dict[Any, Any]) -> dict[str, Any]:
    if not route.may_be_pending:
        return {}
    content = _content(route, schema_by_kind)
    return {"202": {"description": "Not done yet, and going on.", "content": content}}


def _content(route: Route, schema_by_kind: dict[Any, Any]) -> dict[str, Any]:
    if route.answer is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    content = _json(schema_by_kind.get(route.answer, ANY_OBJECT))
    if route.generates:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.pattern.groupindex
    ]


def _query_parameters(query: type[Struct] | None) -> list[dict[str, Any]]:
    """One for each field, as a client writes it: a tuple with commas."""
    if query is None:
        return []
    (_, components) = msgspec.json.schema_components([query])
    fields = components[query.__name__]
    return [
        {
            "name": name,
            "in": "query",
            "required": name in fields.get("required", ()),
            "style": "form",
            "explode": False,
            "schema": schema,
        }
        for name, schema in fields["properties"].items()
    ]
