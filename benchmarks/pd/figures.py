"""What readers felt, of the answers of one run: percentiles, their spread, and a load's verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, pvariance

from benchmarks.gateway.rows import percentile
from benchmarks.pd.load import Answer


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request is to keep: its first token in first_s and so many times what its new tokens
    take an idle engine, and its tokens in per_token_s each, on the mean. share: of requests."""

    prefill_rate: float
    first_s: float = 2.0
    times_alone: float = 4.0  # prompts come two at once
    per_token_s: float = 0.05
    share: float = 0.9

    def is_met(self, answers: Sequence[Answer]) -> bool:
        kept = sum(map(self.keeps, answers))
        return kept >= self.share * len(answers)

    def keeps(self, answer: Answer) -> bool:
        alone_s = answer.new_tokens / self.prefill_rate
        return (
            answer.reply.ttft_s <= self.first_s + self.times_alone * alone_s
            and mean(gaps_s(answer)) <= self.per_token_s
        )

    def __str__(self) -> str:
        return (
            f"{self.share:.0%} of requests: first token within {self.first_s:g} s + "
            f"{self.times_alone:g} × their new tokens at {self.prefill_rate:,.0f}/s, and "
            f"{self.per_token_s * 1e3:g} ms a token on the mean"
        )


def gaps_s(answer: Answer) -> list[float]:
    """Between pieces of text, which are tokens, but for the rare ones that are half a character."""
    return [after - before for before, after in pairwise(answer.reply.pieces_at)]


@dataclass(frozen=True, slots=True)
class Felt:
    """ttft_s and token_ms: of each request; token_ms is the mean of its tokens after the first
    (time per output token, as DistServe, arXiv:2401.09670, and vLLM's benchmarks count it).
    gap_ms: before each token but the first of an answer."""

    ttft_s: list[float]
    token_ms: list[float]
    gap_ms: list[float]

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Felt:
        gaps = [[gap * 1e3 for gap in gaps_s(answer)] for answer in answers]
        return cls(
            [answer.reply.ttft_s for answer in answers],
            [mean(one) for one in gaps if one],
            [gap for one in gaps for gap in one],
        )


def _at(share: float, field: str) -> Callable[[Felt], float]:
    return lambda felt: percentile(getattr(felt, field), share)


# name → (unit, how); less is better of all of them.
FIGURES: dict[str, tuple[str, Callable[[Felt], float]]] = {
    "ttft_p50": ("s", _at(0.5, "ttft_s")),
    "ttft_p90": ("s", _at(0.9, "ttft_s")),
    "ttft_p99": ("s", _at(0.99, "ttft_s")),
    "ttft_p90_minus_p50": (
        "s",
        lambda felt: percentile(felt.ttft_s, 0.9) - percentile(felt.ttft_s, 0.5),
    ),
    "time_per_token_p50": ("ms", _at(0.5, "token_ms")),
    "time_per_token_p90": ("ms", _at(0.9, "token_ms")),
    "time_per_token_p99": ("ms", _at(0.99, "token_ms")),
    "time_per_token_variance": ("ms²", lambda felt: pvariance(felt.token_ms)),
    "token_gap_p90": ("ms", _at(0.9, "gap_ms")),
    "token_gap_p99": ("ms", _at(0.99, "gap_ms")),
    "token_gap_variance": ("ms²", lambda felt: pvariance(felt.gap_ms)),
}


def highest(is_met: Callable[[float], bool], *, most: float, runs: int) -> float:
    """The highest load that was seen to be met, by bisection between nothing and most."""
    met, missed = 0.0, most
    for _ in range(runs):
        load = (met + missed) / 2
        if is_met(load):
            met = load
        else:
            missed = load
    return met
