"""The processes that `kagari` starts: own process groups, one log file each, none outlives us.

Signals reach a child only from here: a Ctrl-C in the terminal goes to the foreground process group,
in which no child is. Should this process be killed outright, the kernel kills each child at once
(PR_SET_PDEATHSIG), and an engine ends when its node agent's socket closes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG = 1
MAX_LOG_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 16


def python_module(module: str, *arguments: str) -> list[str]:
    """Run a module of ours; -P keeps a folder named `engine` in the current one from winning."""
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent() -> Callable[[], None]:
    """For preexec_fn. What the forked child needs is looked up before the fork."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def tether() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    return tether


@dataclass
class Child:
    """A running process; its stdout is a pipe to read lines from, its stderr goes to `log`."""

    name: str
    argv: list[str]
    log: Path
    process: subprocess.Popen[bytes]
    started_at: float
    _torn: bytes = field(default=b"", repr=False)

    @property
    def fd(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def is_running(self) -> bool:
        return self.process.poll() is None

    def read_lines(self) -> list[bytes] | None:
        """Whole lines that are there now, or None at the end of the pipe. Call when readable."""
        data = os.read(self.fd, MAX_LINE_BYTES)
        if not data:
            return None
        *lines, torn = (self._torn + data).split(b"\n")
        self._torn = torn[:MAX_LINE_BYTES]
        return lines

    def signal(self, number: signal.Signals) -> None:
        """To the child itself, not its group: an agent tells its engines what to do."""
        if self.is_running():
            self.process.send_signal(number)

    def kill(self) -> None:
        """The whole process group, at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def wait(self, deadline: float) -> bool:
        """True when it has ended by the deadline (monotonic)."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self, lines: int = 12) -> str:
        """The end of its log, for the error message."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - (8 << 10)))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def start_child(name: str, argv: list[str], *, log: Path) -> Child:
    """Call from the main thread before others run: PDEATHSIG follows the creating thread."""
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".old.log"))
    with log.open("ab") as errors:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,
            preexec_fn=die_with_parent(),
        )
    return Child(name, argv, log, process, time.monotonic())
