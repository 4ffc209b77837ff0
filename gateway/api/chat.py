"""POST /v1/chat/completions: from a decoded body to the last byte, settled exactly once.

    enter → text → limits → reserve → dispatch ─┬─ node computes
                                                └─ row committed → first byte → … → settle

Before the first byte a failure is a status; after it, a terminal error event. Headers are held back
until something is known or the first heartbeat is due, so most failures still become a status.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from typing import assert_never

from gateway.api.body import ClientLeft
from gateway.api.chat_request import ChatRequest, read_chat_request
from gateway.api.completion_run import CompletionRun
from gateway.api.exchange import Exchange
from gateway.api.models import find_model, window_of
from gateway.api.sse import DONE, HEARTBEAT, STREAM_HEADERS, ChatChunks, completion, error_event
from gateway.errors import KINDS, GatewayError, fault
from gateway.ledger.keys import Key
from gateway.ledger.rows import LedgerFull
from gateway.nodes.fleet import NoCapacity, NoNode
from gateway.nodes.streams import Burst, Dispatch
from gateway.nodes.views import ServedModel
from gateway.services import Services
from gateway.text.errors import TextError
from policies.admission import Shed, Ticket
from policies.affinity import find_signal, scoped_digest
from policies.contract.page_keys import seed
from policies.contract.wire import Failed, Finished, Sampling


async def chat(services: Services, exchange: Exchange) -> None:
    """Key and body were checked by the caller; raises GatewayError before the first byte."""
    key = exchange.key
    assert key is not None, "the route's role is client"
    ticket = _enter(services, exchange, key)
    try:
        request = read_chat_request(exchange.body, services.config.limits)
        exchange.notes.update(model=request.model, stream=request.stream)
        run = await _begin(services, exchange, key, ticket, request)
        try:
            if request.stream:
                await _stream(services, exchange, request, run)
            else:
                await _whole(services, exchange, request, run)
        except TimeoutError:  # a send that stalled: who takes nothing for so long is gone
            exchange.client_left = True
            raise ClientLeft from None
        finally:
            run.close(client_left=exchange.client_left)
    finally:
        services.admission.leave(ticket)


def _enter(services: Services, exchange: Exchange, key: Key) -> Ticket:
    now = time.monotonic()
    ticket = services.admission.enter(key.key_id, now)
    rate = services.admission.rate(key.key_id, now)
    if rate is not None:
        exchange.common_headers += [
            ("x-ratelimit-limit-requests", str(rate.limit)),
            ("x-ratelimit-remaining-requests", str(rate.remaining)),
            ("x-ratelimit-reset-requests", f"{rate.reset_s:.3f}s"),
        ]
    if isinstance(ticket, Shed):
        raise _shed(ticket)
    return ticket


async def _begin(
    services: Services, exchange: Exchange, key: Key, ticket: Ticket, request: ChatRequest
) -> CompletionRun:
    """All that happens before the answer: text, limits, reservation, dispatch, the ledger's row."""
    served = find_model(services.fleet, request.model)
    prompt = await _prompt(services, served, request)
    max_tokens = _max_tokens(services, exchange, served, len(prompt), request.max_tokens)
    shed = services.admission.reserve(ticket, prompt_tokens=len(prompt), max_tokens=max_tokens)
    if shed is not None:
        raise _shed(shed)

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
    try:
        stream = services.fleet.dispatch(
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
                    seed=secrets.randbits(63) if request.seed is None else request.seed,
                    stop_token_ids=tuple(text.stop_token_ids),
                ),
                deadline_s=services.config.limits.request_deadline_s,
                affinity_key=session,
            )
        )
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


async def _prompt(services: Services, served: ServedModel, request: ChatRequest) -> array[int]:
    """Token ids (array of typecode 'I') of the rendered conversation."""
    deadline_s = services.config.limits.request_deadline_s
    try:
        async with asyncio.timeout(deadline_s):
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


def _shed(shed: Shed) -> GatewayError:
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


# --- the answer -----------------------------------------------------------------------------------


async def _whole(
    services: Services, exchange: Exchange, request: ChatRequest, run: CompletionRun
) -> None:
    stall_s = services.config.stream.send_stall_s
    texts: list[str] = []
    while run.reason is None:
        burst = await run.next()
        assert burst is not None, "without a time limit next waits for something"
        text, failure = _take(run, burst)
        if failure is not None:
            raise failure
        texts.append(text)
    data = completion(
        completion_id=f"chatcmpl-{exchange.request_id}",
        created=run.created,
        model=request.model,
        text="".join(texts),
        reason=run.reason,
        usage=run.usage(),
    )
    run.close(client_left=False)
    headers = [*run.headers(), ("x-kagari-cost-nano-usd", str(run.cost_nano_usd()))]
    async with asyncio.timeout(stall_s):
        await exchange.reply(200, data, headers=headers)


async def _stream(
    services: Services, exchange: Exchange, request: ChatRequest, run: CompletionRun
) -> None:
    config = services.config.stream
    stall_s = config.send_stall_s
    chunks = ChatChunks(
        completion_id=f"chatcmpl-{exchange.request_id}",
        created=run.created,
        model=request.model,
        include_usage=request.include_usage,
    )
    text: str | None = None  # None: nothing came, a heartbeat is due
    failure: GatewayError | None = None
    first_wait_s = exchange.started + config.first_heartbeat_s - time.monotonic()
    burst = await run.next(max(first_wait_s, 0.01))
    if burst is not None:
        text, failure = _take(run, burst)
        if failure is not None:
            raise failure  # nothing was sent yet: it becomes a status
    async with asyncio.timeout(stall_s):
        await exchange.start(200, [*STREAM_HEADERS, *run.headers()])
    role = chunks.role()  # sent once, in front of the first text
    while True:
        if text is None:
            data = HEARTBEAT
        else:
            data = role + chunks.content(text) if text else role
            role = b""
        if run.reason is not None:
            data += chunks.finish(run.reason)
            if request.include_usage:
                data += chunks.usage(run.usage())
            run.close(client_left=False)
            async with asyncio.timeout(stall_s):
                await exchange.end(data + DONE)
            return
        if failure is not None:
            run.close(client_left=False)
            services.metrics.count("kagari_errors", code=failure.code)
            exchange.notes["error"] = failure.code
            async with asyncio.timeout(stall_s):
                await exchange.end(data + error_event(failure.body(exchange.request_id)))
            return
        if data:
            async with asyncio.timeout(stall_s):
                await exchange.write(data)
        text, failure = None, None
        try:
            burst = await run.next(config.heartbeat_s)
        except GatewayError as error:  # the deadline
            text, failure = "", error
        else:
            if burst is not None:
                text, failure = _take(run, burst)


def _take(run: CompletionRun, burst: Burst) -> tuple[str, GatewayError | None]:
    """Text of a burst that may be sent, and the fault that ended it; sets run.reason at the end."""
    text = run.push(burst.tokens) if burst.tokens else ""
    end = burst.end
    if run.reason is not None or end is None:
        return text, None
    match end:
        case Finished(reason="stop" | "length"):
            return text + run.finish(end), None
        case Finished(reason="abort"):
            return text, fault("aborted")
        case Finished():
            return text, fault("engine_error")
        case Failed():
            return text, fault(end.code)
        case never:
            assert_never(never)
