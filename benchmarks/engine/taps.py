"""What a benchmark looks at inside our engine while it runs, and it does not know of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy
from torch import Tensor

from engine.execute.kernels.cpu.library import Library
from engine.execute.logprobs import describe


@contextmanager
def logits_of_prompt() -> Iterator[list[Any]]:
    """The logits from which prompt tokens are told, in order: fp32 arrays [tokens][vocabulary]."""
    taken: list[Any] = []

    def tap(logits: Tensor, *rest: Any) -> Any:
        taken.append(logits.float().numpy().astype(numpy.float32, copy=True))
        return describe(logits, *rest)

    with patch("engine.execute.runner.describe", tap):
        yield taken


@contextmanager
def seconds_in_kernels() -> Iterator[list[float]]:
    """The seconds of each call into the compiled kernels, in order."""
    spent: list[float] = []
    run = Library.run

    def tap(*arguments: Any, **named: Any) -> None:
        started = time.perf_counter()
        run(*arguments, **named)
        spent.append(time.perf_counter() - started)

    with patch.object(Library, "run", tap):
        yield spent
