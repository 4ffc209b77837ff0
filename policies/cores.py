"""How many CPU cores a process may use, and how the engines on one machine share them.

A process may be free to run on every CPU and still be granted the time of a few: by a quota of its
cgroup (`docker run --cpus`). Threads beyond that are stopped in the middle of a step, all together,
until the next period begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.cgroups import ReadText, folders


@dataclass(frozen=True, slots=True)
class Cores:
    """allowed: CPUs of the affinity mask; limit: CPUs whose time is granted, None if all of it."""

    allowed: int
    limit: float | None = None

    @property
    def usable(self) -> int:
        """Threads that can all run at once. Of 1.5 granted CPUs one: two would be stopped a quarter
        of the time, both at once."""
        return max(1, self.allowed if self.limit is None else min(self.allowed, int(self.limit)))


def threads_each(cores: Cores, num_engines: int) -> int:
    """Engines on one machine share its cores, so that they do not fight for them."""
    return max(1, cores.usable // num_engines)


def cpu_limit(read: ReadText) -> float | None:
    """CPUs whose time the process's cgroups grant, the least of them; None without any limit.

    Version 1 tells them as Linux' Documentation/scheduler/sched-bwc.rst says.
    """
    grants = [
        grant
        for folder in folders(read, "cpu")
        for grant in (_grant_v2(read, folder), _grant_v1(read, folder))
        if grant is not None
    ]
    return min(grants, default=None)


def _grant_v2(read: ReadText, folder: str) -> float | None:
    quota, _, period = (read(f"{folder}/cpu.max") or "").partition(" ")
    return _share(quota, period)


def _grant_v1(read: ReadText, folder: str) -> float | None:
    quota = read(f"{folder}/cpu.cfs_quota_us") or ""
    return _share(quota, read(f"{folder}/cpu.cfs_period_us") or "") if quota else None


def _share(quota: str, period: str) -> float | None:
    """Microseconds of CPU in a period of so many; None where the quota is "max" or -1."""
    used, whole = quota.strip(), period.strip()
    return int(used) / int(whole) if used.isdigit() and whole.isdigit() and int(whole) else None
