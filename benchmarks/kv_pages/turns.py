"""Rows of speed: conversations that go on turn by turn, over the same bytes of pages.

Each conversation sends its next turn as soon as the last is answered. As long as all their pages
fit, a turn computes its new tokens only; else pages of one are evicted for another's and computed
again, and sequences wait or are preempted. The first turn, cold for everyone, is not counted.
Seconds are those that each thread has computed, so that neighbours on shared cores cut no rate.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.beside import Beside, Figure
from benchmarks.steps import model_spec
from engine.config import DEFAULT_STEP_TOKENS, ScheduleConfig
from engine.execute.runner import ModelRunner, RunnerConfig, load_runner
from engine.execute.weights import open_checkpoint
from engine.schedule.events import SequenceFailed, SequenceFinished, SequenceStarted, TokensProduced
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from engine.stepper import Stepper
from engine.store.page_codec import QUANTISED, PageLayout
from engine.warmup import work_clock
from policies.contract.wire import Sampling

PAGE_SIZE = 64
PRECISIONS = ("bf16", *QUANTISED)
HISTORY, QUESTION, ANSWER = 1500, 64, 32  # tokens
TURNS = (4, 3)  # full, quick; the first warms up
FITTING = 4  # conversations that fit in bf16
CONCURRENCY = ((1, 2, 4, 6, 8, 12), (1, 4, 8))
ROUNDS = (3, 1)
PLAIN = 16  # ids below it may be control tokens, which end an answer


@dataclass(frozen=True, slots=True)
class Run:
    tokens_per_s: float
    cached: float  # share of the prompts' tokens
    preemptions: int


@dataclass(slots=True)
class _Conversation:
    token_ids: list[int]
    turns: int = 0
    answer: list[int] = field(default_factory=list)


def layout_of(model: Path) -> PageLayout:
    facts = open_checkpoint(model).config
    return PageLayout("bf16", facts.num_layers, facts.num_kv_heads, PAGE_SIZE, facts.head_dim)


def rows(model: Path, layout: PageLayout, *, quick: bool, threads: int | None) -> Iterator[Beside]:
    turns = TURNS[quick]
    tokens = FITTING * (HISTORY + turns * (QUESTION + ANSWER))
    num_bytes = -(-tokens // PAGE_SIZE) * layout.page_bytes
    runners = {
        precision: _load(model, layout, precision, num_bytes, threads) for precision in PRECISIONS
    }
    ratios: dict[str, dict[int, float]] = {precision: {} for precision in QUANTISED}
    for concurrency in CONCURRENCY[quick]:
        found: dict[str, list[Run]] = {precision: [] for precision in PRECISIONS}
        for number in range(ROUNDS[quick]):
            for precision, runner in runners.items():
                found[precision].append(converse(runner, concurrency, turns, seed=number))
        for precision in QUANTISED:
            row = _row(concurrency, precision, found, num_bytes)
            ratios[precision][concurrency] = row.peers["bf16"].ratio
            yield row
    for precision, by_concurrency in ratios.items():
        yield _crossover(precision, by_concurrency)


def converse(runner: ModelRunner, concurrency: int, turns: int, *, seed: int) -> Run:
    """So many conversations, each of so many turns; counted from the last one's second turn on."""
    ids = random.Random(seed)

    def some(count: int) -> list[int]:
        return [ids.randrange(PLAIN, runner.vocab_size) for _ in range(count)]

    scheduler = Scheduler(
        ScheduleConfig(
            num_pages=runner.arena.num_pages,
            page_size=PAGE_SIZE,
            context_tokens=runner.context_tokens,
            step_tokens=DEFAULT_STEP_TOKENS,
        )
    )
    stepper = Stepper(scheduler, runner, overlap=False, clock=time.monotonic)
    conversations = [_Conversation(some(HISTORY)) for _ in range(concurrency)]
    speaking: dict[int, _Conversation] = {}
    asked = prompted = cached = 0
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0)

    def ask(conversation: _Conversation) -> None:
        nonlocal asked
        asked += 1
        conversation.token_ids += [*conversation.answer, *some(QUESTION)]
        conversation.answer = []
        conversation.turns += 1
        prompt = array("I", conversation.token_ids)
        scheduler.submit(NewSequence(asked, prompt, bytes(32), sampling), time.monotonic())
        speaking[asked] = conversation

    def until_silent(most_turns: int) -> int:
        """Tokens that were produced until every conversation had its turns."""
        nonlocal prompted, cached
        produced = 0
        while speaking:
            for event in stepper.step() or ():
                conversation = speaking[event.sequence_id]
                if isinstance(event, SequenceStarted):
                    prompted += len(conversation.token_ids)
                    cached += event.cached_tokens
                elif isinstance(event, TokensProduced):
                    conversation.answer += event.tokens
                    produced += len(event.tokens)
                elif isinstance(event, SequenceFailed):
                    raise AssertionError(event)
                elif isinstance(event, SequenceFinished):
                    del speaking[event.sequence_id]
                    if conversation.turns < most_turns:
                        ask(conversation)
        return produced

    for conversation in conversations:
        ask(conversation)
    until_silent(1)
    prompted = cached = 0
    before = scheduler.preemptions
    clock = work_clock(torch.get_num_threads())
    began = clock()
    for conversation in conversations:
        ask(conversation)
    produced = until_silent(turns)
    return Run(produced / (clock() - began), cached / prompted, scheduler.preemptions - before)


def _load(
    model: Path, layout: PageLayout, precision: str, num_bytes: int, threads: int | None
) -> ModelRunner:
    spec = model_spec(model)
    config = RunnerConfig(
        num_pages=num_bytes // replace(layout, precision=precision).page_bytes,
        page_size=PAGE_SIZE,
        kv_dtype=precision,  # type: ignore[arg-type]  # one of PRECISIONS
        device="cpu",
        threads=threads,
        step_tokens=DEFAULT_STEP_TOKENS,
    )
    return load_runner(spec, config)


def _row(concurrency: int, precision: str, found: dict[str, list[Run]], num_bytes: int) -> Beside:
    ours, theirs = found[precision], found["bf16"]
    ratio = median(
        our.tokens_per_s / their.tokens_per_s for our, their in zip(ours, theirs, strict=True)
    )

    def told(name: str) -> str:
        runs = found[name]
        return (
            f"{name}: {median(run.cached for run in runs):.0%} of prompts cached, "
            f"{max(run.preemptions for run in runs)} preemptions"
        )

    return Beside(
        f"turns_{concurrency}/{precision}",
        median(run.tokens_per_s for run in ours),
        "tokens/s",
        more_is_better=True,
        peers={"bf16": Figure(median(run.tokens_per_s for run in theirs), ratio)},
        detail=f"{num_bytes / 1e6:.0f} MB of pages; {told(precision)}; {told('bf16')}",
    )


def _crossover(precision: str, ratios: dict[int, float]) -> Beside:
    """The best ratio, and from where on it stays above one."""
    slower = [concurrency for concurrency, ratio in ratios.items() if ratio <= 1]
    quicker = [concurrency for concurrency in ratios if concurrency > max(slower, default=0)]
    told = ", ".join(f"{concurrency}: {ratio:.2f}" for concurrency, ratio in ratios.items())
    where = f"quicker from {min(quicker)} conversations on" if quicker else "not quicker at last"
    return Beside(
        f"crossover/{precision}",
        max(ratios.values()),
        "× bf16's tokens/s",
        more_is_better=True,
        peers={},
        detail=f"{where}; by conversations {told}",
    )
