"""What became of a run's requests: reuse, time to first token, goodput, how evenly nodes worked.

Goodput is the share of requests within a time to first token of 2 s and 1 s more for each 10,000
tokens that an infinite cache would have to compute, and a mean gap of 50 ms between tokens. The
budget does not grow with what the policy itself misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.lab.nodes import ModelNode, Work

BASE_TTFT_S = 2.0
TTFT_S_PER_TOKEN = 1e-4
MEAN_ITL_S = 0.05
WARM_UP_SHARE = 0.15  # of the span; not measured


@dataclass(frozen=True, slots=True)
class Summary:
    """hit: cached ÷ prompt tokens. Uneven, 1 is even: of what falls to each node, for its speed,
    the greatest ÷ the mean. Work: seconds of prefill; stay: seconds of its requests in flight."""

    requests: int
    hit: float
    ttft_p50_s: float
    ttft_p90_s: float
    goodput: float
    uneven_work: float
    uneven_stay: float


def is_good(work: Work) -> bool:
    request = work.request
    budget_s = BASE_TTFT_S + TTFT_S_PER_TOKEN * request.new_tokens
    decode_s = work.ended_at - work.first_token_at
    return work.first_token_at - work.arrived_at <= budget_s and decode_s <= MEAN_ITL_S * (
        request.output_tokens - 1
    )


def summarise(works: Sequence[Work], nodes: Sequence[ModelNode]) -> Summary:
    """Of a whole run, less its warm-up."""
    start = WARM_UP_SHARE * max(work.arrived_at for work in works)
    measured = [work for work in works if work.arrived_at >= start]
    ttfts = sorted([work.first_token_at - work.arrived_at for work in measured])
    work_s, stay_s = [0.0] * len(nodes), [0.0] * len(nodes)
    for work in measured:
        node = nodes[work.node]
        work_s[work.node] += (work.request.prompt_tokens - work.cached_tokens) / node.tokens_per_s
        stay_s[work.node] += (work.ended_at - work.arrived_at) / node.spec.speed
    return Summary(
        requests=len(measured),
        hit=sum([work.cached_tokens for work in measured])
        / sum([work.request.prompt_tokens for work in measured]),
        ttft_p50_s=ttfts[len(ttfts) // 2],
        ttft_p90_s=ttfts[len(ttfts) * 9 // 10],
        goodput=sum([is_good(work) for work in measured]) / len(measured),
        uneven_work=_uneven(work_s),
        uneven_stay=_uneven(stay_s),
    )


def _uneven(shares: Sequence[float]) -> float:
    return max(shares) * len(shares) / sum(shares)
