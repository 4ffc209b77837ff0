"""Drives llama.cpp in its own environment: `… MODEL.gguf THREADS`.

Each measure takes the better of its thread settings, found by a short trial. Sequences of a batch
have caches of their own (not one unified cache, in which each would look past all others' keys);
conversations, which share a prefix, have whichever is quicker.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import llama_cpp
import numpy

from benchmarks.peers.conversations import Conversations
from benchmarks.peers.driver import Driven, serve, timed
from benchmarks.peers.llama_cpp_batches import converse
from benchmarks.peers.llama_cpp_context import BATCH_TOKENS, Context

PROMPT_TOKENS = 2304  # longest prompt
DECODE_TOKENS = 768  # of a sequence of a batch, beyond its prompt
TRIAL_PROMPT, TRIAL_STEPS, TRIALS = 128, 3, 2


# Kept for the life of the process: llama.cpp calls it whenever it likes.
@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: object) -> None:
    pass


class LlamaCpp:
    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        assert self._model, f"llama.cpp does not load {path}"
        self._choices = sorted({1, threads})
        self._prompts = Context(self._model, 1, PROMPT_TOKENS, threads)
        self._kept: list[int] = []
        self._lanes: Context | None = None
        self._talks: Context | None = None
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._prompt_threads = self._better(
            self._prompts, lambda: self.first_token(list(range(3, 3 + TRIAL_PROMPT)))
        )

    def about(self) -> str:
        return f"{self._prompt_threads} threads for prompts"

    def _better(self, context: Context, work: Callable[[], object]) -> int:
        """Of the thread settings; the context keeps it."""
        work()
        spent = dict.fromkeys(self._choices, float("inf"))
        for _ in range(TRIALS):
            for threads in self._choices:
                context.use_threads(threads)
                spent[threads] = min(spent[threads], timed(work))
        best = min(spent, key=lambda threads: spent[threads])
        context.use_threads(best)
        return best

    def first_token(self, prompt: list[int]) -> float:
        self._kept = prompt
        self._prompts.forget(0)
        return timed(lambda: self._prompts.prefill(prompt))

    def warm_first_token(self) -> float:
        last = len(self._kept) - 1
        self._prompts.forget(0, last)
        return timed(lambda: self._prompts.step(self._kept[-1:], [last]))

    def start_decoding(self, prompts: list[list[int]]) -> None:
        """All begin with the first prompt, each with a cache of its own: a step costs the same."""
        prompt, count = prompts[0], len(prompts)
        lanes = Context(self._model, count, len(prompt) + DECODE_TOKENS, self._prompt_threads)
        token = lanes.prefill(prompt)
        for lane in range(1, count):
            lanes.copy(0, lane)
        self._tokens, self._positions = [token] * count, [len(prompt)] * count
        self._lanes = lanes
        self._better(lanes, lambda: self.steps(TRIAL_STEPS))

    def steps(self, count: int) -> list[float]:
        return [timed(self._step) for _ in range(count)]

    def _step(self) -> None:
        assert self._lanes is not None
        self._tokens = self._lanes.step(self._tokens, self._positions)
        self._positions = [position + 1 for position in self._positions]

    def stop_decoding(self) -> None:
        assert self._lanes is not None
        self._lanes.close()
        self._lanes = None

    def agents(self, shared: list[int], texts: list[list[list[int]]], answer_tokens: int) -> float:
        """The first time with either kind of cache, and the better one stays: which that is depends
        on how much the conversations share."""

        def talk_s(context: Context) -> float:
            conversations = Conversations(shared, texts, answer_tokens)
            return timed(lambda: converse(context, conversations, batch_tokens=BATCH_TOKENS))

        if self._talks is not None:
            return talk_s(self._talks)
        own = max(sum(map(len, turns)) + len(turns) * answer_tokens for turns in texts)
        tokens, count = -(-(len(shared) + own) // 256) * 256, len(texts)
        spent: dict[Context, float] = {}
        for unified in (False, True):
            context = Context(self._model, count, tokens, self._prompt_threads, unified=unified)
            spent[context] = talk_s(context)
        self._talks, worse = sorted(spent, key=lambda context: spent[context])
        worse.close()
        return spent[self._talks]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        self._prompts.forget(0)
        tokens = [self._prompts.prefill(prompt)]
        while len(tokens) < count:
            tokens += self._prompts.step(tokens[-1:], [len(prompt) + len(tokens) - 1])
        return tokens

    def logits(self, tokens: list[int], path: str) -> None:
        assert len(tokens) <= BATCH_TOKENS
        self._prompts.forget(0)
        self._prompts.decode([(token, at, 0, True) for at, token in enumerate(tokens)])
        numpy.save(path, self._prompts.logits(len(tokens)))


def make() -> Driven:
    return LlamaCpp(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    serve(make)
