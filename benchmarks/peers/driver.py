"""Runs inside a peer's environment: one JSON request a line on stdin, one JSON answer on stdout.

Standard library only. Whatever the peer prints goes to stderr. The end of stdin ends the process,
so that it never outlives the benchmark.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Driven(Protocol):
    """What a peer's engine is asked; times are seconds. Every call is greedy."""

    def about(self) -> str:
        """Settings that a reader of a row should know."""

    def first_token(self, prompt: list[int]) -> float: ...
    def start_decoding(self, prompts: list[list[int]]) -> None: ...
    def steps(self, count: int) -> list[float]: ...
    def stop_decoding(self) -> None: ...
    def keep(self, prompt: list[int]) -> None:
        """Computes a prompt whose cache warm_first_token may then use."""

    def warm_first_token(self) -> float: ...
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
        answer(result=engine.about())
        for line in sys.stdin:
            request = json.loads(line)
            answer(result=getattr(engine, request["call"])(*request["arguments"]))
    except Exception as error:
        answer(fault=f"{type(error).__name__}: {error}"[:500])
        raise
