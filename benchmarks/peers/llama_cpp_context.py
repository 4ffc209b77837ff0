"""One llama.cpp context over its C interface: batches of (token, position, sequence) go in."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy

from benchmarks.peers.llama_cpp_batches import Row

BATCH_TOKENS = 2048


class Context:
    """A llama_context of some sequences, each with room for so many tokens.

    unified: all sequences share one cache, where a copied prefix costs nothing and each token
    looks past all others' keys; else each has its own, and a copy is one.
    """

    def __init__(
        self, model: Any, sequences: int, tokens: int, threads: int, *, unified: bool = False
    ) -> None:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = sequences * tokens
        settings.n_batch = BATCH_TOKENS
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = unified
        self._context = llama_cpp.llama_init_from_model(model, settings)
        assert self._context, "llama.cpp made no context"
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._memory = llama_cpp.llama_get_memory(self._context)

    def use_threads(self, threads: int) -> None:
        llama_cpp.llama_set_n_threads(self._context, threads, threads)

    def forget(self, sequence: int, start: int = 0) -> None:
        assert llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def forget_all(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def copy(self, source: int, target: int) -> None:
        """All of a sequence's cache, for another as well."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def prefill(self, prompt: list[int], sequence: int = 0) -> int:
        """The greedy token after a prompt, whose cache stays in the sequence."""
        last = len(prompt) - 1
        rows = [(token, at, sequence, at == last) for at, token in enumerate(prompt)]
        for start in range(0, len(rows), BATCH_TOKENS):
            self.decode(rows[start : start + BATCH_TOKENS])
        return self.greedy(1)[0]

    def step(self, tokens: list[int], positions: list[int]) -> list[int]:
        """One token for each sequence from the first on."""
        pairs = enumerate(zip(tokens, positions, strict=True))
        self.decode([(token, position, sequence, True) for sequence, (token, position) in pairs])
        return self.greedy(len(tokens))

    def decode(self, rows: list[Row]) -> None:
        """At most BATCH_TOKENS rows."""
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

    def greedy(self, rows: int) -> list[int]:
        """The best token of each row of the last batch that wanted logits."""
        return [int(token) for token in self.logits(rows).argmax(-1)]

    def logits(self, rows: int) -> Any:
        """[rows][vocabulary], llama.cpp's own memory until the next batch."""
        logits = llama_cpp.llama_get_logits(self._context)
        floats = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return numpy.ctypeslib.as_array(floats, (rows, self._vocab_size))

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
