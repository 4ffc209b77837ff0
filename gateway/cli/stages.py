"""Start-up on the screen: each stage of each process with its seconds, on stderr."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape


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
    """Prints finished stages as lines; on a terminal a spinner says what is still awaited."""

    def __init__(self, console: Console, expected_s: float | None) -> None:
        self._console = console
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
        seconds = "       " if stage.seconds is None else f"{stage.seconds:6.2f}s"
        self._console.print(
            f"  {process:<8} [dim]{seconds}[/dim]  {escape(stage.name)}"
            + (f" [dim]{escape(stage.detail)}[/dim]" if stage.detail else ""),
            highlight=False,
            soft_wrap=True,
        )

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def end(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
