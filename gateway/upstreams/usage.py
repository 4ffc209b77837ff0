"""What an upstream tells of tokens: read with care, merged over its servers, told in our form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api.sse import usage_fields
from policies.contract.wire import Usage
from policies.pricing import Rates


@dataclass(frozen=True, slots=True)
class Told:
    """A count that was not told, or that cannot be, is None. Unknown is not zero: servers leave
    cached_tokens away both where nothing was cached and where they do not count it."""

    prompt: int | None
    completion: int | None
    cached: int | None
    fields: Mapping[str, Any]

    @property
    def is_whole(self) -> bool:
        return self.prompt is not None and self.completion is not None


def read_usage(value: object) -> Told | None:
    """prompt_tokens includes the cached ones, as OpenAI has it."""
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Told(
        _count(value.get("prompt_tokens")),
        _count(value.get("completion_tokens")),
        _count(cached),
        value,
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


@dataclass(frozen=True, slots=True)
class Merged:
    """anomalies: what the servers told that cannot all be true, by name."""

    usage: Usage
    is_exact: bool
    anomalies: tuple[str, ...] = ()


def merge(
    answer: Told | None, prefill: Told | None, *, is_split: bool, prompt: int, completion: int
) -> Merged:
    """One bill of what one or two servers told.

    Of a split request the prefill server knows what was cached; the decode server finds all of the
    prompt in what was handed to it and would call that cached. prompt, completion: our own counts,
    for what nobody told.
    """
    anomalies: list[str] = []
    told = None if answer is None else answer.prompt
    if prefill is not None and prefill.prompt is not None and prefill.prompt != told:
        if told is not None:
            anomalies.append("prompt_tokens")
        told = max(prefill.prompt, told or 0)
    source = prefill if is_split else answer
    cached = (source.cached if source is not None else None) or 0
    num_prompt = prompt if told is None else told
    if cached > num_prompt:
        anomalies.append("cached_tokens")
        cached = num_prompt
    produced = None if answer is None else answer.completion
    usage = Usage(num_prompt, cached, completion if produced is None else produced)
    return Merged(usage, told is not None and produced is not None, tuple(anomalies))


def told_to_client(told: Told | None, usage: Usage, rates: Rates | None) -> dict[str, object]:
    """Our fields over the upstream's, whose others (reasoning tokens and such) are kept."""
    theirs = {} if told is None else dict(told.fields)
    ours = usage_fields(usage, rates)
    details = theirs.get("prompt_tokens_details")
    if isinstance(details, dict):
        ours["prompt_tokens_details"] = {**details, "cached_tokens": usage.cached_tokens}
    return {**theirs, **ours}
