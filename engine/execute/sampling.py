"""From logits to tokens, row by row: a row's choice never depends on its batch mates.

Noise is a hash of (seed, position, token id), so a token's draw is the same in any batch, at any
index and after any preemption. The choice is an exponential race: argmin of E ÷ p over the tokens
that the cuts leave, which draws exactly from p. Penalties, bias and bans come first, and count for
greedy rows too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from policies.contract.wire import Sampling

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
NEVER = float("-inf")


class Choice(NamedTuple):
    """What one row asks of the sampler. position: completion tokens so far. history: prompt and
    completion, where there are penalties."""

    sampling: Sampling
    position: int
    history: array[int] | None = None


def sample(logits: Tensor, choices: Sequence[Choice]) -> list[int | None]:
    """fp32 logits [rows, vocab], changed in place → a token a row; None where logits are not
    finite (nothing sane can be said)."""
    adjust(logits, choices)
    best, greedy = logits.max(-1)
    tokens: list[int | None] = list(greedy.tolist())
    random = [row for row, choice in enumerate(choices) if choice.sampling.temperature > 0]
    if random:
        drawn = _draw(logits[random], [choices[row] for row in random]).tolist()
        for row, token in zip(random, drawn, strict=True):
            tokens[row] = token
    for row, sane in enumerate(best.isfinite().tolist()):
        if not sane:
            tokens[row] = None
    return tokens


def adjust(logits: Tensor, choices: Sequence[Choice]) -> None:
    """Penalties, then bias, then the ban of stop tokens before min_tokens; in place."""
    for row, (sampling, position, history) in enumerate(choices):
        if history is not None:
            _penalise(logits[row], history, sampling, num_completion=position)
        if sampling.logit_bias:
            ids, bias = zip(*sampling.logit_bias, strict=True)
            logits[row, list(ids)] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)
        if position < sampling.min_tokens:
            stops = [token for token in sampling.stop_token_ids if token < logits.shape[-1]]
            logits[row, stops] = NEVER


def _penalise(row: Tensor, history: array[int], sampling: Sampling, *, num_completion: int) -> None:
    # int32 shares the array's memory only until it is widened: a live array must stay free to grow.
    seen = torch.frombuffer(history, dtype=torch.int32).to(row.device, torch.int64)
    if sampling.repetition_penalty != 1:
        found = row[seen]
        factor = sampling.repetition_penalty
        # A token that occurs twice is written twice, with the same value.
        row[seen] = torch.where(found > 0, found / factor, found * factor)
    if num_completion and (sampling.frequency_penalty or sampling.presence_penalty):
        counts = torch.bincount(seen[-num_completion:], minlength=len(row))
        row -= counts * sampling.frequency_penalty
        row -= (counts > 0) * sampling.presence_penalty


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _draw(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """int64 [rows]."""
    weights = weigh(logits, [choice.sampling for choice in choices])
    keys = [_key(choice.sampling.seed, choice.position) for choice in choices]
    return (exponentials(keys, weights.shape[-1], device=logits.device) / weights).argmin(-1)


def weigh(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """fp64 [rows, vocab]: what temperature and cuts leave, as shares of a row's best. In fp64, so
    that the race's ties and the cuts' edges are no matter of rounding."""
    heat = _column([sampling.temperature for sampling in samplings], logits)
    # A tiny temperature divides to infinity, so the best logit is moved to 0 first.
    scaled = (logits.double() - logits.amax(-1, keepdim=True)).div_(heat)
    weights = scaled.exp_()
    if any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in samplings):
        weights = _cut_ranks(weights, samplings)
    if any(sampling.min_p > 0 for sampling in samplings):
        least = _column([sampling.min_p for sampling in samplings], logits)
        weights = weights.masked_fill_(weights < least * weights.amax(-1, keepdim=True), 0)
    return weights


def _cut_ranks(weights: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """top-k, then top-p over what it leaves: the smallest set that reaches p, the best always."""
    vocab = weights.shape[-1]
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    most = _column([sampling.top_k or vocab for sampling in samplings], weights)
    ranked.masked_fill_(torch.arange(vocab, device=weights.device) >= most, 0)
    mass = ranked.cumsum(-1)
    before = mass - ranked
    reach = _column([sampling.top_p for sampling in samplings], weights) * mass[:, -1:]
    cut = before >= reach
    cut[:, 0] = False
    whole = torch.tensor([sampling.top_p >= 1 for sampling in samplings], device=weights.device)
    cut.masked_fill_(whole[:, None], False)
    return torch.zeros_like(weights).scatter_(-1, order, ranked.masked_fill_(cut, 0))


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _key(seed: int, position: int) -> int:
    """64 bits for one draw, as a signed int."""
    key = _mix((_mix((seed & _MASK) + _GOLDEN & _MASK) + position * _GOLDEN) & _MASK)
    return key - (1 << 64) if key >> 63 else key


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def exponentials(keys: Sequence[int], vocab: int, *, device: torch.device) -> Tensor:
    """fp64 [keys, vocab], each > 0: splitmix64 of key + token id, through -log."""
    ids = torch.arange(1, vocab + 1, device=device) * _signed(_GOLDEN)
    bits = torch.tensor(list(keys), device=device)[:, None] + ids
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= (bits >> shift) & ((1 << (64 - shift)) - 1)
        bits *= _signed(factor)
    bits ^= (bits >> 31) & ((1 << 33) - 1)
    # The upper 52 bits as (n + 1/2) ÷ 2^52, exact in fp64: never 0, never 1.
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()
