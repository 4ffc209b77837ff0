"""One table of routes: path, methods, who may call, how large a body, what handles it.

A path is matched against scope["path"] alone. `{name}` is one segment, `{name:rest}` all that is
left (a model's name may hold slashes).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.admin import nodes
from gateway.api import chat, completions, health, models, tokenize, usage
from gateway.api.exchange import Exchange
from gateway.errors import GatewayError, near, quote
from gateway.services import Services

Access = Literal["public", "client", "operator"]
BodyType = Literal["none", "json"]
Handler = Callable[[Services, Exchange], Awaitable[None]]

NO_BODY_BYTES = 4096  # what a route without a body reads and ignores


@dataclass(frozen=True)
class Route:
    """body_bytes: None means the configured limit of a request body. generates: it is billed, so
    an Idempotency-Key counts."""

    path: str
    methods: tuple[str, ...]
    role: Access
    handler: Handler
    body_type: BodyType = "none"
    body_bytes: int | None = NO_BODY_BYTES
    generates: bool = False
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", _pattern(self.path))


def _pattern(path: str) -> re.Pattern[str]:
    pieces = re.split(r"\{(\w+)(:rest)?\}", path)
    text = re.escape(pieces[0])
    for name, rest, literal in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        text += f"(?P<{name}>{'.+' if rest else '[^/]+'})" + re.escape(literal)
    return re.compile(text)


def _generates(path: str, handler: Handler) -> Route:
    return Route(path, ("POST",), "client", handler, "json", None, generates=True)


GET = ("GET", "HEAD")
ACCOUNT = "/client/v4/accounts/{account}/ai"  # Cloudflare clients work by changing the host

PUBLIC_ROUTES: tuple[Route, ...] = (
    Route("/", GET, "public", health.root),
    Route("/livez", GET, "public", health.live),
    Route("/readyz", GET, "public", health.ready),
    Route("/startupz", GET, "public", health.started),
    Route("/metrics", GET, "operator", health.metrics),
    Route("/v1/models", GET, "client", models.list_models),
    Route("/v1/models/{model:rest}", GET, "client", models.show_model),
    _generates("/v1/chat/completions", chat.chat),
    _generates("/v1/completions", completions.completions),
    Route("/tokenize", ("POST",), "client", tokenize.tokenize, "json", None),
    Route("/detokenize", ("POST",), "client", tokenize.detokenize, "json", None),
    Route("/v1/tokenize", ("POST",), "client", tokenize.tokenize, "json", None),
    Route("/v1/detokenize", ("POST",), "client", tokenize.detokenize, "json", None),
    Route("/v1/usage", GET, "client", usage.show_usage),
    Route(ACCOUNT + "/v1/models", GET, "client", models.list_models),
    Route(ACCOUNT + "/v1/models/{model:rest}", GET, "client", models.show_model),
    _generates(ACCOUNT + "/v1/chat/completions", chat.chat),
    _generates(ACCOUNT + "/v1/completions", completions.completions),
)

ADMIN_ROUTES: tuple[Route, ...] = (
    Route("/livez", GET, "public", health.live),
    Route("/readyz", GET, "public", health.ready),
    Route("/startupz", GET, "public", health.started),
    Route("/metrics", GET, "public", health.metrics),  # this listener is loopback by default
    Route("/admin/v1/nodes", GET, "operator", nodes.list_nodes),
    Route("/admin/v1/nodes/{node}/drain", ("POST",), "operator", nodes.drain),
    Route("/admin/v1/nodes/{node}/undrain", ("POST",), "operator", nodes.undrain),
)


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
    nearest = near(path, [route.path for route in routes])
    raise GatewayError(
        "not_found",
        field="path",
        found=quote(path),
        allowed="a path of this listener",
        remedy="did you mean " + " or ".join(nearest) + "?" if nearest else "see docs/errors.md",
    )
