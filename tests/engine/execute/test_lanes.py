"""Lanes, penalties and log probabilities through scheduler and model: as alone, to the bit."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from benchmarks.steps import Steps
from engine.execute.models.model import Head
from engine.execute.runner import ModelRunner
from engine.schedule.pages import HoldKind
from engine.schedule.plan import PageCopy, Row, StepPlan
from engine.schedule.scheduler import Scheduler
from policies.contract import wire
from policies.contract.wire import Sampling, TokenLogprob, pack_ids
from tests.engine.engine_bench import EngineBench

PAGE_SIZE = 16
RANDOM = Sampling(24, temperature=1.2, top_p=0.95, top_k=40, seed=11)
PENALISED = Sampling(
    20,
    temperature=0.9,
    seed=5,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias=((7, 1.5), (90, -2.0)),
    logprobs=3,
)
TOLD = Sampling(9, temperature=0.0, logprobs=0, prompt_logprobs=4, repetition_penalty=1.1)


class Told(NamedTuple):
    """All that one lane got."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt: list[TokenLogprob]


class Work(NamedTuple):
    prompt: Sequence[int]
    sampling: Sampling
    lanes: int = 1


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(length * 31 + seed)
    return torch.randint(3, 160, (length,), generator=generator).tolist()


def run(
    runner: ModelRunner, work: Sequence[Work], *, squeeze: bool = False, **limits: int
) -> tuple[list[Told], EngineBench]:
    """All at once through an engine; one Told a lane, in order. squeeze: all pages that nobody runs
    on are taken away for four of five steps, so that sequences are preempted wherever they are."""
    bench = EngineBench(
        runner,
        vocab_size=runner.vocab_size,
        **{"num_pages": 200, "page_size": PAGE_SIZE, "context_tokens": 400, **limits},
    )
    lanes = 0
    for index, (prompt, sampling, count) in enumerate(work):
        bench.submit(
            1,
            tuple(range(lanes, lanes + count)),
            request_id=f"{index}",
            prompt=pack_ids(array("I", prompt)),
            sampling=sampling,
        )
        lanes += count
    if squeeze:
        for _ in range(30):
            with all_pages_taken(bench.engine.scheduler):
                for _ in range(4):
                    bench.step()
            bench.step()
        assert bench.engine.scheduler.preemptions > 0
    if bench.engine.has_work:
        bench.drain()
    assert bench.failures() == []
    load = bench.engine.scheduler.load()
    assert load.pages_free + load.pages_cached == load.pages_total
    return [told(bench, lane) for lane in range(lanes)], bench


@contextmanager
def all_pages_taken(scheduler: Scheduler) -> Iterator[None]:
    while scheduler.cache.evict():
        pass
    taken = []
    while (page := scheduler.pool.take(HoldKind.TRANSFER)) is not None:
        taken.append(page)
    yield
    scheduler.pool.release(taken, HoldKind.TRANSFER)


def told(bench: EngineBench, lane: int) -> Told:
    prompt: list[TokenLogprob] = []
    for _, rare in bench.rare:
        if isinstance(rare, wire.PromptLogprobs) and rare.lane == lane:
            assert rare.start == 1 + len(prompt), "a prompt token was told twice or left out"
            prompt += rare.entries
    return Told(bench.tokens[1, lane], bench.logprobs(1, lane), prompt)


def alone(runner: ModelRunner, work: Work, seed: int = 0) -> Told:
    """A lone request on a cold engine; seed is added."""
    sampling = msgspec.structs.replace(work.sampling, seed=work.sampling.seed + seed)
    (found,), _ = run(runner, [Work(work.prompt, sampling)])
    return found


@pytest.mark.parametrize("length", [1, 16, 17, 37])
@pytest.mark.parametrize("sampling", [RANDOM, PENALISED], ids=["random", "penalised"])
def test_a_lane_is_a_lone_request_with_the_next_seed(
    tiny_runner: ModelRunner, length: int, sampling: Sampling
) -> None:
    work = Work(prompt_of(length), sampling, lanes=4)
    found, bench = run(tiny_runner, [work])
    for lane in range(4):
        assert found[lane] == alone(tiny_runner, work, seed=lane)
    cached = [rare.cached_tokens for _, rare in bench.rare if isinstance(rare, wire.Started)]
    assert cached == [0, *[length - 1] * 3]


def test_greedy_lanes_are_equal(tiny_runner: ModelRunner) -> None:
    found, _ = run(tiny_runner, [Work(prompt_of(37), Sampling(12, temperature=0.0), lanes=3)])
    assert found[0] == found[1] == found[2]


def test_lanes_of_one_token_each_go_on_without_the_first(tiny_runner: ModelRunner) -> None:
    work = Work(prompt_of(37), msgspec.structs.replace(RANDOM, max_tokens=1), lanes=4)
    found, _ = run(tiny_runner, [work])
    assert found == [alone(tiny_runner, work, seed=lane) for lane in range(4)]


def test_resumed_sequences_lose_no_history_and_tell_nothing_twice(tiny_runner: ModelRunner) -> None:
    """Preempted, chunked and among others: tokens and all log probabilities to the last bit."""
    works = [
        Work(prompt_of(70), TOLD, lanes=2),
        Work(prompt_of(40), PENALISED, lanes=3),
        Work(prompt_of(23), RANDOM),
        Work(prompt_of(33), TOLD),
        Work(prompt_of(55), Sampling(20, temperature=0.0)),
    ]
    expected = []
    for work in works:
        for lane in range(work.lanes):
            each = alone(tiny_runner, work, seed=lane)
            expected.append(each if lane == 0 else each._replace(prompt=[]))
    for limits in (
        {"num_pages": 12, "step_tokens": 19},
        {"num_pages": 30, "step_tokens": 64},
    ):
        found, _ = run(tiny_runner, works, squeeze=True, **limits)
        assert found == expected


def test_prompt_logprobs_preempted_half_way_go_on_where_they_were(tiny_runner: ModelRunner) -> None:
    work = Work(prompt_of(300), TOLD)
    found, bench = run(tiny_runner, [work], squeeze=True, num_pages=25, step_tokens=23)
    assert found == [alone(tiny_runner, work)]
    parts = [rare.start for _, rare in bench.rare if isinstance(rare, wire.PromptLogprobs)]
    assert parts != list(range(1, 300, 23)), "it was not preempted in its prompt"


@pytest.fixture(scope="module")
def peer_and_runner(tiny_folder: Any, make_runner: Any) -> tuple[Any, ModelRunner]:
    from transformers import LlamaForCausalLM

    folder = tiny_folder()
    peer = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return peer, make_runner(folder, num_pages=200)


def peer_logprobs(peer: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return peer(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)


def compare(entry: TokenLogprob, expected: torch.Tensor, token: int, top: int) -> None:
    assert abs(entry.logprob - expected[token].item()) < 1e-3
    likelier = (expected > expected[token] + 1e-3).sum().item() + 1
    at_least = (expected > expected[token] - 1e-3).sum().item()
    assert likelier <= entry.rank <= at_least
    assert len(entry.top) == top
    values = expected.topk(top).values.tolist() if top else []
    for (at, value), best in zip(entry.top, values, strict=True):
        assert abs(value - best) < 1e-3
        assert abs(value - expected[at].item()) < 1e-3


@pytest.mark.parametrize("step_tokens", [8, 64, 400])
def test_logprobs_are_those_of_transformers(
    peer_and_runner: tuple[Any, ModelRunner], step_tokens: int
) -> None:
    """Wrong offsets, zeros and corrupt prompt entries under chunks: each is compared."""
    peer, runner = peer_and_runner
    for sampling in (TOLD, msgspec.structs.replace(PENALISED, prompt_logprobs=0)):
        prompt = prompt_of(150)
        (found,), _ = run(runner, [Work(prompt, sampling)], step_tokens=step_tokens)
        expected = peer_logprobs(peer, [*prompt, *found.tokens])
        assert len(found.prompt) == len(prompt) - 1
        for at, entry in enumerate(found.prompt, 1):
            compare(entry, expected[at - 1], prompt[at], sampling.prompt_logprobs)
        assert len(found.logprobs) == len(found.tokens) == sampling.max_tokens
        for at, (entry, token) in enumerate(
            zip(found.logprobs, found.tokens, strict=True), len(prompt)
        ):
            compare(entry, expected[at - 1], token, sampling.logprobs)


def test_lanes_draw_differently(peer_and_runner: tuple[Any, ModelRunner]) -> None:
    found, _ = run(peer_and_runner[1], [Work(prompt_of(37), RANDOM, lanes=4)])
    assert len({tuple(each.tokens) for each in found}) == 4


def test_a_whole_chunks_prompt_logits_are_never_held_at_once(
    peer_and_runner: tuple[Any, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runner = peer_and_runner
    counts = []
    head = runner.model.head

    def counted(token_rows: Sequence[int]) -> Head:
        counts.append(len(token_rows))
        return head(token_rows)

    monkeypatch.setattr(runner.model, "head", counted)
    run(runner, [Work(prompt_of(200), TOLD)], step_tokens=200)
    assert counts[:5] == [1, 64, 64, 64, 7]


def test_a_copy_from_a_page_of_another_generation_fails_its_row_and_no_other(
    peer_and_runner: tuple[Any, ModelRunner],
) -> None:
    _, runner = peer_and_runner
    steps = Steps(runner)
    donor, mate = steps.stream(prompt_of(21)), steps.stream(prompt_of(30))
    steps.generate([donor, mate], 1)
    target, generation = 90, donor.generations[1]
    row = Row(
        77,
        20,
        donor.token_ids[20:21],
        ([donor.pages[0], target],),
        ([donor.generations[0], 5],),
        RANDOM,
        0,
        True,
    )
    beside = Row(78, 30, mate.token_ids[30:31], (mate.pages,), (mate.generations,), RANDOM, 1, True)
    for expected, corrupt in ((generation, ()), (generation + 1, (1,))):
        copies = (PageCopy(1, donor.pages[1], expected, target),)
        plan = StepPlan(1, (beside, row), ((target, 5),), ((target, 5),), copies)
        result = runner.execute(plan)
        assert result.corrupt == corrupt
        assert result.tokens[0] is not None
        pages = runner.arena.pages
        assert torch.equal(pages[target, :, :, :, :5], pages[donor.pages[1], :, :, :, :5])
        assert pages[target, :, :, :, 5:].eq(0).all()


def test_a_sick_prompt_fails_and_tells_nothing(peer_and_runner: tuple[Any, ModelRunner]) -> None:
    """All zeros or NaN must not pass for log probabilities."""
    _, runner = peer_and_runner
    steps = Steps(runner)
    sick = steps.stream(prompt_of(40))
    steps.step([(sick, 20)])
    runner.arena.pages[sick.pages[0], 0, 1] = float("nan")
    row = Row(
        7,
        20,
        sick.token_ids[20:30],
        (sick.pages,),
        (sick.generations,),
        TOLD,
        0,
        False,
        sick.token_ids,
        range(21, 31),
    )
    result = runner.execute(StepPlan(2, (row,), (), ()))
    assert result.insane == (0,)
    assert result.prompt_logprobs == {}
    runner.arena.pages.zero_()
