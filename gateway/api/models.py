"""What can be served now: GET /v1/models and GET /v1/models/{model}."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gateway.api.exchange import Exchange
from gateway.errors import GatewayError, near, quote
from gateway.nodes.fleet import Fleet
from gateway.nodes.views import ServedModel
from gateway.services import Services
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
    """What is served and at what price, as far as OpenAI's own fields have no place for it."""

    nodes: int
    chat: bool  # else it has no template, and only /v1/completions takes it
    weights_precision: str
    kv_precision: str
    compute: str
    tools: bool  # its template knows tools
    weights_digest: str
    page_size: int
    page_bytes: int  # of kv_precision, scales included; 0: an older node, which does not tell
    kv_capacity: tuple[TierCapacity, ...]  # fastest first
    price_pico_usd_per_token: Rates


class Model(Struct, frozen=True, kw_only=True):
    """The window is told under every name that clients look for it by."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    context_length: int
    context_window: int
    max_model_len: int
    max_input_tokens: int
    meta: Training
    alias_of: str | None
    kagari: Disclosure


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


async def list_models(services: Services, exchange: Exchange) -> None:
    """List what can be served now: the default first, aliases last."""
    models = services.fleet.models()
    await exchange.reply_json(ModelList(data=[_told(services, model) for model in models]))


async def show_model(services: Services, exchange: Exchange) -> None:
    """Show a model by its name or alias."""
    model = find_model(services.fleet, exchange.parameters["model"])
    await exchange.reply_json(_told(services, model))


def find_model(fleet: Fleet, name: str) -> ServedModel:
    """Raises GatewayError: model_not_found with the nearest names, or no_node when none is up."""
    model = fleet.model(name)
    if model is not None:
        return model
    names = [served.name for served in fleet.models()]
    if not names:
        raise GatewayError(
            "no_node",
            field="model",
            found=quote(name),
            allowed="a model of a node that is ready",
            remedy="wait until a node is ready, see /readyz",
            retry_after_s=2.0,
        )
    nearest = near(name, names) or names[:3]
    raise GatewayError(
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
