"""How likely tokens are under the model's own distribution: no temperature, penalties or cuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.contract.wire import TokenLogprob


def describe(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """fp32 logits [rows, vocab], unchanged; one token a row, and how many of the likeliest to tell.

    The likeliest come best first, equal ones by token id. A row's answer is its own: softmax works
    row by row, and what several rows share (the widest top) only decides how much is looked at.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    of_token = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > of_token).sum(-1).add_(1).tolist()
    values = of_token.view(-1).tolist()
    lists = _likeliest(logprobs, tops)
    return [TokenLogprob(*entry) for entry in zip(values, ranks, lists, strict=True)]


def _likeliest(logprobs: Tensor, tops: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """topk leaves open which of equal values it takes: so it only finds the least value to take."""
    rows, vocab = logprobs.shape
    widest = min(max(tops), vocab)
    if not widest:
        return [()] * rows
    best = logprobs.topk(widest, dim=-1).values
    last = torch.tensor([[min(max(top, 1), widest) - 1] for top in tops], device=best.device)
    row_ids, token_ids = (logprobs >= best.gather(1, last)).nonzero(as_tuple=True)
    values = logprobs[row_ids, token_ids].tolist()
    found: list[list[tuple[int, float]]] = [[] for _ in range(rows)]
    for row, token, value in zip(row_ids.tolist(), token_ids.tolist(), values, strict=True):
        found[row].append((token, value))  # ids ascend, and the sort below is stable
    for likeliest in found:
        likeliest.sort(key=lambda entry: -entry[1])
    return [tuple(likeliest[:top]) for likeliest, top in zip(found, tops, strict=True)]
