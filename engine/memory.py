"""How much memory this process occupies."""

from __future__ import annotations

import resource
import sys


def rss_bytes() -> int:
    """Resident bytes now on Linux; elsewhere the most there ever were."""
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
