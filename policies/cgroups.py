"""Where the control groups of a process are told by Linux, of either version."""

from __future__ import annotations

from collections.abc import Callable, Iterator

ReadText = Callable[[str], str | None]  # a file's text by its path, None where it cannot be read
CGROUPS = "/sys/fs/cgroup"


def folders(read: ReadText, controller: str) -> Iterator[str]:
    """Folders that may tell a controller's limits, the process's own group before those above.

    Of both versions (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1). In a container
    a path may be the host's, which does not exist there; the container's group is then the root.
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts = [CGROUPS]
        elif controller in controllers.split(","):
            mounts = [f"{CGROUPS}/{controllers}", f"{CGROUPS}/{controller}"]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield "/".join([mount, *parts[:depth]])
