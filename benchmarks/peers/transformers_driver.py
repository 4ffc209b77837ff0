"""Drives transformers with its own cache, one call a step: `… MODEL fp32|bf16 THREADS`.

Its weights are the checkpoint's, dequantised. In fp32 it is also the reference of the others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.peer import transformers_llama
from benchmarks.peers.driver import Driven, serve, timed
from engine.execute.weights import open_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Transformers:
    def __init__(self, model: Any, about: str) -> None:
        self._model = model
        self._about = about
        self._token: torch.Tensor
        self._past: Any = None  # of the sequences that decode
        self._kept: Any = None  # of the last prompt
        self._kept_token: torch.Tensor

    def about(self) -> str:
        return self._about

    def _run(self, ids: torch.Tensor, past: Any = None) -> tuple[torch.Tensor, Any]:
        with torch.inference_mode():
            out = self._model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def first_token(self, prompt: list[int]) -> float:
        """The prompt's cache is kept by hand: the best that it can do for a warm start."""
        self._kept_token = torch.tensor([prompt[-1:]])

        def run() -> None:
            _, self._kept = self._run(torch.tensor([prompt]))

        return timed(run)

    def warm_first_token(self) -> float:
        self._kept.crop(-1)
        return timed(lambda: self._run(self._kept_token, self._kept))

    def start_decoding(self, prompts: list[list[int]]) -> None:
        """All begin with the first prompt: what a step costs does not depend on the tokens."""
        token, past = self._run(torch.tensor([prompts[0]]))
        past.batch_repeat_interleave(len(prompts))
        self._token, self._past = token.repeat(len(prompts), 1), past

    def steps(self, count: int) -> list[float]:
        return [timed(self._step) for _ in range(count)]

    def _step(self) -> None:
        self._token, self._past = self._run(self._token, self._past)

    def stop_decoding(self) -> None:
        self._past = None

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        token, past = self._run(torch.tensor([prompt]))
        tokens = [int(token)]
        while len(tokens) < count:
            token, past = self._run(token, past)
            tokens.append(int(token))
        return tokens

    def logits(self, tokens: list[int], path: str) -> None:
        numpy.save(Path(path), self._logits(tokens).float().numpy())

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits

    def gaps(self, prompt: list[int], completion: list[int]) -> list[float]:
        """How much likelier, in nats, its own choice is than each token of a completion."""
        logits = self._logits(prompt + completion)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(completion)[:, None])[:, 0]
        gaps: list[float] = (logits.amax(-1) - chosen).tolist()
        return gaps


def make() -> Driven:
    path, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = transformers_llama(open_checkpoint(path), dtype=DTYPES[dtype])
    return Transformers(model, dtype)


if __name__ == "__main__":
    serve(make)
