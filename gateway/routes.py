"""One table of routes: path, methods, who may call, how large a body, what handles it.

A path is matched against scope["path"] alone. `{name}` is one segment, `{name:rest}` all that is
left (a model's or a key's name may hold slashes).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from msgspec import Struct

from gateway import openapi
from gateway.admin import (
    keys,
    nodes,
    prefixes,
    prices,
    requests,
    routing,
    sessions,
    tenants,
    upstreams,
)
from gateway.admin import usage as totals
from gateway.api import chat, completions, health, models, tokenize, usage
from gateway.api.chat_request import ChatBody
from gateway.api.completions_request import CompletionBody
from gateway.api.exchange import Exchange
from gateway.errors import GatewayError, near, quote
from gateway.ledger.keys import Key
from gateway.services import Services

Access = Literal["public", "client", "operator"]
BodyType = Literal["none", "json"]
Handler = Callable[[Services, Exchange], Awaitable[None]]

NO_BODY_BYTES = 4096  # what a route without a body reads and ignores


@dataclass(frozen=True)
class Route:
    """body_bytes: None means the configured limit of a request body. generates: it is billed, so
    an Idempotency-Key counts, and its answer may be an event stream.

    What follows them is what the OpenAPI document tells beside the handler's first line: the types
    of query, body and answer (str is plain text; None is any JSON object) and success's status.
    may_be_pending: 202 with the same answer says that it goes on.
    """

    path: str
    methods: tuple[str, ...]
    role: Access
    handler: Handler
    body_type: BodyType = "none"
    body_bytes: int | None = NO_BODY_BYTES
    generates: bool = False
    _: KW_ONLY
    query: type[Struct] | None = None
    body: type[Struct] | None = None
    answer: type | None = None
    status: int = 200
    may_be_pending: bool = False
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", _pattern(self.path))


def _admin(
    path: str,
    handler: Handler,
    methods: tuple[str, ...] = ("GET", "HEAD"),
    *,
    query: type[Struct] | None = None,
    body: type[Struct] | None = None,
    answer: type | None = None,
    status: int = 200,
    may_be_pending: bool = False,
    body_bytes: int | None = NO_BODY_BYTES,
) -> Route:
    """A route of the operator's: a body is small, and there is one where it has a type."""
    return Route(
        "/admin/v1" + path,
        methods,
        "operator",
        handler,
        "none" if body is None else "json",
        body_bytes,
        query=query,
        body=body,
        answer=answer,
        status=status,
        may_be_pending=may_be_pending,
    )


def _posted(path: str, handler: Handler, body: type[Struct], *, generates: bool = False) -> Route:
    """A client's route whose body may be as large as is configured."""
    return Route(path, POST, "client", handler, "json", None, generates, body=body)


def _pattern(path: str) -> re.Pattern[str]:
    pieces = re.split(r"\{(\w+)(:rest)?\}", path)
    text = re.escape(pieces[0])
    for name, rest, literal in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        text += f"(?P<{name}>{'.+' if rest else '[^/]+'})" + re.escape(literal)
    return re.compile(text)


GET = ("GET", "HEAD")
ACCOUNT = "/client/v4/accounts/{account}/ai"  # Cloudflare clients work by changing the host

POST = ("POST",)

PUBLIC_ROUTES: tuple[Route, ...] = (
    Route("/", GET, "public", health.root, answer=str),
    Route("/livez", GET, "public", health.live, answer=str),
    Route("/readyz", GET, "public", health.ready, answer=health.Readiness),
    Route("/startupz", GET, "public", health.started, answer=str),
    Route("/metrics", GET, "operator", health.metrics, answer=str),
    Route(
        "/v1/openapi.json",
        GET,
        "client",
        openapi.serving("Kagari", lambda: PUBLIC_ROUTES),
    ),
    Route("/v1/models", GET, "client", models.list_models, answer=models.ModelList),
    Route("/v1/models/{model:rest}", GET, "client", models.show_model, answer=models.Model),
    _posted("/v1/chat/completions", chat.chat, ChatBody, generates=True),
    _posted("/v1/completions", completions.completions, CompletionBody, generates=True),
    _posted("/tokenize", tokenize.tokenize, tokenize.TokenizeBody),
    _posted("/detokenize", tokenize.detokenize, tokenize.DetokenizeBody),
    _posted("/v1/tokenize", tokenize.tokenize, tokenize.TokenizeBody),
    _posted("/v1/detokenize", tokenize.detokenize, tokenize.DetokenizeBody),
    Route("/v1/usage", GET, "client", usage.show_usage),
    Route(ACCOUNT + "/v1/models", GET, "client", models.list_models, answer=models.ModelList),
    Route(
        ACCOUNT + "/v1/models/{model:rest}", GET, "client", models.show_model, answer=models.Model
    ),
    _posted(ACCOUNT + "/v1/chat/completions", chat.chat, ChatBody, generates=True),
    _posted(ACCOUNT + "/v1/completions", completions.completions, CompletionBody, generates=True),
)

ADMIN_ROUTES: tuple[Route, ...] = (
    Route("/livez", GET, "public", health.live, answer=str),
    Route("/readyz", GET, "public", health.ready, answer=health.Readiness),
    Route("/startupz", GET, "public", health.started, answer=str),
    Route("/metrics", GET, "public", health.metrics, answer=str),  # loopback by default
    _admin("/openapi.json", openapi.serving("Kagari admin", lambda: ADMIN_ROUTES)),
    _admin("/keys", keys.list_keys, query=keys.KeysQuery, answer=keys.KeyList),
    _admin("/keys", keys.create_key, POST, body=keys.NewKey, answer=keys.CreatedKey, status=201),
    _admin("/keys/{key:rest}", keys.show_key, answer=Key),
    _admin("/keys/{key:rest}", keys.change_key, ("PATCH",), body=keys.KeyChange, answer=Key),
    _admin("/keys/{key:rest}", keys.revoke_key, ("DELETE",), answer=Key),
    _admin("/usage", totals.show_usage, query=totals.UsageQuery, answer=totals.UsageAnswer),
    _admin(
        "/requests",
        requests.list_requests,
        query=requests.RequestsQuery,
        answer=requests.RequestList,
    ),
    _admin("/requests/{request}", requests.show_request, answer=requests.RequestAnswer),
    _admin("/nodes", nodes.list_nodes, answer=nodes.NodeList),
    _admin("/nodes/{node}", nodes.show_node, answer=nodes.NodeAnswer),
    _admin("/nodes/{node}/drain", nodes.drain, POST, answer=nodes.DrainAnswer),
    _admin("/nodes/{node}/undrain", nodes.undrain, POST, answer=nodes.DrainAnswer),
    _admin(
        "/nodes/{node}/role",
        nodes.set_role,
        POST,
        body=nodes.NewRole,
        answer=nodes.RoleAnswer,
        may_be_pending=True,
    ),
    _admin("/upstreams", upstreams.list_upstreams, answer=upstreams.UpstreamList),
    _admin("/prefixes", prefixes.list_prefixes, answer=prefixes.PrefixList),
    _admin(
        "/prefixes",
        prefixes.create_prefix,
        POST,
        body=prefixes.NewPrefix,
        answer=prefixes.PrefixAnswer,
        may_be_pending=True,
        body_bytes=None,
    ),
    _admin("/prefixes/{prefix}", prefixes.show_prefix, answer=prefixes.PrefixAnswer),
    _admin("/prefixes/{prefix}", prefixes.delete_prefix, ("DELETE",), answer=prefixes.PrefixAnswer),
    _admin(
        "/tenants/{tenant:rest}/cache",
        tenants.purge_cache,
        ("DELETE",),
        query=tenants.PurgeQuery,
        answer=tenants.PurgeAnswer,
        may_be_pending=True,
    ),
    _admin("/prices", prices.show_prices, answer=prices.PricesAnswer),
    _admin(
        "/routing/explain",
        routing.explain_recent,
        query=routing.RecentQuery,
        answer=routing.Explanation,
    ),
    _admin(
        "/routing/explain",
        routing.explain,
        POST,
        query=routing.ExplainQuery,
        body=routing.RoutedBody,
        answer=routing.Explanation,
        body_bytes=None,
    ),
    _admin(
        "/session-lookup",
        sessions.look_up_session,
        POST,
        body=sessions.SessionLookup,
        answer=sessions.SessionAnswer,
    ),
    _admin("/sessions/{digest}", sessions.show_session, answer=sessions.SessionAnswer),
)


CHAT = "/v1/chat/completions"
OTHER_CHATS = ("/v1/responses", "/v1/messages")


def find_route(routes: Sequence[Route], path: str, method: str) -> tuple[Route, dict[str, str]]:
    """Raises GatewayError: not_found with near paths, or method_not_allowed with Allow."""
    allowed: list[str] = []
    for route in routes:
        match = route.pattern.fullmatch(path)
        if match is None:
            continue
        if method in route.methods:
            return route, match.groupdict()
        allowed += route.methods
    if allowed:
        raise GatewayError(
            "method_not_allowed",
            field="method",
            found=quote(method),
            allowed=" or ".join(allowed),
            remedy=f"use {allowed[0]}",
            headers=[("allow", ", ".join(allowed))],
        )
    paths = [route.path for route in routes]
    # By spelling /v1/messages is near /v1/models; what its clients can be set to is chat.
    is_chat = path.startswith(OTHER_CHATS) and CHAT in paths
    nearest = [CHAT] if is_chat else near(path, paths)
    raise GatewayError(
        "not_found",
        field="path",
        found=quote(path),
        allowed="a path of this listener",
        remedy="did you mean " + " or ".join(nearest) + "?" if nearest else "see docs/errors.md",
    )
