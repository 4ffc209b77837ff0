"""The cores that this process may use, read from Linux."""

from __future__ import annotations

import os
from pathlib import Path

from policies.cores import Cores, cpu_limit


def own_cores() -> Cores:
    """By the affinity mask and the cgroups' quotas."""
    return Cores(len(os.sched_getaffinity(0)), cpu_limit(read_text))


def read_text(path: str) -> str | None:
    """What policies/cgroups.py reads with."""
    try:
        return Path(path).read_text()
    except OSError:
        return None
