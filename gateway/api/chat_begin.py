"""A chat completion until its answer begins: text, limits, reservation, dispatch, the row."""

from __future__ import annotations

from array import array

from gateway.api.chat_request import ChatRequest
from gateway.api.completion_run import CompletionRun
from gateway.api.exchange import Exchange, dice
from gateway.api.models import find_model, window_of
from gateway.api.time_limit import TimeLimit
from gateway.errors import KINDS, GatewayError
from gateway.ledger.keys import Key
from gateway.ledger.rows import LedgerFull
from gateway.nodes.fleet import Fleet, NoCapacity, NoNode
from gateway.nodes.streams import Dispatch, Stream
from gateway.nodes.views import ServedModel
from gateway.services import Services
from gateway.text.errors import TextError
from policies.admission import Shed, Ticket
from policies.affinity import find_signal, scoped_digest
from policies.contract.page_keys import seed
from policies.contract.wire import Sampling


async def begin(
    services: Services, exchange: Exchange, key: Key, ticket: Ticket, request: ChatRequest
) -> CompletionRun:
    """Returns when the node computes and the row is committed. Raises GatewayError."""
    served = find_model(services.fleet, request.model)
    exchange.notes["model"] = served.name  # one of ours: what a client wrote may be anything
    prompt = await _prompt(services, served, request)
    max_tokens = _max_tokens(services, exchange, served, len(prompt), request.max_tokens)
    shed = services.admission.reserve(ticket, prompt_tokens=len(prompt), max_tokens=max_tokens)
    if shed is not None:
        raise shed_error(shed)

    info, text = served.info, served.text
    canonical = served.alias_of or served.name
    salt = services.home.salt(key.tenant)
    root = seed(
        identity=info.identity,
        tokenizer_digest=info.tokenizer_digest,
        page_size=info.page_size,
        salt=salt,
    )
    signal = find_signal(exchange.headers, request.hints)
    for source in signal.ignored:
        services.metrics.count("kagari_affinity_ignored", source=source)
    session = (
        scoped_digest(tenant=key.tenant, model=canonical, value=signal.value)
        if signal.value is not None
        else None
    )
    page_keys = text.page_keys(root, prompt)
    stream = _dispatch(
        services.fleet,
        Dispatch(
            request_id=exchange.request_id,
            tenant=key.tenant,
            model=canonical,
            prompt=prompt,
            page_keys=page_keys,
            salt=salt,
            sampling=Sampling(
                max_tokens=max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                seed=dice.getrandbits(63) if request.seed is None else request.seed,
                stop_token_ids=tuple(text.stop_token_ids),
            ),
            deadline_s=services.config.limits.request_deadline_s,
            affinity_key=session,
        ),
    )
    exchange.notes.update(
        prompt_tokens=len(prompt), affinity=stream.affinity, affinity_source=signal.source
    )
    services.metrics.count("kagari_affinity", outcome=stream.affinity)
    run = CompletionRun(
        services=services,
        exchange=exchange,
        stream=stream,
        output=text.output(request.stops),
        model=canonical,
        prompt_tokens=len(prompt),
        rates=services.prices.rates(canonical),
    )
    try:
        await run.open_row(key, session=session, deepest_key=page_keys[-1] if page_keys else None)
    except LedgerFull as refusal:
        run.discard()
        raise GatewayError(
            "ledger_full",
            found="a ledger that takes no rows",
            allowed="requests that can be billed",
            remedy="send the request again; the operator sees the reason at /readyz",
            retry_after_s=refusal.retry_after_s,
        ) from None
    except BaseException:
        run.close(client_left=exchange.client_left)
        raise
    return run


def _dispatch(fleet: Fleet, dispatch: Dispatch) -> Stream:
    try:
        return fleet.dispatch(dispatch)
    except NoCapacity as refusal:
        raise GatewayError(
            "capacity_exceeded",
            field="model",
            found="every node that serves it full",
            allowed="a node with room",
            remedy="send the request again",
            retry_after_s=refusal.retry_after_s,
        ) from None
    except NoNode:
        raise GatewayError(
            "no_node",
            field="model",
            found="no node that serves it",
            allowed="a node that is ready",
            remedy="send the request again",
            retry_after_s=2.0,
        ) from None


async def _prompt(services: Services, served: ServedModel, request: ChatRequest) -> array[int]:
    """Token ids (array of typecode 'I') of the rendered conversation."""
    deadline_s = services.config.limits.request_deadline_s
    try:
        with TimeLimit(deadline_s):
            return await served.text.chat_prompt(request.messages)
    except TimeoutError:
        raise GatewayError(
            "deadline_exceeded",
            field="messages",
            found=f"text that took over {deadline_s:g} s to tokenise",
            allowed=f"{deadline_s:g} s",
            remedy="send the request again",
        ) from None
    except TextError as error:
        if error.code == "context_length_exceeded":
            raise _too_long(served, error.found) from None
        raise GatewayError(
            error.code if error.code in KINDS else "invalid_request",
            field=error.field,
            found=error.found,
            allowed=error.allowed,
            remedy=error.remedy,
        ) from None


def _max_tokens(
    services: Services,
    exchange: Exchange,
    served: ServedModel,
    prompt_tokens: int,
    asked: int | None,
) -> int:
    """The room that is left, or less; a clipped limit is told in x-kagari-changed."""
    room = window_of(served.info) - prompt_tokens
    if room < 1:
        raise _too_long(served, f"{prompt_tokens} tokens")
    bound = services.config.limits.max_completion_tokens
    allowed = room if bound is None else min(room, bound)
    if asked is None:
        return allowed
    if asked > allowed:
        exchange.common_headers.append(("x-kagari-changed", f"max_tokens {asked} -> {allowed}"))
    return min(asked, allowed)


def _too_long(served: ServedModel, found: str) -> GatewayError:
    """The words are those that harnesses recognise, so that they compact and do not retry."""
    window = window_of(served.info)
    return GatewayError(
        "context_length_exceeded",
        field="messages",
        found=found,
        allowed=f"{window - 1} tokens",
        remedy="shorten or compact the conversation",
        message=(
            f"This model's maximum context length is {window} tokens. However, you requested "
            f"{found} in the messages. Please reduce the length of the messages: "
            f"prompt is too long: {found} > {window - 1} maximum."
        ),
    )


def shed_error(shed: Shed) -> GatewayError:
    """A refusal of admission as what the client is told."""
    if shed.reason in ("rate", "key_concurrency"):
        what = "requests a minute" if shed.reason == "rate" else "requests at a time"
        return GatewayError(
            "rate_limit_exceeded",
            found=f"more than {shed.allowed} {what} with this key",
            allowed=f"{shed.allowed} {what}",
            remedy="wait and send the request again",
            retry_after_s=shed.retry_after_s,
        )
    what = "requests" if shed.reason == "concurrency" else "reserved tokens"
    return GatewayError(
        "capacity_exceeded",
        found=f"{shed.allowed} {what} in flight",
        allowed=f"{shed.allowed} {what} at a time",
        remedy="wait and send the request again",
        retry_after_s=shed.retry_after_s,
    )
