"""What a person or `kagari serve` sees of a start: one JSON object a line on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import structlog

from policies.contract.wire import EngineUp

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


class EngineStages:
    """Times the stages that loading engines go through: one ends when the next begins."""

    def __init__(self, emit: Emit, names: Sequence[str], clock: Callable[[], float]) -> None:
        self._emit = emit
        self._names = names  # of the engines' models, by index
        self._clock = clock
        self._open: dict[int, tuple[str, float]] = {}  # engine → (stage, its begin)

    def on_loading(self, index: int, name: str, share: float) -> None:
        if index in self._open and self._open[index][0] != name:
            self._end(index)
        self._open.setdefault(index, (name, self._clock()))
        if share >= 1:
            self._end(index)

    def on_up(self, up: EngineUp) -> None:
        if up.info.engine in self._open:
            self._end(up.info.engine)
        detail = f"{up.info.model}, {up.info.num_pages} pages"
        self._emit(stage_line("engine", up.load_s, detail))

    def _end(self, index: int) -> None:
        name, begun = self._open.pop(index)
        self._emit(stage_line(name, self._clock() - begun, self._names[index]))


@contextmanager
def stage(emit: Emit, name: str, detail: str) -> Iterator[None]:
    """Times what runs inside; a failed stage writes no line, its error does."""
    begun = time.monotonic()
    yield
    emit(stage_line(name, time.monotonic() - begun, detail))
