"""A completion until its answer begins: entry, text, limits, reservation, dispatch, the row."""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.api.booking import ledger_full
from gateway.api.choice import Choice, Echo
from gateway.api.completion_run import CompletionRun, Part
from gateway.api.exchange import Exchange, dice
from gateway.api.models import find_model, window_of
from gateway.api.retention import Retention
from gateway.api.sampling_request import SamplingRequest
from gateway.api.time_limit import TimeLimit
from gateway.api.tools_request import NO_TOOLS, ToolsRequest
from gateway.errors import KINDS, GatewayError
from gateway.ledger.keys import Key
from gateway.ledger.rows import LedgerFull
from gateway.nodes.streams import Dispatch
from gateway.nodes.views import ServedModel
from gateway.services import Services
from gateway.text.errors import TextError
from policies.admission import Shed, Ticket
from policies.affinity import BodyHints, Signal, find_signal, scoped_digest
from policies.contract.page_keys import seed


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids: typecode 'I'. field: where the client wrote it. echo: what its choices begin with."""

    ids: array[int]
    field: str
    echo: Echo | None = None


@contextmanager
def enter(services: Services, exchange: Exchange) -> Iterator[Ticket]:
    """Rate and concurrency, before any text work; left again at the end, whatever happened."""
    assert exchange.key is not None, "the route's role is client"
    key_id = exchange.key.key_id
    now = time.monotonic()
    ticket = services.admission.enter(key_id, now)
    rate = services.admission.rate(key_id, now)
    if rate is not None:
        exchange.common_headers += [
            ("x-ratelimit-limit-requests", str(rate.limit)),
            ("x-ratelimit-remaining-requests", str(rate.remaining)),
            ("x-ratelimit-reset-requests", f"{rate.reset_s:.3f}s"),
        ]
    if isinstance(ticket, Shed):
        raise shed_error(ticket)
    try:
        yield ticket
    finally:
        services.admission.leave(ticket)


def find_served(services: Services, exchange: Exchange, model: str) -> ServedModel:
    """Raises GatewayError when no such model is served."""
    served = find_model(services, model)
    exchange.notes["model"] = served.name  # one of ours: what a client wrote may be anything
    return served


async def begin(
    services: Services,
    exchange: Exchange,
    ticket: Ticket,
    served: ServedModel,
    *,
    prompts: Sequence[Prompt],
    sampling: SamplingRequest,
    retention: Retention,
    hints: BodyHints,
    tools: ToolsRequest = NO_TOOLS,
) -> CompletionRun:
    """Returns when a node computes and the row is committed. Raises GatewayError.

    Of each prompt come sampling.n choices, in the order of the prompts.
    """
    key = exchange.key
    assert key is not None, "the route's role is client"
    limits = [_max_tokens(services, served, prompt, sampling.max_tokens) for prompt in prompts]
    if sampling.max_tokens is not None and sampling.max_tokens > min(limits):
        exchange.common_headers.append(_clipped(sampling.max_tokens, limits))
    exchange.common_headers += retention.headers()
    for prompt, max_tokens in zip(prompts, limits, strict=True):
        shed = services.admission.reserve(
            ticket, prompt_tokens=len(prompt.ids), max_tokens=max_tokens, choices=sampling.n
        )
        if shed is not None:
            raise shed_error(shed)

    text, canonical = served.text, canonical_name(served)
    signal = find_signal(exchange.headers, hints)
    for source in signal.ignored:
        services.metrics.count("kagari_affinity_ignored", source=source)
    session = session_key(key.tenant, served, signal)
    deadline_s = ttft_left_s(services, exchange, key)
    parts: list[Part] = []
    for number, (prompt, max_tokens) in enumerate(zip(prompts, limits, strict=True)):
        dispatch = make_dispatch(
            services,
            served,
            prompt,
            sampling,
            # Each prompt is a Submit of its own; the row is the request's.
            request_id=f"{exchange.request_id}.{number}" if number else exchange.request_id,
            tenant=key.tenant,
            session=session,
            max_tokens=max_tokens,
            retention_s=retention.seconds,
            ttft_deadline_s=None if number else deadline_s,  # the first one's stands for all
        )
        choices = [
            Choice(
                number * sampling.n + lane,
                text.output(
                    sampling.stops,
                    min_tokens=sampling.min_tokens,
                    with_places=sampling.logprobs is not None,
                ),
                echo=prompt.echo,
                has_logprobs=sampling.logprobs is not None,
                drops_output=sampling.max_tokens == 0,
                calls=text.tool_calls(_call_id) if tools.functions else None,
                one_call=tools.one_call,
            )
            for lane in range(sampling.n)
        ]
        parts.append(Part(dispatch, choices))
    run = CompletionRun(
        services=services,
        exchange=exchange,
        parts=parts,
        model=canonical,
        rates=services.prices.rates(canonical),
    )
    run.dispatch()
    stream = run.first
    exchange.notes.update(
        prompt_tokens=run.prompt_tokens, affinity=stream.affinity, affinity_source=signal.source
    )
    services.metrics.count("kagari_affinity", outcome=stream.affinity)
    page_keys = parts[0].dispatch.page_keys
    try:
        await run.open_row(key, session=session, deepest_key=page_keys[-1] if page_keys else None)
    except LedgerFull as refusal:
        run.discard()
        raise ledger_full(refusal) from None
    except BaseException:
        run.close(client_left=exchange.client_left)
        raise
    return run


def canonical_name(served: ServedModel) -> str:
    return served.alias_of or served.name


def session_key(tenant: str, served: ServedModel, signal: Signal) -> bytes | None:
    """The conversation's name inside one tenant and model; None without a signal."""
    if signal.value is None:
        return None
    return scoped_digest(tenant=tenant, model=canonical_name(served), value=signal.value)


def make_dispatch(
    services: Services,
    served: ServedModel,
    prompt: Prompt,
    sampling: SamplingRequest,
    *,
    request_id: str,
    tenant: str,
    session: bytes | None,
    max_tokens: int,
    retention_s: float | None = None,
    ttft_deadline_s: float | None = None,
) -> Dispatch:
    """What the fleet must know of one prompt."""
    info, text = served.info, served.text
    salt = services.home.salt(tenant)
    root = seed(
        identity=info.identity,
        tokenizer_digest=info.tokenizer_digest,
        page_size=info.page_size,
        salt=salt,
    )
    return Dispatch(
        request_id=request_id,
        tenant=tenant,
        model=canonical_name(served),
        prompt=prompt.ids,
        page_keys=text.page_keys(root, prompt.ids),
        salt=salt,
        # Each prompt draws as if it were alone, so that its place in a batch changes nothing.
        sampling=sampling.to_wire(
            text,
            max_tokens=max_tokens,
            seed=dice.getrandbits(63) if sampling.seed is None else sampling.seed,
        ),
        deadline_s=services.config.limits.request_deadline_s,
        affinity_key=session,
        n=sampling.n,
        compute=info.compute,
        retention_s=retention_s,
        ttft_deadline_s=ttft_deadline_s,
    )


async def tokenised(
    services: Services, served: ServedModel, field: str, work: Awaitable[array[int]]
) -> array[int]:
    """work's token ids; field is where the client wrote their text. Raises GatewayError."""
    deadline_s = services.config.limits.request_deadline_s
    try:
        with TimeLimit(deadline_s):
            return await work
    except TimeoutError:
        raise GatewayError(
            "deadline_exceeded",
            field=field,
            found=f"text that took over {deadline_s:g} s to tokenise",
            allowed=f"{deadline_s:g} s",
            remedy="send the request again",
        ) from None
    except TextError as error:
        if error.code == "context_length_exceeded":
            raise too_long(served, field, error.found) from None
        raise GatewayError(
            error.code if error.code in KINDS else "invalid_request",
            field=field if error.field == "prompt" else error.field,
            found=error.found,
            allowed=error.allowed,
            remedy=error.remedy,
        ) from None


def ttft_left_s(services: Services, exchange: Exchange, key: Key) -> float | None:
    """Until the request's first token has to come; None: whenever it comes."""
    limit_ms = key.ttft_deadline_ms
    if limit_ms is None:
        limit_ms = services.config.limits.ttft_deadline_ms
    if limit_ms is None:
        return None
    return max(0.001, exchange.started + limit_ms / 1000.0 - time.monotonic())


def _max_tokens(services: Services, served: ServedModel, prompt: Prompt, asked: int | None) -> int:
    """The room that is left, or less."""
    room = window_of(served.info) - len(prompt.ids)
    if room < 1:
        raise too_long(served, prompt.field, f"{len(prompt.ids)} tokens")
    bound = services.config.limits.max_completion_tokens
    allowed = room if bound is None else min(room, bound)
    if asked is None:
        return allowed
    return max(1, min(asked, allowed))  # of 0 tokens the engine computes one that nobody sees


def _clipped(asked: int, limits: Sequence[int]) -> tuple[str, str]:
    """One short header, of however many prompts and digits: clients and proxies bound theirs."""
    shown = str(asked) if asked < 1 << 63 else f"(a number of {len(str(asked))} digits)"
    return ("x-kagari-changed", f"max_tokens {shown} -> {min(limits)}")


def too_long(served: ServedModel, field: str, found: str) -> GatewayError:
    """A prompt beyond the model's window."""
    return beyond_window(window_of(served.info), field, found)


def beyond_window(window: int, field: str, found: str) -> GatewayError:
    """In words that harnesses recognise: they compact, not retry."""
    return GatewayError(
        "context_length_exceeded",
        field=field,
        found=found,
        allowed=f"{window - 1} tokens",
        remedy="shorten or compact it",
        message=(
            f"This model's maximum context length is {window} tokens. However, you requested "
            f"{found} in the {field}. Please reduce the length of the {field}: "
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


def _call_id() -> str:
    return f"call_{dice.getrandbits(96):024x}"
