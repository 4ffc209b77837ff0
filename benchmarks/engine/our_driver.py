"""Drives our engine's loop in a process of its own: `… MODEL exact|fast THREADS`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy

from benchmarks.engine import taps
from benchmarks.engine.loop import ENDLESS, NUM_PAGES, PAGE_SIZE, EngineLoop
from benchmarks.peers.conversations import Conversations
from benchmarks.peers.driver import Driven, serve, timed
from benchmarks.steps import Steps, Stream, model_spec
from engine.execute.runner import ModelRunner, RunnerConfig, load_runner


def load(path: Path, compute: str, threads: int) -> ModelRunner:
    spec = model_spec(path)
    config = RunnerConfig(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        threads=threads,
        device="cpu",
        compute=compute,  # type: ignore[arg-type]  # one of engine.config.Compute
    )
    return load_runner(spec, config)


class Ours:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._loop = EngineLoop(runner)
        self._kept: list[int] = []
        self._decoding: set[int] = set()
        self._steps = Steps(runner)
        self._mixed: tuple[list[Stream], list[int]] = ([], [])
        self._sharing: list[Stream] = []
        self._apart: list[Stream] = []

    def about(self) -> str:
        return str(self._runner.compute_precision)

    def pages_mb(self, tokens: int) -> float:
        """Of so many tokens; pages of the arena that nothing was written to are not resident."""
        return self._runner.page_bytes * -(-tokens // PAGE_SIZE) / 1e6

    def first_token(self, prompt: list[int]) -> float:
        self._kept = prompt
        return self.warm_first_token()

    def warm_first_token(self) -> float:
        return timed(lambda: self._loop.until_all_speak({self._loop.submit(self._kept, 1)}))

    def start_decoding(self, prompts: list[list[int]]) -> None:
        self._speak(prompts)
        self._loop.settle()

    def _speak(self, prompts: list[list[int]]) -> None:
        self._decoding = {self._loop.submit(prompt, ENDLESS) for prompt in prompts}
        self._loop.until_all_speak(self._decoding)

    def steps(self, count: int) -> list[float]:
        took = [timed(self._loop.step) for _ in range(count - 1)]
        return [*took, timed(self._loop.last_step)]

    def stop_decoding(self) -> None:
        self._loop.abort(self._decoding)
        self._decoding = set()

    def first_tokens(self, prompts: list[list[int]]) -> float:
        """Requests of one lane each, at once: until each has its first token."""
        took = timed(lambda: self._speak(prompts))
        self.stop_decoding()
        return took

    def first_forked_tokens(self, prompt: list[int], lanes: int) -> float:
        """One request of several lanes: until each has its first token."""

        def start() -> None:
            leader = self._loop.submit(prompt, ENDLESS)
            forks = (self._loop.submit(prompt, ENDLESS, fork_of=leader) for _ in range(lanes - 1))
            self._decoding = {leader, *forks}
            self._loop.until_all_speak(self._decoding)

        took = timed(start)
        self.stop_decoding()
        return took

    def agents(self, shared: list[int], texts: list[list[list[int]]], answer_tokens: int) -> float:
        return timed(lambda: self._converse(Conversations(shared, texts, answer_tokens)))

    def _converse(self, conversations: Conversations) -> None:
        length = conversations.answer_tokens
        talking: dict[int, int] = {}  # sequence → conversation
        answers: dict[int, list[int]] = {}  # by sequence

        def submit(index: int, prompt: list[int]) -> None:
            sequence_id = self._loop.submit(prompt, length)
            talking[sequence_id], answers[sequence_id] = index, []

        for index, prompt in enumerate(conversations.openings()):
            submit(index, prompt)
        while talking:
            for sequence_id, tokens in self._loop.step().items():
                answers[sequence_id] += tokens
                if len(answers[sequence_id]) == length:
                    self._runner.end(sequence_id)
                    index = talking.pop(sequence_id)
                    following = conversations.answered(index, answers.pop(sequence_id))
                    if following is not None:
                        submit(index, following)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        sequence_id = self._loop.submit(prompt, count)
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += self._loop.step().get(sequence_id, ())
        return tokens

    def logits(self, tokens: list[int], path: str) -> None:
        """Of all tokens but the last, through the loop as a client asks for them."""
        with taps.logits_of_prompt() as taken:
            sequence_id = self._loop.submit(tokens, 1, prompt_logprobs=0)
            self._loop.until_all_speak({sequence_id})
        numpy.save(Path(path), numpy.concatenate(taken))

    # --- rows about steps -------------------------------------------------------------------------

    def kernel_shares(self, count: int) -> list[tuple[float, float]] | None:
        """(seconds, those in kernels) of steps, one after the other; None: no compiled kernels."""
        shares: list[tuple[float, float]] = []
        with taps.seconds_in_kernels() as spent:
            for _ in range(count):
                spent.clear()
                whole = timed(self._loop.step)
                shares.append((whole, sum(spent)))
        return shares if any(kernels for _, kernels in shares) else None

    def steps_with_overlap(self, count: int) -> list[float]:
        self._loop.overlap(True)
        seconds = self.steps(count)
        self._loop.settle()
        self._loop.overlap(False)
        return seconds

    def prepare_mixed(self, prompts: list[list[int]], chunk: list[int]) -> None:
        """Sequences that decode from the end of their prompts, and a chunk of another's prompt.

        Pages are chosen by hand: nothing else may decode meanwhile, and the loop's prefixes go.
        """
        self._steps.reset()
        streams = [self._steps.stream(prompt) for prompt in prompts]
        for stream in streams:
            self._steps.generate([stream], 1)
        self._mixed = streams, chunk

    def mixed_steps(self) -> tuple[float, float, float]:
        """Seconds of (both in one step, the sequences alone, the chunk alone)."""
        streams, chunk = self._mixed
        decodes = [(stream, 1) for stream in streams]

        def fresh() -> list[tuple[Stream, int]]:
            # One token more than the chunk: the step does not sample from the prompt.
            return [(self._steps.stream([*chunk, chunk[0]]), len(chunk))]

        both = timed(lambda: self._steps.step([*decodes, *fresh()]))
        alone = timed(lambda: self._steps.step(decodes))
        return both, alone, timed(lambda: self._steps.step(fresh()))

    def prepare_shared(self, prefix: list[int], ends: list[list[int]]) -> None:
        """Sequences that decode from the same beginning: in the same pages, and in copies."""
        self._steps.reset()
        first = self._steps.stream([*prefix, prefix[0]])
        self._steps.step([(first, len(prefix))])
        self._sharing = [self._steps.stream(prefix + end, prefix_of=first) for end in ends]
        self._steps.generate(self._sharing, 1)
        self._apart = [self._steps.copied(stream) for stream in self._sharing]

    def shared_steps(self) -> tuple[float, float]:
        """Seconds of (a step of those in the same pages, of the others)."""
        shared, apart = ([(s, 1) for s in streams] for streams in (self._sharing, self._apart))
        took = timed(lambda: self._steps.step(shared)), timed(lambda: self._steps.step(apart))
        assert all(
            a.completion == b.completion for (a, _), (b, _) in zip(shared, apart, strict=True)
        )
        return took


def make() -> Driven:
    path, compute, threads = sys.argv[1:]
    return Ours(load(Path(path), compute, int(threads)))


if __name__ == "__main__":
    serve(make)
