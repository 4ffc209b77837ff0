"""Prefill on one real model and decode on another: token for token what one engine answers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.execute.page_memory import page_memory
from engine.execute.runner import ModelRunner
from policies.contract import wire
from policies.contract.wire import Sampling
from tests.engine.engine_pair import Answer, EnginePair, EngineSite
from tests.engine.execute.test_lanes import PENALISED, RANDOM, prompt_of

PAGE_SIZE = 16
GREEDY = Sampling(20, temperature=0.0)
WORKS = [
    (prompt_of(150), GREEDY),
    (prompt_of(150), RANDOM),  # the same prompt: decode has most of it, and so has prefill
    (prompt_of(64), PENALISED),
    (prompt_of(9), Sampling(20, temperature=0.0, logprobs=2)),
    (prompt_of(33), Sampling(20, temperature=0.0, stop_token_ids=tuple(range(0, 160, 9)))),
]
NUM_PAGES = 64


def site(runner: ModelRunner, **limits: int) -> EngineSite:
    return EngineSite(
        runner,
        page_memory(runner.arena),
        runner.arena.layout,
        vocab_size=runner.vocab_size,
        **{"num_pages": NUM_PAGES, "context_tokens": 300, "step_tokens": 64, **limits},
    )


@pytest.fixture(scope="module")
def path(tiny_gguf: Callable[[str], Path]) -> Path:
    return tiny_gguf("llama")


Runners = Callable[..., ModelRunner]
MakePair = Callable[..., EnginePair]


@pytest.fixture
def make_pair(path: Path, make_runner: Runners) -> Iterator[MakePair]:
    made: list[EnginePair] = []

    def make(precision: str, pages: tuple[str | None, str | None] = (None, None)) -> EnginePair:
        runners = (make_runner(path, precision=precision, pages=kind) for kind in pages)
        made.append(EnginePair(*(site(runner) for runner in runners)))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def usage(answer: Answer) -> wire.Usage:
    assert isinstance(answer.end, wire.Finished), answer.end
    return answer.end.usage


@pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "native"]
)
def test_split_equals_mixed_in_tokens_logprobs_and_usage(
    make_pair: MakePair, path: Path, make_runner: Runners, precision: str
) -> None:
    alone = EnginePair(site(make_runner(path, precision=precision)), site(make_runner(path)))
    pair = make_pair(precision)
    for prompt, sampling in WORKS:
        whole = alone.send(alone.prefill, array("I", prompt), sampling)
        alone.settle()
        first, second = pair.split(array("I", prompt), sampling)
        pair.settle()
        assert second.tokens == whole.tokens
        assert second.logprobs == whole.logprobs
        assert usage(second) == usage(whole)
        assert usage(first).cached_tokens == usage(whole).cached_tokens
        assert isinstance(second.end, wire.Finished)
        assert isinstance(whole.end, wire.Finished)
        assert second.end.reason == whole.end.reason
    alone.close()


def test_all_at_once_and_turn_two_finds_turn_one(make_pair: MakePair) -> None:
    pair = make_pair("native")
    prompts = [array("I", prompt_of(length)) for length in (150, 40, 16, 100)]
    answers = [pair.split(prompt, GREEDY, returns=True)[1] for prompt in prompts]
    pair.settle()
    histories = []
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = pair.send(pair.decode, prompt, GREEDY)
        pair.settle()
        assert answer.tokens == whole.tokens
        histories.append(array("I", [*prompt, *answer.tokens]))
    for history in histories:
        more = array("I", [*history, 5, 6, 7])
        first, second = pair.split(more, GREEDY, returns=True)
        pair.settle()
        assert usage(second).cached_tokens >= len(history) - PAGE_SIZE
        assert usage(first).cached_tokens == usage(second).cached_tokens
        assert second.tokens == pair_alone(pair, more)


def pair_alone(pair: EnginePair, prompt: array[int]) -> list[int]:
    """What decode says of it whole."""
    answer = pair.send(pair.decode, prompt, GREEDY)
    pair.settle()
    return answer.tokens


@pytest.mark.parametrize("pages", [("bf16", "int8"), ("bf16", "fp8"), ("int8", "bf16")])
def test_pages_change_their_precision_on_the_way(
    make_pair: MakePair, pages: tuple[str, str]
) -> None:
    pair = make_pair("native", pages)
    for prompt, sampling in WORKS:
        _, second = pair.split(array("I", prompt), sampling)
        pair.settle()
        assert usage(second).prompt_tokens == len(prompt)
        assert usage(second).completion_tokens == len(second.tokens) > 0
    whole = pair_alone(pair, array("I", WORKS[0][0]))
    assert len(whole) == 20
