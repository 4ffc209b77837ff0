"""The fields that chat and text completions share: how tokens are chosen, how many, until when.

Unknown fields are ignored. A known field with an impossible value is refused with its name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct

from gateway.api.retention import CacheOptions
from gateway.config import LimitsConfig
from gateway.errors import GatewayError, quote
from gateway.text.model import TextModel
from policies.contract.wire import LARGEST_PENALTY, Sampling

T = TypeVar("T")

SEED_MASK = (1 << 63) - 1
MAX_TOP_LOGPROBS = 20
MAX_BIASED_IDS = 1024


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class UsageOptions(Struct, frozen=True):
    """As OpenRouter's clients ask for what an answer costs."""

    include: bool | None = None


class SamplingBody(Struct, frozen=True, kw_only=True):
    """The wire form. Types only; ranges are checked in `read_sampling` and `read_retention`."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptions | None = None
    retention_s: float | None = None


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """logprobs: alternatives beside each token; None for no log probabilities at all."""

    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stops: tuple[str, ...]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int | None
    prompt_logprobs: int | None = None

    def to_wire(self, text: TextModel, *, max_tokens: int, seed: int) -> Sampling:
        """For a model; max_tokens is what its window leaves. Raises GatewayError."""
        if self.logit_bias and self.logit_bias[-1][0] >= text.vocab_size:
            raise invalid(
                "logit_bias",
                f"token id {self.logit_bias[-1][0]}",
                f"ids below {text.vocab_size}",
                "take ids of this model's tokenizer",
            )
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=seed,
            min_tokens=min(self.min_tokens, max_tokens),
            stop_token_ids=() if self.ignore_eos else tuple(text.stop_token_ids),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def read_sampling(
    body: SamplingBody,
    limits: LimitsConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingRequest:
    """Check ranges; raises GatewayError (400) that names the field."""
    return SamplingRequest(
        n=_n(body.n, limits),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(body.min_tokens, max_tokens),
        temperature=_number("temperature", body.temperature, 1.0, low=0.0, high=2.0),
        top_p=_number("top_p", body.top_p, 1.0, low=0.0, high=1.0, low_is_open=True),
        top_k=_top_k(body.top_k),
        min_p=_number("min_p", body.min_p, 0.0, low=0.0, high=1.0),
        seed=None if body.seed is None else body.seed & SEED_MASK,
        stops=read_stops(body.stop, limits),
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=_number(
            "presence_penalty", body.presence_penalty, 0.0, low=-2.0, high=2.0
        ),
        frequency_penalty=_number(
            "frequency_penalty", body.frequency_penalty, 0.0, low=-2.0, high=2.0
        ),
        repetition_penalty=_number(
            "repetition_penalty",
            body.repetition_penalty,
            1.0,
            low=1 / LARGEST_PENALTY,
            high=LARGEST_PENALTY,
        ),
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def wants_usage(body: SamplingBody) -> bool:
    asked = bool(body.stream_options and body.stream_options.include_usage)
    return asked or wants_cost(body)


def wants_cost(body: SamplingBody) -> bool:
    return bool(body.usage and body.usage.include)


def least_limit(**limits: int | None) -> int | None:
    """Of the given limits of completion tokens, each at least 1; None when there is none."""
    given = {name: value for name, value in limits.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise invalid(name, str(value), "at least 1", "raise it or leave it out")
    return min(given.values()) if given else None


def _n(value: int | None, limits: LimitsConfig) -> int:
    if value is None:
        return 1
    if not 1 <= value <= limits.choices:
        raise invalid("n", str(value), f"1 to {limits.choices}", "send the request several times")
    return value


def _min_tokens(value: int | None, max_tokens: int | None) -> int:
    if value is None:
        return 0
    if value < 0:
        raise invalid("min_tokens", str(value), "0 or more", "leave it out")
    if max_tokens is not None and value > max_tokens:
        raise invalid("min_tokens", str(value), f"at most max_tokens ({max_tokens})", "lower it")
    return value


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """(token id, added), ids ascending. Whether the model has such ids is known later."""
    if len(bias) > MAX_BIASED_IDS:
        raise invalid("logit_bias", f"{len(bias)} ids", f"at most {MAX_BIASED_IDS}", "send fewer")
    pairs: list[tuple[int, float]] = []
    for key, value in bias.items():
        # One way to write a number: with "7" and "07" one id could have two values.
        if not (key.isascii() and key.isdigit() and str(int(key[:10])) == key):
            raise invalid("logit_bias", f"the key {quote(key)}", "token ids", "write ids as digits")
        if not -100.0 <= value <= 100.0:
            raise invalid(f"logit_bias.{key}", f"{value:g}", "-100 to 100", "choose such a value")
        pairs.append((int(key), value))
    return tuple(sorted(pairs))


def _number(
    name: str,
    value: float | None,
    default: float,
    *,
    low: float,
    high: float,
    low_is_open: bool = False,
) -> float:
    if value is None:
        return default
    inside = low < value <= high if low_is_open else low <= value <= high
    if not (math.isfinite(value) and inside):
        allowed = f"above {low:g} and at most {high:g}" if low_is_open else f"{low:g} to {high:g}"
        raise invalid(name, f"{value:g}", allowed, "choose a value in that range")
    return value


def _top_k(value: int | None) -> int:
    if value is None or value == -1:  # -1 is the field's other way to say "no cut"
        return 0
    if not 0 <= value <= (1 << 31) - 1:
        raise invalid("top_k", str(value), "0 (no cut) or more", "raise it or leave it out")
    return value


def read_stops(stop: str | list[str] | None, limits: LimitsConfig) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.stop_strings:
        raise invalid(
            "stop", f"{len(stops)} strings", f"at most {limits.stop_strings}", "send fewer"
        )
    for text in stops:
        if not 1 <= len(text) <= limits.stop_chars:
            raise invalid(
                "stop",
                f"a string of {len(text)} characters",
                f"1 to {limits.stop_chars} characters",
                "shorten it",
            )
    return stops


def invalid(field: str, found: str, allowed: str, remedy: str) -> GatewayError:
    """A value that no request can have."""
    return GatewayError("invalid_request", field=field, found=found, allowed=allowed, remedy=remedy)


def unsupported(field: str, found: str, allowed: str, remedy: str) -> GatewayError:
    """A value that asks for what this version cannot do."""
    return GatewayError("unsupported", field=field, found=found, allowed=allowed, remedy=remedy)
