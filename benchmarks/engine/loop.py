"""Our engine's own loop without messages: sequences in, steps, tokens out."""

from __future__ import annotations

import time
from array import array
from unittest.mock import patch

from engine.config import DEFAULT_STEP_TOKENS, ScheduleConfig
from engine.execute.runner import ModelRunner
from engine.schedule.events import SequenceFailed, TokensProduced
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from engine.stepper import Stepper
from policies.contract.wire import Sampling

PAGE_SIZE = 64
NUM_PAGES = 640
ENDLESS = 1 << 12


class EngineLoop:
    """Steps overlap as the engine's do by default; see overlap."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._sequence = 0
        self._scheduler = Scheduler(
            ScheduleConfig(
                num_pages=NUM_PAGES,
                page_size=PAGE_SIZE,
                context_tokens=runner.context_tokens,
                step_tokens=DEFAULT_STEP_TOKENS,
            )
        )
        self.overlap(False)

    def overlap(self, is_on: bool) -> None:
        """Whether a step is planned while the one before it computes. Not while one computes."""
        self._stepper = Stepper(self._scheduler, self.runner, overlap=is_on, clock=time.monotonic)

    def last_step(self) -> dict[int, tuple[int, ...]]:
        """As step, but no other is under way afterwards: the cores are free for someone else."""
        with patch.object(self._scheduler, "plan_ahead", return_value=None):
            return self.step()

    def settle(self) -> None:
        """Takes the result of a step that is under way."""
        if self._stepper.is_computing:
            self.last_step()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        fork_of: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> int:
        """Greedy; the sequence's id."""
        self._sequence += 1
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=prompt_logprobs)
        ids = array("I", prompt)
        self.runner.begin(self._sequence, ids)
        new = NewSequence(self._sequence, ids, bytes(32), sampling, fork_of=fork_of)
        self._scheduler.submit(new, time.monotonic())
        return self._sequence

    def step(self) -> dict[int, tuple[int, ...]]:
        """One step; the tokens of each sequence that got any."""
        events = self._stepper.step() or []
        assert not any(isinstance(event, SequenceFailed) for event in events), events
        produced = (event for event in events if isinstance(event, TokensProduced))
        return {event.sequence_id: event.tokens for event in produced}

    def until_all_speak(self, sequence_ids: set[int]) -> None:
        waiting = set(sequence_ids)
        while waiting:
            waiting -= self.step().keys()

    def abort(self, sequence_ids: set[int]) -> None:
        for sequence_id in sequence_ids:
            self._scheduler.abort(sequence_id, time.monotonic())
            self.runner.end(sequence_id)
        self.settle()
