"""CPU time and memory of this process and its children, for drivers. Standard library only."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import children

STATUS_KB = {"resident_mb": "VmRSS", "peak_mb": "VmHWM", "file_mb": "RssFile"}


def cpu_s() -> float:
    """User and system seconds so far, of children that ended too."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(children.cpu_s(pid) for pid in _descendants(Path("/proc/self")))
    return time.process_time() + ended.ru_utime + ended.ru_stime + living


def memory() -> dict[str, float]:
    """Resident now, the most that ever was, and what of it is mapped files."""
    places = [
        Path("/proc/self"),
        *(Path(f"/proc/{pid}") for pid in _descendants(Path("/proc/self"))),
    ]
    total = dict.fromkeys(STATUS_KB, 0.0)
    for place in places:
        try:
            lines = (place / "status").read_text().splitlines()
        except OSError:  # it ended meanwhile, or there is no /proc
            continue
        fields = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
        for name, field in STATUS_KB.items():
            total[name] += int(fields.get(field, "0").split()[0]) * 1024 / 1e6
    return total


def _descendants(process: Path) -> Iterator[int]:
    for task in process.glob("task/*/children"):
        try:
            pids = [int(pid) for pid in task.read_text().split()]
        except OSError:
            continue
        for pid in pids:
            yield pid
            yield from _descendants(Path(f"/proc/{pid}"))
