"""The modelled node against a loop that steps through every chunk, and against theory."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.lab.nodes import HOST, NodeSpec, Work
from gateway.lab.pages import Pages
from gateway.lab.run import play
from gateway.lab.view import View
from gateway.lab.workload import PAGE_TOKENS, Request


class OneNode:
    def choose(self, view: View, request: Request, now: float) -> tuple[int, int]:
        return 0, request.prompt_tokens


def request(at: float, tokens: int, output: int = 1, keys: list[bytes] | None = None) -> Request:
    return Request(at, 0, tokens, output, keys or [], tokens)


def by_arrival(works: list[Work]) -> list[Work]:
    return sorted(works, key=lambda work: work.request.at)


def stepped(requests: list[Request], spec: NodeSpec) -> dict[Request, tuple[float, float]]:
    """(first token, end) of each request, by a loop over steps; prompts without keys."""
    now, waiting = 0.0, list(requests)
    left = {one: float(one.prompt_tokens) for one in requests}
    decoding: dict[Request, int] = {}  # tokens so far
    told: dict[Request, tuple[float, float]] = {}
    while waiting or decoding:
        ready = [one for one in waiting if one.at <= now]
        if not ready and not decoding:
            now = min(one.at for one in waiting)
            continue
        ready.sort(key=lambda one: left[one] + spec.prefill_tokens_per_s * one.at)
        context = sum(one.prompt_tokens + count for one, count in decoding.items())
        step = spec.sequence_step_s * len(decoding) + spec.context_token_step_s * context
        chunk_s = spec.chunk_tokens / spec.prefill_tokens_per_s
        now += step + (max(spec.least_step_s, chunk_s) if ready else spec.least_step_s)
        for one in list(decoding):
            decoding[one] += 1
            if decoding[one] == one.output_tokens:
                del decoding[one]
                told[one] = told[one][0], now
        budget = spec.chunk_tokens
        for one in ready:
            done = min(left[one], budget)
            left[one] -= done
            budget -= done
            if not left[one]:
                waiting.remove(one)
                told[one] = now, now
                if one.output_tokens > 1:
                    decoding[one] = 1
    return told


def test_it_agrees_with_a_loop_over_steps() -> None:
    random, at, requests = Random(3), 0.0, []
    for _ in range(150):
        at += random.expovariate(0.55)
        tokens = min(60_000, int(random.lognormvariate(8.6, 1.1)) + 50)
        requests.append(request(at, tokens, random.randrange(2, 700)))
    spec = NodeSpec(device_tokens=1e9)
    outcome = play(requests, [spec], OneNode())
    expected = stepped(requests, spec)
    first = [(work.first_token_at - work.arrived_at) for work in outcome.works]
    loop = [expected[work.request][0] - work.arrived_at for work in outcome.works]
    assert mean(first) == pytest.approx(mean(loop), rel=0.03)
    assert sorted(first)[135] == pytest.approx(sorted(loop)[135], rel=0.03)
    ends = [work.ended_at - work.arrived_at for work in outcome.works]
    loop = [expected[work.request][1] - work.arrived_at for work in outcome.works]
    assert mean(ends) == pytest.approx(mean(loop), rel=0.02)


def test_equal_prompts_wait_as_queueing_theory_says() -> None:
    """M/D/1: mean wait = rho ÷ (2 (1 - rho)) service times."""
    random, at, requests = Random(1), 0.0, []
    for _ in range(8000):
        at += random.expovariate(0.8)
        requests.append(request(at, 8000))
    outcome = play(requests, [NodeSpec()], OneNode())
    waits = [work.first_token_at - work.arrived_at - 1.0 for work in outcome.works]
    assert mean(waits) == pytest.approx(0.8 / (2 * 0.2), rel=0.1)


def test_a_short_prompt_overtakes_a_long_one_that_runs_and_an_old_one_is_not_starved() -> None:
    long, short = request(0.0, 80_000), request(1.0, 800)
    stream = [request(0.5 * number, 4000) for number in range(1, 60)]
    outcome = play([long, short], [NodeSpec()], OneNode())
    assert [work.request for work in outcome.works] == [short, long]
    assert outcome.works[0].first_token_at == pytest.approx(1.1)
    assert outcome.works[1].first_token_at == pytest.approx(10.1)
    crowded = play([long, *stream], [NodeSpec()], OneNode())
    ended = next(work for work in crowded.works if work.request is long)
    assert ended.first_token_at < 25.0, "who waited counts its wait as work done"


def test_a_full_pool_lets_prompts_wait_and_frees_what_ended() -> None:
    spec = NodeSpec(device_tokens=20_000.0)
    requests = [request(0.0, 9000, 1000) for _ in range(4)]
    outcome = play(requests, [spec], OneNode())
    assert len(outcome.works) == 4
    firsts = sorted(work.first_token_at for work in outcome.works)
    assert firsts[2] > min(work.ended_at for work in outcome.works)
    assert outcome.nodes[0].held_tokens == 0


def chain(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def test_pages_are_fetched_from_memory_when_the_device_has_lost_them() -> None:
    keys, other = chain(1, 2, 3, 4), chain(*range(10, 18))
    spec = NodeSpec(device_tokens=8 * PAGE_TOKENS + 100.0, tiers=(HOST,))
    turns = [
        request(0.0, 4 * PAGE_TOKENS + 1, keys=keys),
        request(10.0, 8 * PAGE_TOKENS + 1, keys=other),
        request(20.0, 4 * PAGE_TOKENS + 1, keys=keys),
        request(30.0, 4 * PAGE_TOKENS + 1, keys=keys),
    ]
    works = by_arrival(list(play(turns, [spec], OneNode()).works))
    assert [work.cached_tokens for work in works] == [0, 0, 2048, 2048]
    fetch_s = 2048 / HOST.tokens_per_s
    assert works[2].first_token_at - 20.0 == pytest.approx(fetch_s + 1 / 8000, rel=0.01)
    assert works[3].first_token_at - 30.0 == pytest.approx(1 / 8000, rel=0.01)


@given(
    st.integers(1, 12),
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=20),
)
def test_the_deepest_page_held_proves_its_prefix(capacity: int, paths: list[list[int]]) -> None:
    pages = Pages(capacity)
    held: set[bytes] = set()
    for path in paths:
        keys = chain(*[int("".join(map(str, path[: end + 1]))) for end in range(len(path))])
        depth = pages.depth(keys, len(keys))
        assert set(keys[:depth]) <= held
        stored, removed = pages.use(keys)
        assert not set(stored) & held
        held |= set(stored)
        held -= set(removed)
        assert len(held) == len(pages) <= capacity
