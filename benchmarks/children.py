"""Child processes of a benchmark: they end with it, however it ends; whose CPU was used."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """For preexec_fn: the kernel ends this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop(process: subprocess.Popen[bytes] | subprocess.Popen[str], patience_s: float) -> None:
    """Asks a process to end, then ends it; it led a session of its own (start_new_session)."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def leave_by_exit_on_terminate() -> None:
    """SIGTERM runs `finally` blocks, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def cpu_s(pid: int) -> float:
    """User and system seconds of all threads of a process; 0 where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """CPU seconds spent by everybody since boot; 0 where /proc is absent."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    fields = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes that its main thread started and that are there."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
