"""A scheduler and its runner, stepped by hand, for tests of one step at a time."""

from __future__ import annotations

from array import array

from engine.config import ScheduleConfig
from engine.schedule.events import (
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceStarted,
    TokensProduced,
)
from engine.schedule.plan import StepPlan
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from policies.contract.wire import Sampling
from tests.engine.arena_runner import VOCAB, ArenaRunner

PAGE_SIZE = 4
ROOT = b"r" * 32


def ids(length: int, seed: int = 0) -> array[int]:
    return array("I", [(seed * 13 + i * i) % VOCAB for i in range(length)])


class Bench:
    """A scheduler and its runner, stepped by hand."""

    def __init__(self, **limits: float) -> None:
        defaults = {"num_pages": 64, "page_size": PAGE_SIZE, "context_tokens": 200}
        self.config = ScheduleConfig(**{**defaults, "step_tokens": 32, "max_running": 8, **limits})  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config)
        self.runner = ArenaRunner(self.config.num_pages, PAGE_SIZE)
        self.now = 0.0
        self.events: list[SequenceEvent] = []

    def submit(
        self,
        sequence_id: int,
        prompt: array[int],
        *,
        max_tokens: int = 4,
        root: bytes = ROOT,
        stops: tuple[int, ...] = (),
        min_tokens: int = 0,
        fork_of: int | None = None,
        **asked: int,
    ) -> None:
        sampling = Sampling(max_tokens, stop_token_ids=stops, min_tokens=min_tokens, **asked)
        new = NewSequence(sequence_id, prompt, root, sampling, fork_of=fork_of)
        self.scheduler.submit(new, self.now)
        self.runner.begin(sequence_id, prompt)

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        self.now += 0.01
        if plan is not None:
            self.events += self.scheduler.apply(self.runner.execute(plan), self.now)
        self.scheduler.invariants()
        return plan

    def drain(self) -> None:
        for _ in range(5000):
            if self.step() is None:
                break
        assert not self.scheduler.has_work

    def tokens(self, sequence_id: int) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, TokensProduced) and event.sequence_id == sequence_id
            for token in event.tokens
        ]

    def cached(self, sequence_id: int) -> int:
        (cached,) = [
            event.cached_tokens
            for event in self.events
            if isinstance(event, SequenceStarted) and event.sequence_id == sequence_id
        ]
        return cached

    def end(self, sequence_id: int) -> SequenceFinished | SequenceFailed:
        (end,) = [
            event
            for event in self.events
            if isinstance(event, SequenceFinished | SequenceFailed)
            and event.sequence_id == sequence_id
        ]
        return end

    def order(self) -> list[int]:
        """Sequence ids in the order of their first token."""
        order = [event.sequence_id for event in self.events if isinstance(event, TokensProduced)]
        return list(dict.fromkeys(order))
