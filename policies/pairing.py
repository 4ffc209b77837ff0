"""Whether one engine computes a prompt and another decodes it: whole or split, in seconds.

Computed where others decode, a prompt makes each of them wait for as long as it takes. A split
spares them that. Its price is the wait for the engine that only computes, and what of the transfer
does not hide behind the computing, for pages are sent as they seal. It is worth it when it spares
more seconds, summed over the sequences that decode there, than it costs the request itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import Struct

from policies.placement import PlacementParameters

Reason = Literal[
    "never",  # the operator's word
    "lanes",  # several choices share one prompt
    "prompt_logprobs",  # one engine has to compute the whole prompt
    "no_pair",  # no two engines that could
    "failed",  # a pair failed this request before: where it was to decode, it is computed
    "short",  # the transfer skipped for what a step or a few compute
    "slower",  # it spares less than it costs
    "pays",
    "always",  # the operator's word
]


class SplitMode(StrEnum):
    """auto: where it pays; always: where there is a pair; never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class PairingParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """defaults/pairing.toml says what each is for."""

    version: str = "pairing-1"
    bypass_tokens: int = 2048
    bytes_per_s: float = 1e9
    handover_s: float = 0.01
    fill_window: float = 0.05
    roles: PlacementParameters = PlacementParameters()


def parse_parameters(text: str) -> PairingParameters:
    """Parameters from TOML text; raises msgspec.ValidationError on an unknown or wrong field."""
    return msgspec.toml.decode(text, type=PairingParameters)


@dataclass(frozen=True, slots=True)
class Computing:
    """An engine that could compute the prompt. decoding: sequences that would wait meanwhile."""

    node_id: str
    engine: int
    uncached_tokens: int
    backlog_tokens: int
    tokens_per_s: float
    fetch_s: float = 0.0
    decoding: int = 0

    @property
    def compute_s(self) -> float:
        return self.uncached_tokens / self.tokens_per_s

    @property
    def first_token_s(self) -> float:
        return self.backlog_tokens / self.tokens_per_s + self.fetch_s + self.compute_s


@dataclass(frozen=True, slots=True)
class Decoding:
    """An engine that could decode. bytes_per_s: at which pages were seen to reach it, or 0."""

    node_id: str
    engine: int
    missing_tokens: int  # of the prompt
    context_tokens: int  # of what is in use there
    capacity_tokens: int
    bytes_per_token: float
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What pairing must know of a request. may_split: no pair has failed it too often."""

    prompt_tokens: int
    lanes: int = 1
    prompt_logprobs: bool = False
    may_split: bool = True


@dataclass(frozen=True, slots=True)
class Pairing:
    """A choice and why; times are estimates, 0 where nothing was weighed.

    decoder: of a split. whole_s, split_s: to the first token on one engine, and by the pair.
    spared_s: summed over the sequences that decode where it would be computed whole.
    """

    reason: Reason
    decoder: Decoding | None = None
    uncached_tokens: int = 0
    whole_s: float = 0.0
    split_s: float = 0.0
    transfer_s: float = 0.0
    spared_s: float = 0.0

    @property
    def is_split(self) -> bool:
        return self.decoder is not None


def keep_whole(wanted: Wanted, mode: SplitMode) -> Reason | None:
    """Why this request is not split, whatever engines there are; None if it may be."""
    if mode is SplitMode.NEVER:
        return "never"
    if wanted.lanes > 1:
        return "lanes"
    if wanted.prompt_logprobs:
        return "prompt_logprobs"
    return None if wanted.may_split else "failed"


def pair(
    wanted: Wanted,
    whole: Computing,
    prefill: Computing,
    decoders: Sequence[Decoding],
    mode: SplitMode,
    parameters: PairingParameters,
) -> Pairing:
    """Weigh the engine that would do all of it against prefill and the best of the decoders, each
    of which prefill can send to. Ask keep_whole first."""
    uncached = whole.uncached_tokens
    if not decoders:
        return Pairing("no_pair", uncached_tokens=uncached)
    if mode is SplitMode.AUTO and uncached < parameters.bypass_tokens:
        return Pairing("short", uncached_tokens=uncached)
    decoder = choose_decoder(decoders, wanted.prompt_tokens, parameters)
    transfer_s = (
        decoder.missing_tokens
        * decoder.bytes_per_token
        / (decoder.bytes_per_s or parameters.bytes_per_s)
    )
    unhidden_s = max(0.0, transfer_s - prefill.compute_s) + parameters.handover_s
    split_s = prefill.first_token_s + unhidden_s
    spared_s = whole.decoding * whole.compute_s
    if mode is SplitMode.ALWAYS:
        reason: Reason = "always"
    else:
        reason = "pays" if spared_s > split_s - whole.first_token_s else "slower"
    return Pairing(
        reason,
        None if reason == "slower" else decoder,
        uncached,
        whole.first_token_s,
        split_s,
        transfer_s,
        spared_s,
    )


def choose_decoder(
    decoders: Sequence[Decoding], prompt_tokens: int, parameters: PairingParameters
) -> Decoding:
    """The one whose pool is emptiest with this prompt in it, since both the time of a decode step
    and what is left to grow into follow from it; among near ones, who lacks least of the prompt."""

    def fill(one: Decoding) -> float:
        return (one.context_tokens + prompt_tokens) / max(1, one.capacity_tokens)

    near = min(map(fill, decoders)) + parameters.fill_window
    return min(
        [one for one in decoders if fill(one) <= near],
        key=lambda one: (one.missing_tokens, fill(one), one.node_id, one.engine),
    )
