"""A completion that an upstream computes: from a claimed body to the last byte, settled once.

enter → limits → text, if a bundle is here → reserve → dispatch ─┬─ upstream computes
                                                                └─ row → first byte → … → settle
The text goes on as it came. With a bundle it is tokenised here too, so that admission and page keys
are exact; without, its bytes bound its tokens.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from functools import cache

import msgspec

from gateway.api.answer import settled
from gateway.api.booking import ledger_full
from gateway.api.chat_request import ChatMessage, read_messages
from gateway.api.completion_begin import beyond_window, enter, shed_error, ttft_left_s
from gateway.api.exchange import Exchange
from gateway.api.models import unknown_model
from gateway.api.sse import DONE, HEARTBEAT, STREAM_HEADERS, error_event
from gateway.api.stall import StallGuard
from gateway.api.time_limit import TimeLimit
from gateway.api.tools_request import read_functions
from gateway.errors import GatewayError
from gateway.ledger.rows import LedgerFull
from gateway.services import Services
from gateway.text.errors import TextError
from gateway.text.model import TextModel
from gateway.upstreams.events import Event
from gateway.upstreams.registry import Ask, Upstreams
from gateway.upstreams.request import (
    BYTES_PER_TOKEN,
    ID_PREFIXES,
    OBJECTS,
    RelayRequest,
    Route,
    check_able,
    model_of,
    read_relay_request,
)
from gateway.upstreams.rewrite import StreamRewriter, decode_members, whole
from gateway.upstreams.run import UpstreamRun
from gateway.upstreams.upstream import Upstream, UpstreamModel
from gateway.upstreams.usage import read_usage, told_to_client
from policies.affinity import find_signal, scoped_digest


def claims(services: Services, body: bytes) -> bool:
    """Whether a request is an upstream's: our own engines come first."""
    if services.upstreams is None:
        return False
    name = model_of(body)
    if name is None or services.fleet.model(name) is not None:
        return False
    return services.upstreams.model(name) is not None or services.upstreams.knows(name)


async def relay(services: Services, exchange: Exchange, route: Route) -> None:
    """Key and body were checked by the caller; raises GatewayError before the first byte."""
    upstreams = services.upstreams
    assert upstreams is not None, "it claimed the request"
    with enter(services, exchange) as ticket:
        request = read_relay_request(exchange.body, route, services.config.limits)
        exchange.body = b""
        model = _find(services, upstreams, request.body.model)
        exchange.notes.update(stream=request.stream, model=model.name)
        check_able(request, [upstream.config for upstream in model.upstreams])
        exchange.common_headers += request.headers()
        ids = await _tokenised(model, request, services.config.limits.request_deadline_s)
        tokens = _count(request, ids)
        max_tokens = _max_tokens(services, exchange, model, request, tokens, is_exact=bool(ids))
        shed = services.admission.reserve(
            ticket,
            prompt_tokens=tokens,
            max_tokens=services.config.admission.output_reserve_tokens
            if max_tokens is None
            else max_tokens,
            choices=request.choices,
        )
        if shed is not None:
            raise shed_error(shed)
        run = await _begin(services, exchange, upstreams, model, request, ids, tokens, max_tokens)
        with settled(exchange, run):
            if request.stream:
                await _send_stream(services, exchange, run)
            else:
                await _send_whole(services, exchange, run)


async def _begin(
    services: Services,
    exchange: Exchange,
    upstreams: Upstreams,
    model: UpstreamModel,
    request: RelayRequest,
    ids: Sequence[array[int]],
    tokens: int,
    max_tokens: int | None,
) -> UpstreamRun:
    """Returns when an upstream computes and the row is committed. Raises GatewayError."""
    key = exchange.key
    assert key is not None, "the route's role is client"
    signal = find_signal(exchange.headers, request.hints)
    for source in signal.ignored:
        services.metrics.count("kagari_affinity_ignored", source=source)
    session = (
        scoped_digest(tenant=key.tenant, model=model.canonical, value=signal.value)
        if signal.value is not None
        else None
    )

    @cache
    def keys(upstream: Upstream) -> Sequence[bytes]:
        if not ids or upstream.text is None or model.text is None:
            return ()
        if upstream.text.tokenizer_digest != model.text.tokenizer_digest:
            return ()  # it reads another text from these ids
        return upstream.event_keys(model.canonical, key.tenant, ids[0])

    left_s = ttft_left_s(services, exchange, key)
    run = UpstreamRun(
        services=services,
        upstreams=upstreams,
        exchange=exchange,
        request=request,
        ask=Ask(
            model=model,
            prompt_tokens=tokens,
            keys=keys,
            session=session,
            request_id=exchange.request_id,
            whole=not request.is_one_sequence,
            ttft_by=None if left_s is None else upstreams.clock() + left_s,
        ),
        tenant=key.tenant,
        max_tokens=max_tokens if max_tokens != request.max_tokens else None,
        rates=services.prices.rates(model.canonical),
        rewriter=StreamRewriter(
            answer_id=f"{ID_PREFIXES[request.route]}-{exchange.request_id}",
            model=request.body.model,
            wants_usage=request.include_usage,
        ),
    )
    run.dispatch()
    affinity = run.way.decision.affinity
    exchange.notes.update(prompt_tokens=tokens, affinity=affinity, affinity_source=signal.source)
    services.metrics.count("kagari_affinity", outcome=affinity)
    deepest = keys(run.way.upstream)
    try:
        await run.open_row(key, session=session, deepest_key=deepest[0] if deepest else None)
    except LedgerFull as refusal:
        run.discard()
        raise ledger_full(refusal) from None
    except BaseException:
        run.close(client_left=exchange.client_left)
        raise
    return run


def _find(services: Services, upstreams: Upstreams, name: str) -> UpstreamModel:
    """Raises GatewayError: no_node when it is known but no server is up."""
    model = upstreams.model(name)
    if model is None:
        raise unknown_model(services, name)
    return model


# --- text -----------------------------------------------------------------------------------------


async def _tokenised(
    model: UpstreamModel, request: RelayRequest, patience_s: float
) -> list[array[int]]:
    """The ids of each prompt; none where that cannot be known here. Never refuses: what a text may
    hold is the upstream's to say."""
    if model.text is None:
        return []
    try:
        with TimeLimit(patience_s):
            if request.route == "chat":
                return [await _chat_ids(model.text, request)]
            return await _prompt_ids(model.text, request)
    except (TextError, GatewayError, msgspec.MsgspecError, OverflowError, TimeoutError):
        return []


async def _chat_ids(text: TextModel, request: RelayRequest) -> array[int]:
    messages = msgspec.convert(request.body.messages, list[ChatMessage])
    tools = msgspec.convert(request.body.tools or [], list[dict[str, object]])
    return await text.chat_prompt(read_messages(messages), read_functions(tools).functions)


async def _prompt_ids(text: TextModel, request: RelayRequest) -> list[array[int]]:
    prompt = request.body.prompt
    prompts = msgspec.convert(prompt if request.is_batch else [prompt], list[str | list[int]])
    return [
        await text.raw_prompt(one) if isinstance(one, str) else array("I", one) for one in prompts
    ]


def _count(request: RelayRequest, ids: Sequence[array[int]]) -> int:
    """Exactly, or a bound by the text's bytes."""
    tokens = sum([len(one) for one in ids]) if ids else request.text_bytes // BYTES_PER_TOKEN
    return max(1, tokens)


def _max_tokens(
    services: Services,
    exchange: Exchange,
    model: UpstreamModel,
    request: RelayRequest,
    tokens: int,
    *,
    is_exact: bool,
) -> int | None:
    """Completion tokens of a choice, at most; None where nobody says. Raises GatewayError."""
    asked, cap = request.max_tokens, services.config.limits.max_completion_tokens
    window = model.context_tokens
    if is_exact and window is not None and request.num_prompts == 1 and tokens >= window:
        field = "messages" if request.route == "chat" else "prompt"
        raise beyond_window(window, field, f"{tokens} tokens")
    if cap is None or (asked is not None and asked <= cap):
        return asked
    if asked is not None:
        exchange.common_headers.append(("x-kagari-changed", f"max_tokens {asked} -> {cap}"))
    return cap


# --- the answer -----------------------------------------------------------------------------------


async def _send_whole(services: Services, exchange: Exchange, run: UpstreamRun) -> None:
    while not run.is_complete:
        await run.next()
    members = decode_members(run.whole)
    usage = members.get("usage")
    run.told = None if usage is None else read_usage(msgspec.json.decode(usage))
    data = whole(
        members,
        answer_id=f"{ID_PREFIXES[run.request.route]}-{exchange.request_id}",
        model=run.request.body.model,
        usage=_usage(run),
    )
    headers = [*run.headers(), ("x-kagari-cost-nano-usd", str(run.cost_nano_usd()))]
    run.close(client_left=False)  # from here on it is billed, so nothing of ours may fail after it
    with TimeLimit(services.config.stream.send_stall_s):
        await exchange.reply(200, data, headers=headers)


async def _send_stream(services: Services, exchange: Exchange, run: UpstreamRun) -> None:
    config = services.config.stream
    first_wait_s = exchange.started + config.first_heartbeat_s - time.monotonic()
    events = await run.next(max(first_wait_s, 0.01))  # a fault until here becomes a status
    async with StallGuard(config.send_stall_s) as guard:
        await guard.send(exchange.start(200, [*STREAM_HEADERS, *run.headers()]))
        while True:
            data = _rewritten(run, events) if events or run.is_complete else HEARTBEAT
            if run.is_complete:
                if run.request.include_usage:
                    data += run.rewriter.usage_event(_usage(run), OBJECTS[run.request.route])
                run.close(client_left=False)
                await guard.send(exchange.end(data + DONE))
                return
            if data:
                await guard.send(exchange.write(data))
            try:
                events = await run.next(config.heartbeat_s)
            except GatewayError as error:
                run.close(client_left=False)
                services.metrics.count("kagari_errors", code=error.code)
                exchange.notes["error"] = error.code
                await guard.send(exchange.end(error_event(error.body(exchange.request_id))))
                return


def _rewritten(run: UpstreamRun, events: Sequence[Event]) -> bytes:
    return b"".join([run.rewriter.event(event) for event in events])


def _usage(run: UpstreamRun) -> dict[str, object]:
    rates = run.rates if run.request.include_cost else None
    return told_to_client(run.last_told, run.usage(), rates)
