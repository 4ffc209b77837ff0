"""What a person or `kagari serve` sees of a start: one JSON object a line on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import structlog

Emit = Callable[[dict[str, object]], None]


class StageLines:
    """Writes the lines; when nobody reads them any more it says so once and stops."""

    def __init__(self) -> None:
        self._is_open = True

    def __call__(self, line: dict[str, object]) -> None:
        if not self._is_open:
            return
        try:
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
            sys.stdout.flush()
        except (BrokenPipeError, ValueError):
            self._is_open = False
            structlog.get_logger().warning("stdout_closed")


def stage_line(name: str, seconds: float, detail: str) -> dict[str, object]:
    return {
        "event": "stage",
        "stage": name,
        "name": name,
        "seconds": round(seconds, 3),
        "detail": detail,
    }


@contextmanager
def stage(emit: Emit, name: str, detail: str) -> Iterator[None]:
    """Times what runs inside; a failed stage writes no line, its error does."""
    begun = time.monotonic()
    yield
    emit(stage_line(name, time.monotonic() - begun, detail))
