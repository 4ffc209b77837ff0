"""Runs inside an engine's environment: one JSON request a line on stdin, one answer on stdout.

Standard library only. Each answer tells the CPU seconds that it took. Whatever the engine prints
goes to stderr. The end of stdin ends the process, so that it never outlives the benchmark.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.peers import usage


class Driven(Protocol):
    """What an engine is asked; times are seconds. Every call is greedy.

    `memory` is answered for it. Some have more: `agents(shared, texts, answer_tokens)`, see
    conversations.py; `logits(tokens, path)`, the fp32 logits after each token as an .npy file.
    """

    def about(self) -> str:
        """Settings that a reader of a row should know."""

    def first_token(self, prompt: list[int]) -> float:
        """Until the first token of a new prompt, whose cache warm_first_token may use."""

    def warm_first_token(self) -> float:
        """The last new prompt again."""

    def start_decoding(self, prompts: list[list[int]]) -> None: ...
    def steps(self, count: int) -> list[float]: ...
    def stop_decoding(self) -> None: ...
    def greedy(self, prompt: list[int], count: int) -> list[int]: ...


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def serve(make: Callable[[], Driven]) -> None:
    """The first line that goes out is the engine's `about`; a fault is an answer, then the end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        engine = make()
        answer(result=engine.about(), cpu_s=usage.cpu_s())
        for line in sys.stdin:
            request = json.loads(line)
            name = request["call"]
            asked = usage.memory if name == "memory" else getattr(engine, name)
            before = usage.cpu_s()
            result = asked(*request["arguments"])
            answer(result=result, cpu_s=usage.cpu_s() - before)
    except Exception as error:
        answer(fault=f"{type(error).__name__}: {error}"[:500])
        raise
