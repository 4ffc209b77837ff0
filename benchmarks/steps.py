"""Step plans by hand: sequences whose pages, chunks and batches a test or a benchmark chooses."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import ModelSpec
from engine.execute.runner import ModelRunner
from engine.schedule.plan import Row, StepPlan, StepResult
from policies.contract.wire import Sampling

GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)


@dataclass(slots=True)
class Stream:
    """One sequence: prompt and completion tokens, its pages, and how far it is computed."""

    sequence_id: int
    token_ids: array[int]
    num_prompt: int
    sampling: Sampling = GREEDY
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)

    @property
    def completion(self) -> list[int]:
        return self.token_ids[self.num_prompt :].tolist()


class Steps:
    """Drives a runner without a scheduler; pages are taken in turn and never come back."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.page_size = runner.arena.layout.page_size
        self._next_page = 0
        self._generation = 0
        self._sequence = 0
        self._step = 0

    def reset(self) -> None:
        """All pages are free again (their generations go on rising)."""
        self._next_page = 0

    def stream(
        self, prompt: Iterable[int], *, sampling: Sampling = GREEDY, prefix_of: Stream | None = None
    ) -> Stream:
        """prefix_of: start with the pages of another stream, as a prefix hit would."""
        ids = array("I", prompt)
        self._sequence += 1
        made = Stream(self._sequence, ids, len(ids), sampling)
        if prefix_of is not None:
            hit = min(prefix_of.num_computed, len(ids) - 1) // self.page_size
            assert ids[: hit * self.page_size] == prefix_of.token_ids[: hit * self.page_size]
            made.pages, made.generations = prefix_of.pages[:hit], prefix_of.generations[:hit]
            made.num_computed = hit * self.page_size
        return made

    def copied(self, stream: Stream) -> Stream:
        """Another that says the same, with pages of its own."""
        made = self.stream(stream.token_ids)
        made.num_prompt, made.num_computed = stream.num_prompt, stream.num_computed
        self.runner.arena.assign([self._take_page(made) for _ in stream.pages])
        self.runner.arena.copy(zip(stream.pages, made.pages, strict=True))
        return made

    def preempt(self, stream: Stream) -> None:
        """Its pages are given up; all its tokens are to be computed again."""
        stream.pages, stream.generations, stream.num_computed = [], [], 0

    def step(self, work: Sequence[tuple[Stream, int]]) -> StepResult:
        """Computes the next n tokens of each stream; a stream that is caught up gains a token."""
        rows: list[Row] = []
        assigned: list[tuple[int, int]] = []
        tails: list[tuple[int, int]] = []
        for stream, count in work:
            start, stop = stream.num_computed, stream.num_computed + count
            while len(stream.pages) * self.page_size < stop:
                assigned.append(self._take_page(stream))
            if stop % self.page_size and assigned and assigned[-1][0] == stream.pages[-1]:
                tails.append((stream.pages[-1], stop % self.page_size))
            rows.append(
                Row(
                    sequence_id=stream.sequence_id,
                    start=start,
                    token_ids=stream.token_ids[start:stop],
                    page_table=(stream.pages,),
                    generations=(stream.generations,),
                    sampling=stream.sampling,
                    num_completion=len(stream.token_ids) - stream.num_prompt,
                    samples=stop == len(stream.token_ids),
                )
            )
        self._step += 1
        result = self.runner.execute(
            StepPlan(self._step, tuple(rows), tuple(assigned), tuple(tails))
        )
        for index, ((stream, count), token) in enumerate(zip(work, result.tokens, strict=True)):
            if index in result.corrupt or index in result.insane:
                continue
            stream.num_computed += count
            if token is not None:
                stream.token_ids.append(token)
        return result

    def _take_page(self, stream: Stream) -> tuple[int, int]:
        """(page_id, generation) of the page that is its next now."""
        self._generation += 1
        taken = self._next_page, self._generation
        self._next_page += 1
        stream.pages.append(taken[0])
        stream.generations.append(taken[1])
        return taken

    def generate(
        self, streams: Sequence[Stream], num_tokens: int, *, chunks: Sequence[int] = (1 << 20,)
    ) -> list[list[int]]:
        """Runs all streams together until each has num_tokens more; prompts in chunks, in turn."""
        goals = [len(stream.token_ids) + num_tokens for stream in streams]
        turn = 0
        while True:
            work = []
            for stream, goal in zip(streams, goals, strict=True):
                left = len(stream.token_ids) - stream.num_computed
                if len(stream.token_ids) < goal:
                    work.append((stream, min(left, chunks[turn % len(chunks)])))
            if not work:
                return [stream.completion for stream in streams]
            self.step(work)
            turn += 1


def model_spec(path: Path) -> ModelSpec:
    """Of a checkpoint that no catalogue names."""
    return ModelSpec(
        name="benchmark",
        identity="benchmark",
        path=str(path),
        format="gguf" if path.is_file() else "safetensors",
    )
