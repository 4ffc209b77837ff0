"""How much memory this process occupies, and how much more it may."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator

from engine.cores import read_text
from policies.cgroups import ReadText, folders

_UNLIMITED = 1 << 60  # version 1 tells "no limit" as a number near 2⁶³


def rss_bytes() -> int:
    """Resident bytes now on Linux; elsewhere the most there ever were."""
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def available_bytes(read: ReadText = read_text) -> int | None:
    """Bytes that may still be touched before the system or a cgroup runs out; None if untold.

    The least of what the system tells as available and of what the process's cgroups leave. Cached
    files count as free: they make room. What others have reserved and not touched is not known.
    """
    rooms = [*_system_room(read), *_group_rooms(read)]
    return max(0, min(rooms)) if rooms else None


def _system_room(read: ReadText) -> Iterator[int]:
    kilobytes = _field(read("/proc/meminfo"), "MemAvailable:")
    if kilobytes is not None:
        yield kilobytes * 1024


def _group_rooms(read: ReadText) -> Iterator[int]:
    for folder in folders(read, "memory"):
        stat = read(f"{folder}/memory.stat")
        for limit_file, used_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = (_number(read(f"{folder}/{name}")) for name in (limit_file, used_file))
            if limit is None or used is None or limit >= _UNLIMITED:
                continue
            cached = (_field(stat, f"{prefix}{kind}_file") or 0 for kind in ("inactive", "active"))
            yield limit - used + sum(cached)


def _field(text: str | None, name: str) -> int | None:
    """The number behind a name, one a line."""
    for line in (text or "").splitlines():
        told, *rest = line.split()[:2] or [""]
        if told == name and rest:
            return _number(rest[0])
    return None


def _number(text: str | None) -> int | None:
    """None for "max" and whatever is no number."""
    told = (text or "").strip()
    return int(told) if told.isdigit() else None
