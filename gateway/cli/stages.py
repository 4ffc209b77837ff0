"""Start-up on the screen: each stage of each process with its seconds, on stderr."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

SAY_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Stage:
    """One line that a process prints on stdout: {"stage": …, "seconds": …, "detail": …, …}."""

    name: str
    seconds: float | None
    detail: str


def read_stage(line: bytes) -> Stage | None:
    """The stage in this line of a child's stdout; None when it is something else."""
    try:
        value: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("stage"), str):
        return None
    seconds = value.get("seconds")
    return Stage(
        value["stage"],
        float(seconds) if isinstance(seconds, int | float) else None,
        str(value.get("detail") or ""),
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a process cannot go on: its own four parts, {"event": "error", "error": {…}}."""

    field: str
    found: str
    allowed: str
    remedy: str


def read_fault(line: bytes) -> Fault | None:
    """The fault in this line of a child's stdout; None when it is something else."""
    try:
        value: Any = json.loads(line)
        error = value["error"] if value["event"] == "error" else {}
        return Fault(**{name: str(error[name]) for name in Fault.__slots__})
    except (ValueError, TypeError, KeyError):
        return None


class StageScreen:
    """Prints finished stages as lines; on a terminal a spinner says what is still awaited.

    What is under way, such as the bytes of a pull, changes the spinner's text; off a terminal it is
    a line once in SAY_EVERY_S, so that a log of an hour's pull stays short.
    """

    def __init__(
        self,
        console: Console,
        expected_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._clock = clock
        self._said_at: dict[tuple[str, str], float] = {}  # process and stage under way
        self._expected_s = expected_s
        self._spinner = console.status("") if console.is_terminal else None

    def begin(self, text: str) -> None:
        last = f" [dim](last time {self._expected_s:.1f} s)[/dim]" if self._expected_s else ""
        if self._spinner is None:
            self._console.print(f"{text}{last}")
        else:
            self._spinner.update(f"{text}{last}")
            self._spinner.start()

    def show(self, process: str, stage: Stage) -> None:
        if stage.seconds is None and self._is_said(process, stage):
            return
        seconds = "       " if stage.seconds is None else f"{stage.seconds:6.2f}s"
        self._console.print(
            f"  {process:<8} [dim]{seconds}[/dim]  {escape(stage.name)}"
            + (f" [dim]{escape(stage.detail)}[/dim]" if stage.detail else ""),
            highlight=False,
            soft_wrap=True,
        )

    def _is_said(self, process: str, stage: Stage) -> bool:
        """Whether the spinner says it, or a line did not long ago."""
        if self._spinner is not None:
            self._spinner.update(escape(f"{process}: {stage.name} {stage.detail}"))
            return True
        now, place = self._clock(), (process, stage.name)
        if now - self._said_at.get(place, -SAY_EVERY_S) < SAY_EVERY_S:
            return True
        self._said_at[place] = now
        return False

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def end(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
