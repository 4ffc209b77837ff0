"""What the scheduler says: events of a sequence's life, its refusals, and its load."""

from __future__ import annotations

from dataclasses import dataclass

from policies.contract.wire import FinishReason, Tier, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class SequenceStarted:
    """Once a sequence, before its first token. queue_s: from submit to its first step's plan. tier:
    the slowest that its cached tokens came from; slower_tokens: of each of wire's slower tiers."""

    sequence_id: int
    cached_tokens: int
    queue_s: float
    tier: Tier = "device"
    slower_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptAdvanced:
    """A step computed a part of a prompt, up to num_computed, and no token yet."""

    sequence_id: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class PromptTold:
    """Log probabilities of prompt positions start, start + 1, …; each once, before any token."""

    sequence_id: int
    start: int
    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TokensProduced:
    """In order; a stop token is among them, and counted. logprobs: one a token, or none at all."""

    sequence_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    sequence_id: int
    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """code is a name from docs/errors.md."""

    sequence_id: int
    code: str
    message: str
    usage: Usage


SequenceEvent = (
    SequenceStarted
    | PromptAdvanced
    | PromptTold
    | TokensProduced
    | SequenceFinished
    | SequenceFailed
)


class SequenceRefused(Exception):
    """A sequence that was not accepted; nothing of it is kept. code is from docs/errors.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Load:
    """Figures of wire.EngineReport. Pages: free + held + cached = total."""

    waiting_sequences: int
    running_sequences: int
    uncached_tokens: int
    pages_total: int
    pages_free: int
    pages_held: int
    pages_cached: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    preemptions: int
    pages_pinned: int
    integrity_faults: int
