"""Whether processes are still there, by pid."""

from __future__ import annotations

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_gone(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)
