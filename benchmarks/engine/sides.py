"""What is measured in this process: our engine's loop, and transformers with its own cache."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch

from benchmarks.peers.driver import timed
from engine.config import DEFAULT_STEP_TOKENS, ScheduleConfig
from engine.execute.runner import ModelRunner
from engine.schedule.events import SequenceFailed, TokensProduced
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from policies.contract.wire import Sampling

PAGE_SIZE = 64
NUM_PAGES = 640
ENDLESS = 1 << 12


class Side(Protocol):
    """A peer as the rows ask it: here or in a process of its own."""

    def first_token_s(self, prompt: array[int]) -> float: ...
    def start_decoding(self, batch: int, prompt: Callable[[], array[int]]) -> None: ...
    def step_s(self, steps: int) -> float: ...
    def stop_decoding(self) -> None: ...
    def keep(self, prompt: array[int]) -> None: ...
    def warm_first_token_s(self) -> float: ...
    def greedy(self, prompt: list[int], count: int) -> list[int]: ...


class Ours:
    """The engine's own loop on one thread: plan, execute, apply."""

    def __init__(self, runner: ModelRunner, *, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._sequence = 0
        self._decoding: set[int] = set()
        self._scheduler = Scheduler(
            ScheduleConfig(
                num_pages=NUM_PAGES,
                page_size=PAGE_SIZE,
                context_tokens=runner.context_tokens,
                step_tokens=DEFAULT_STEP_TOKENS,
            )
        )

    def prompt(self, tokens: int) -> array[int]:
        return array("I", [self._random.randrange(3, self._vocab_size) for _ in range(tokens)])

    def submit(self, prompt: array[int], max_tokens: int, fork_of: int | None = None) -> int:
        self._sequence += 1
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        self._runner.begin(self._sequence, prompt)
        new = NewSequence(self._sequence, prompt, bytes(32), sampling, fork_of=fork_of)
        self._scheduler.submit(new, time.monotonic())
        return self._sequence

    def step(self) -> set[int]:
        """One step; the sequences that got a token."""
        plan = self._scheduler.plan(time.monotonic())
        if plan is None:
            return set()
        events = self._scheduler.apply(self._runner.execute(plan), time.monotonic())
        assert not any(isinstance(event, SequenceFailed) for event in events), events
        return {event.sequence_id for event in events if isinstance(event, TokensProduced)}

    def first_token_s(self, prompt: array[int]) -> float:
        started = time.perf_counter()
        sequence_id = self.submit(prompt, 1)
        while sequence_id not in self.step():
            pass
        return time.perf_counter() - started

    def start_decoding(self, batch: int, prompt: Callable[[], array[int]]) -> None:
        """Distinct prompts, all prefilled: from now on a step is one token for each."""
        self._decoding = {self.submit(prompt(), ENDLESS) for _ in range(batch)}
        self._until_all_speak()

    def _until_all_speak(self) -> None:
        waiting = set(self._decoding)
        while waiting:
            waiting -= self.step()

    def first_tokens_s(self, prompts: list[array[int]]) -> float:
        """Requests of one lane each, at once: until each has its first token."""
        return self._first_tokens_s(lambda: {self.submit(prompt, ENDLESS) for prompt in prompts})

    def first_forked_tokens_s(self, prompt: array[int], lanes: int) -> float:
        """One request of several lanes: until each has its first token."""

        def submit() -> set[int]:
            leader = self.submit(prompt, ENDLESS)
            return {leader, *(self.submit(prompt, ENDLESS, leader) for _ in range(lanes - 1))}

        return self._first_tokens_s(submit)

    def _first_tokens_s(self, submit: Callable[[], set[int]]) -> float:
        started = time.perf_counter()
        self._decoding = submit()
        self._until_all_speak()
        took = time.perf_counter() - started
        self.stop_decoding()
        return took

    def stop_decoding(self) -> None:
        for sequence_id in self._decoding:
            self._scheduler.abort(sequence_id, time.monotonic())
            self._runner.end(sequence_id)

    def step_s(self, steps: int) -> float:
        return median(timed(self.step) for _ in range(steps))


class Transformers:
    """transformers with its own cache, greedy, one call a step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._token: torch.Tensor
        self._past: Any = None

    def _run(self, ids: torch.Tensor, past: Any = None) -> tuple[torch.Tensor, Any]:
        with torch.inference_mode():
            out = self._model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def first_token_s(self, prompt: array[int]) -> float:
        return timed(lambda: self._run(torch.tensor([prompt.tolist()])))

    def start_decoding(self, batch: int, prompt: Callable[[], array[int]]) -> None:
        token, past = self._run(torch.tensor([prompt().tolist()]))
        past.batch_repeat_interleave(batch)
        self._token, self._past = token.repeat(batch, 1), past

    def step(self) -> None:
        self._token, self._past = self._run(self._token, self._past)

    def step_s(self, steps: int) -> float:
        return median(timed(self.step) for _ in range(steps))

    def stop_decoding(self) -> None:
        self._past = None

    def keep(self, prompt: array[int]) -> None:
        """The prompt's cache is kept by hand: the best that it can do for a warm start."""
        _, self._past = self._run(torch.tensor([prompt.tolist()]))
        self._token = torch.tensor([prompt.tolist()[-1:]])

    def warm_first_token_s(self) -> float:
        self._past.crop(-1)
        return timed(lambda: self._run(self._token, self._past))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        token, past = self._run(torch.tensor([prompt]))
        tokens = [int(token)]
        while len(tokens) < count:
            token, past = self._run(token, past)
            tokens.append(int(token))
        return tokens

    def gaps(self, prompt: list[int], completion: list[int]) -> list[float]:
        """How much likelier, in nats, its own choice is than each token of a completion."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + completion])).logits[
                0, len(prompt) - 1 : -1
            ]
        chosen = logits.gather(1, torch.tensor(completion)[:, None])[:, 0]
        gaps: list[float] = (logits.amax(-1) - chosen).tolist()
        return gaps
