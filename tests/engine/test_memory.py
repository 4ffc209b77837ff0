"""What memory is left: Linux's own word and the cgroups', of either version."""

import pytest

from engine.memory import available_bytes, rss_bytes

SYSTEM = {"/proc/meminfo": "MemTotal:  900 kB\nMemAvailable:     500 kB\nBuffers: 7 kB\n"}
V1 = "4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="nothing is told"),
        pytest.param(SYSTEM, 512_000, id="no cgroups"),
        pytest.param(
            {
                **SYSTEM,
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "max\n",
                "/sys/fs/cgroup/memory.current": "77\n",
            },
            512_000,
            id="v2 without a limit",
        ),
        pytest.param(
            {
                **SYSTEM,
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "300000\n",
                "/sys/fs/cgroup/memory.current": "200000\n",
                "/sys/fs/cgroup/memory.stat": "anon 9\ninactive_file 3000\nactive_file 400\n",
            },
            103_400,
            id="v2, where cached files make room",
        ),
        pytest.param(
            {
                **SYSTEM,
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/memory.max": "900000\n",
                "/sys/fs/cgroup/a/b/memory.current": "10\n",
                "/sys/fs/cgroup/a/memory.max": "400000\n",
                "/sys/fs/cgroup/a/memory.current": "390000\n",
            },
            10_000,
            id="v2, of a group above",
        ),
        pytest.param(
            {
                **SYSTEM,
                "/proc/self/cgroup": V1,
                "/sys/fs/cgroup/memory/box/memory.limit_in_bytes": "250000\n",
                "/sys/fs/cgroup/memory/box/memory.usage_in_bytes": "100000\n",
                "/sys/fs/cgroup/memory/box/memory.stat": "cache 9\ntotal_inactive_file 50\n",
            },
            150_050,
            id="v1",
        ),
        pytest.param(
            {
                **SYSTEM,
                "/proc/self/cgroup": V1,
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "100000\n",
            },
            512_000,
            id="v1 without a limit",
        ),
        pytest.param(
            {
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "1000\n",
                "/sys/fs/cgroup/memory.current": "2000\n",
            },
            0,
            id="more is used than allowed",
        ),
        pytest.param({"/proc/meminfo": "MemAvailable:\n\nMemAvailable: x kB\n"}, None, id="odd"),
    ],
)
def test_available_is_the_least_of_all(files: dict[str, str], expected: int | None) -> None:
    assert available_bytes(files.get) == expected


def test_this_machine_tells() -> None:
    room = available_bytes()
    assert room is not None
    assert room > 0
    assert rss_bytes() > 1 << 20
