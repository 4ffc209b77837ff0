"""The body of a text completion: what is accepted, what is ignored, what is refused and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from gateway.api.retention import Retention, read_retention
from gateway.api.sampling_request import (
    MAX_TOP_LOGPROBS,
    SamplingBody,
    SamplingRequest,
    invalid,
    read_sampling,
    unsupported,
    wants_cost,
    wants_usage,
)
from gateway.api.typed_input import decoded
from gateway.config import LimitsConfig
from policies.affinity import BodyHints

DEFAULT_MAX_TOKENS = 16  # what this route always had, unlike chat


class CompletionBody(SamplingBody, frozen=True):
    """The wire form. Types only; ranges are checked in `read_completion_request`."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    prompt_cache_key: object = None
    session_id: object = None
    metadata: object = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """prompts: texts, or token ids; each with the field where it stands."""

    model: str
    prompts: tuple[tuple[str, str | Sequence[int]], ...]
    echo: bool
    stream: bool
    include_usage: bool
    include_cost: bool
    sampling: SamplingRequest
    retention: Retention
    hints: BodyHints


_decode = msgspec.json.Decoder(CompletionBody).decode


def read_completion_request(data: bytes, limits: LimitsConfig) -> CompletionRequest:
    """Decode and check; raises GatewayError (400) that names the field."""
    body = decoded(data, _decode, needs="model and prompt")
    if not body.model:
        raise invalid("model", '""', "a model's name", "see GET /v1/models")
    if body.suffix:
        raise unsupported("suffix", "text", "none", "leave it out")
    echo = bool(body.echo)
    logprobs = body.logprobs
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise invalid("logprobs", str(logprobs), f"0 to {MAX_TOP_LOGPROBS}", "ask for fewer")
    sampling = read_sampling(
        body,
        limits,
        max_tokens=_max_tokens(body.max_tokens, echo=echo),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    if body.best_of is not None and body.best_of != sampling.n:
        if body.best_of < sampling.n:
            raise invalid("best_of", str(body.best_of), f"at least n ({sampling.n})", "raise it")
        raise unsupported(
            "best_of", str(body.best_of), f"n ({sampling.n})", "raise n and choose yourself"
        )
    return CompletionRequest(
        model=body.model,
        prompts=_prompts(body.prompt, limits),
        echo=echo,
        stream=bool(body.stream),
        include_usage=wants_usage(body),
        include_cost=wants_cost(body),
        sampling=sampling,
        retention=read_retention(body, limits),
        hints=BodyHints(
            prompt_cache_key=body.prompt_cache_key,
            session_id=body.session_id,
            metadata=body.metadata,
        ),
    )


def _max_tokens(value: int | None, *, echo: bool) -> int:
    """0 asks for the prompt's own log probabilities and for nothing else."""
    if value is None:
        return DEFAULT_MAX_TOKENS
    least = 0 if echo else 1
    if value < least:
        raise invalid("max_tokens", str(value), f"at least {least}", "raise it or leave it out")
    return value


def _prompts(
    prompt: str | list[str | int | list[int]], limits: LimitsConfig
) -> tuple[tuple[str, str | Sequence[int]], ...]:
    """One text, several texts, the ids of one prompt, or of several."""
    if isinstance(prompt, str):
        return (("prompt", prompt),)
    if not prompt:
        raise invalid("prompt", "an empty list", "at least one prompt", "send one")
    kind = type(prompt[0])
    for place, one in enumerate(prompt):
        if type(one) is not kind:
            allowed = "texts, or ids, or lists of ids"
            raise invalid(f"prompt[{place}]", "another type", allowed, "do not mix them")
    if kind is int:
        return (("prompt", cast("list[int]", prompt)),)
    if len(prompt) > limits.prompts:
        raise invalid(
            "prompt", f"{len(prompt)} prompts", f"at most {limits.prompts}", "send fewer at a time"
        )
    several = cast("list[str | list[int]]", prompt)
    return tuple((f"prompt[{place}]", one) for place, one in enumerate(several))
