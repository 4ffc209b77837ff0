"""Drives llama.cpp through its C interface, in its own environment: `… MODEL.gguf THREADS`.

Each measure takes the better of its thread settings, found by a short trial. Sequences of a batch
have caches of their own (not one unified cache, in which each would look past all others' keys).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp
import numpy

from benchmarks.peers.driver import Driven, serve, timed

PROMPT_TOKENS = 2304  # longest prompt
DECODE_TOKENS = 1024  # of a sequence of a batch
BATCH_TOKENS = 2048
TRIAL_PROMPT, TRIAL_STEPS, TRIALS = 256, 4, 3


# Kept for the life of the process: llama.cpp calls it whenever it likes.
@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: object) -> None:
    pass


class Context:
    """A llama_context of some sequences, each with room for so many tokens."""

    def __init__(self, model: Any, sequences: int, tokens: int, threads: int) -> None:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = sequences * tokens
        settings.n_batch = BATCH_TOKENS
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(model, settings)
        assert self._context, "llama.cpp made no context"
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def use_threads(self, threads: int) -> None:
        llama_cpp.llama_set_n_threads(self._context, threads, threads)

    def forget(self, sequence: int, start: int = 0) -> None:
        memory = llama_cpp.llama_get_memory(self._context)
        assert llama_cpp.llama_memory_seq_rm(memory, sequence, start, -1)

    def prefill(self, prompt: list[int], sequence: int = 0) -> int:
        """The greedy token after a prompt, whose cache stays in the sequence."""
        rows: list[tuple[int, int, int, bool]] = []
        for position, token in enumerate(prompt):
            rows.append((token, position, sequence, position == len(prompt) - 1))
        for start in range(0, len(rows), BATCH_TOKENS):
            self._decode(rows[start : start + BATCH_TOKENS])
        return self._greedy(1)[0]

    def step(self, tokens: list[int], positions: list[int]) -> list[int]:
        """One token for each sequence from the first on."""
        self._decode(
            [
                (token, position, sequence, True)
                for sequence, (token, position) in enumerate(zip(tokens, positions, strict=True))
            ]
        )
        return self._greedy(len(tokens))

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wants_logits
        status = llama_cpp.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode answered {status}"

    def _greedy(self, rows: int) -> list[int]:
        logits = llama_cpp.llama_get_logits(self._context)
        table = numpy.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (rows, self._vocab_size)
        )
        return [int(token) for token in table.argmax(-1)]

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)


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
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._prompt_threads = self._better(
            self._prompts, lambda: self.first_token(list(range(3, 3 + TRIAL_PROMPT)))
        )

    def about(self) -> str:
        return f"{self._prompt_threads} threads for prompts"

    def _better(self, context: Context, work: Any) -> int:
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
        self._prompts.forget(0)
        return timed(lambda: self._prompts.prefill(prompt))

    def start_decoding(self, prompts: list[list[int]]) -> None:
        lanes = Context(self._model, len(prompts), DECODE_TOKENS, self._prompt_threads)
        self._tokens = [lanes.prefill(prompt, lane) for lane, prompt in enumerate(prompts)]
        self._positions = [len(prompt) for prompt in prompts]
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

    def keep(self, prompt: list[int]) -> None:
        self._kept = prompt
        self.first_token(prompt)

    def warm_first_token(self) -> float:
        last = len(self._kept) - 1
        self._prompts.forget(0, last)
        return timed(lambda: self._prompts.step(self._kept[-1:], [last]))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        self._prompts.forget(0)
        tokens = [self._prompts.prefill(prompt)]
        while len(tokens) < count:
            tokens += self._prompts.step(tokens[-1:], [len(prompt) + len(tokens) - 1])
        return tokens


def make() -> Driven:
    return LlamaCpp(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    serve(make)
