"""`kagari models pull`: the node agent fetches and verifies; here its progress becomes a bar."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from gateway.cli.children import die_with_parent, python_module
from gateway.cli.problem import FAILED, Problem


def pull_model(name: str) -> None:
    """Raises Problem with the agent's own four parts when the model cannot be had."""
    process = subprocess.Popen(
        python_module("node_agent", "models", "pull", name, "--json"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with process.stdout, process.stderr:
            bars = Bars()
            with bars.progress:
                for line in process.stderr:
                    bars.read(line)
            answer = read_answer(process.stdout.read())
    finally:
        process.wait(10)
    if process.returncode != 0:
        raise not_pulled(name, answer.get("error") or {}, process.returncode)
    sys.stdout.write(f"{answer['name']}  {answer['path']}\n")


class Bars:
    """One bar for each stage (download, verify, unpack), on stderr; plain lines off a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            DownloadColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task_by_stage: dict[str, TaskID] = {}

    def read(self, line: bytes) -> None:
        """A line of the agent's stderr; what is no progress passes on."""
        found = read_progress(line)
        if found is None:
            self._console.print(line.decode(errors="replace").rstrip(), highlight=False)
            return
        stage, done, total = found
        if stage not in self._task_by_stage:
            self._task_by_stage[stage] = self.progress.add_task(stage, total=total)
            if not self._console.is_terminal:
                size = f" {total >> 20} MiB" if total else ""
                self._console.print(f"{stage}{size}", highlight=False)
        self.progress.update(self._task_by_stage[stage], completed=done, total=total)


def read_progress(line: bytes) -> tuple[str, int, int] | None:
    """(stage, bytes done, bytes in all), or None when the line is something else."""
    try:
        value: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.get("event") != "progress":
        return None
    return str(value.get("stage")), int(value.get("bytes", 0)), int(value.get("total_bytes", 0))


def read_answer(text: bytes) -> dict[str, Any]:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def not_pulled(name: str, error: dict[str, Any], code: int) -> Problem:
    return Problem(
        str(error.get("field", "NAME")),
        found=str(error.get("found", f"{name}; exit {code} of the node agent")),
        allowed=str(error.get("allowed", "a name in kagari models list")),
        remedy=str(error.get("remedy", "run kagari models list")),
        exit_code=FAILED,
    )
