"""POST /v1/chat/completions: from a decoded body to the last byte, settled exactly once.

    enter → text → limits → reserve → dispatch ─┬─ node computes
                                                └─ row committed → first byte → … → settle

Before the first byte a failure is a status; after it, a terminal error event. Headers are held back
until something is known or the first heartbeat is due, so most failures still become a status.
"""

from __future__ import annotations

import time
from typing import assert_never

from gateway.api.body import ClientLeft
from gateway.api.chat_begin import begin, shed_error
from gateway.api.chat_request import ChatRequest, read_chat_request
from gateway.api.completion_run import CompletionRun
from gateway.api.exchange import Exchange
from gateway.api.sse import DONE, HEARTBEAT, STREAM_HEADERS, ChatChunks, completion, error_event
from gateway.api.stall import StallGuard
from gateway.api.time_limit import TimeLimit
from gateway.errors import GatewayError, fault
from gateway.ledger.keys import Key
from gateway.nodes.streams import Burst
from gateway.services import Services
from policies.admission import Shed, Ticket
from policies.contract.wire import Failed, Finished


async def chat(services: Services, exchange: Exchange) -> None:
    """Key and body were checked by the caller; raises GatewayError before the first byte."""
    key = exchange.key
    assert key is not None, "the route's role is client"
    ticket = _enter(services, exchange, key)
    try:
        request = read_chat_request(exchange.body, services.config.limits)
        exchange.body = b""  # decoded: a long stream need not hold it
        exchange.notes.update(stream=request.stream)
        run = await begin(services, exchange, key, ticket, request)
        try:
            if request.stream:
                await _stream(services, exchange, request, run)
            else:
                await _whole(services, exchange, request, run)
        except TimeoutError:  # a send that stalled: who takes nothing for so long is gone
            exchange.client_left = True
            raise ClientLeft from None
        except Exception:
            run.reason = None  # a fault of ours before it was settled: nothing is billed
            raise
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
        raise shed_error(ticket)
    return ticket


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
            raise _ours(failure)
        texts.append(text)
    data = completion(
        completion_id=f"chatcmpl-{exchange.request_id}",
        created=run.created,
        model=request.model,
        text="".join(texts),
        reason=run.reason,
        usage=run.usage(),
    )
    headers = [*run.headers(), ("x-kagari-cost-nano-usd", str(run.cost_nano_usd()))]
    run.close(client_left=False)  # from here on it is billed, so nothing of ours may fail after it
    with TimeLimit(stall_s):
        await exchange.reply(200, data, headers=headers)


async def _stream(
    services: Services, exchange: Exchange, request: ChatRequest, run: CompletionRun
) -> None:
    config = services.config.stream
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
            raise _ours(failure)  # nothing was sent yet: it becomes a status
    async with StallGuard(config.send_stall_s) as guard:
        await guard.send(exchange.start(200, [*STREAM_HEADERS, *run.headers()]))
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
                await guard.send(exchange.end(data + DONE))
                return
            if failure is not None:
                # Who reads too slowly left of their own will: what was produced is billed.
                run.close(client_left=failure.code == "slow_reader")
                services.metrics.count("kagari_errors", code=failure.code)
                exchange.notes["error"] = failure.code
                await guard.send(
                    exchange.end(data + error_event(failure.body(exchange.request_id)))
                )
                return
            if data:
                await guard.send(exchange.write(data))
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


def _ours(failure: GatewayError) -> GatewayError:
    """While nothing is sent nobody can read slowly: tokens waited for us, say for the row."""
    return fault("server_error") if failure.code == "slow_reader" else failure
