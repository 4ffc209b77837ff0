"""What can be served now: GET /v1/models and GET /v1/models/{model}."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gateway.api.exchange import Exchange
from gateway.errors import GatewayError, near, quote
from gateway.nodes.views import ServedModel
from gateway.services import Services
from gateway.upstreams.upstream import UpstreamModel
from policies.contract.wire import EngineInfo, Tier
from policies.pricing import Rates

CREATED = 1_704_067_200  # the field is required and has no meaning here: a constant


class Training(Struct, frozen=True):
    n_ctx_train: int


class TierCapacity(Struct, frozen=True):
    """How many tokens' pages one node keeps there; 0: the store itself decides."""

    tier: Tier
    tokens: int


class Disclosure(Struct, frozen=True):
    """What is served and at what price, as far as OpenAI's own fields have no place for it.

    Of an upstream's model, what only its server knows is null; upstreams has their names.
    """

    nodes: int
    chat: bool  # else it has no template, and only /v1/completions takes it
    weights_precision: str | None
    kv_precision: str | None
    compute: str | None
    tools: bool  # its template knows tools
    weights_digest: str | None
    page_size: int | None
    page_bytes: int | None  # of kv_precision, scales included; 0: an older node, which tells none
    kv_capacity: tuple[TierCapacity, ...]  # fastest first
    price_pico_usd_per_token: Rates
    upstreams: tuple[str, ...] = ()


class Model(Struct, frozen=True, kw_only=True):
    """The window is told under every name that clients look for it by; null: not known."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    context_length: int | None
    context_window: int | None
    max_model_len: int | None
    max_input_tokens: int | None
    meta: Training | None
    alias_of: str | None
    kagari: Disclosure


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


async def list_models(services: Services, exchange: Exchange) -> None:
    """List what can be served now: the default first, aliases last."""
    ours = [_told(services, model) for model in services.fleet.models()]
    taken = {model.id for model in ours}
    theirs = [] if services.upstreams is None else services.upstreams.models()
    told = [*ours, *(_told_of(services, model) for model in theirs if model.name not in taken)]
    told.sort(key=lambda model: model.alias_of is not None)
    await exchange.reply_json(ModelList(data=told))


async def show_model(services: Services, exchange: Exchange) -> None:
    """Show a model by its name or alias."""
    name = exchange.parameters["model"]
    upstreams = services.upstreams
    if services.fleet.model(name) is None and upstreams is not None:
        theirs = upstreams.model(name)
        if theirs is not None:
            await exchange.reply_json(_told_of(services, theirs))
            return
    await exchange.reply_json(_told(services, find_model(services, name)))


def find_model(services: Services, name: str) -> ServedModel:
    """One that nodes serve. Raises GatewayError."""
    model = services.fleet.model(name)
    if model is not None:
        return model
    if services.upstreams is not None and services.upstreams.model(name) is not None:
        raise GatewayError(
            "unsupported",
            field="model",
            found=f"{quote(name)}, which an upstream serves",
            allowed="a model of a node",
            remedy="ask for completions with it, or name another model",
        )
    raise unknown_model(services, name)


def unknown_model(services: Services, name: str) -> GatewayError:
    """model_not_found with the nearest names; no_node when nothing with such a name is up."""
    upstreams = services.upstreams
    names = [served.name for served in services.fleet.models()]
    names += [] if upstreams is None else [model.name for model in upstreams.models()]
    if not names or (upstreams is not None and upstreams.knows(name)):
        return GatewayError(
            "no_node",
            field="model",
            found=quote(name),
            allowed="a model of a node or an upstream that is ready",
            remedy="wait until one is ready, see /readyz",
            retry_after_s=2.0,
        )
    nearest = near(name, names) or names[:3]
    return GatewayError(
        "model_not_found",
        field="model",
        found=quote(name),
        allowed="one of GET /v1/models",
        remedy="did you mean " + " or ".join(quote(n) for n in nearest) + "?",
    )


def window_of(info: EngineInfo) -> int:
    """The limit in force, in tokens: the model's context, or a node's smaller pool."""
    return min(info.context_tokens, info.num_pages * info.page_size)


def _told(services: Services, model: ServedModel) -> Model:
    info = model.info
    window = window_of(info)
    return Model(
        id=model.name,
        created=CREATED,
        owned_by=info.owned_by,
        context_length=window,
        context_window=window,
        max_model_len=window,
        max_input_tokens=window - 1,
        meta=Training(window),
        alias_of=model.alias_of,
        kagari=Disclosure(
            nodes=model.nodes,
            chat=model.text.has_template,
            weights_precision=info.weights_precision,
            kv_precision=info.kv_precision,
            compute=info.compute,
            tools=model.text.parser_family is not None,
            weights_digest=info.weights_digest,
            page_size=info.page_size,
            page_bytes=info.page_bytes,
            kv_capacity=tuple(
                TierCapacity(tier, pages * info.page_size)
                for tier, pages in (("device", info.num_pages), *info.tier_pages)
            ),
            price_pico_usd_per_token=services.prices.rates(model.alias_of or model.name),
        ),
    )


def _told_of(services: Services, model: UpstreamModel) -> Model:
    window = model.context_tokens
    configs = [upstream.config for upstream in model.upstreams]
    text = model.text
    return Model(
        id=model.name,
        created=CREATED,
        owned_by=model.upstreams[0].name,
        context_length=window,
        context_window=window,
        max_model_len=window,
        max_input_tokens=None if window is None else window - 1,
        meta=None if window is None else Training(window),
        alias_of=model.alias_of,
        kagari=Disclosure(
            nodes=0,
            chat=text is None or text.has_template,
            weights_precision=None,
            kv_precision=None,
            compute=None,
            tools=all(config.tools for config in configs),
            weights_digest=None,
            page_size=None if text is None else text.page_size,
            page_bytes=None,
            kv_capacity=(),
            price_pico_usd_per_token=services.prices.rates(model.canonical),
            upstreams=tuple(upstream.name for upstream in model.upstreams),
        ),
    )
