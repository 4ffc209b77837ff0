"""What can be served now: GET /v1/models and GET /v1/models/{model}."""

from __future__ import annotations

from gateway.api.exchange import Exchange
from gateway.errors import GatewayError, near, quote
from gateway.nodes.fleet import Fleet
from gateway.nodes.views import ServedModel
from gateway.services import Services
from policies.contract.wire import EngineInfo

CREATED = 1_704_067_200  # the field is required and has no meaning here: a constant


async def list_models(services: Services, exchange: Exchange) -> None:
    data = [_fields(services, model) for model in services.fleet.models()]
    await exchange.reply_json({"object": "list", "data": data})


async def show_model(services: Services, exchange: Exchange) -> None:
    model = find_model(services.fleet, exchange.parameters["model"])
    await exchange.reply_json(_fields(services, model))


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


def _fields(services: Services, model: ServedModel) -> dict[str, object]:
    """The window is told under every name that clients look for it by."""
    info = model.info
    window = window_of(info)
    rates = services.prices.rates(model.alias_of or model.name)
    return {
        "id": model.name,
        "object": "model",
        "created": CREATED,
        "owned_by": info.owned_by,
        "context_length": window,
        "context_window": window,
        "max_model_len": window,
        "max_input_tokens": window - 1,
        "meta": {"n_ctx_train": window},
        "alias_of": model.alias_of,
        "kagari": {
            "nodes": model.nodes,
            "weights_precision": info.weights_precision,
            "kv_precision": info.kv_precision,
            "compute": info.compute,
            "weights_digest": info.weights_digest,
            "page_size": info.page_size,
            "price_pico_usd_per_token": {
                "input": rates.input,
                "cached": rates.cached,
                "output": rates.output,
            },
        },
    }
