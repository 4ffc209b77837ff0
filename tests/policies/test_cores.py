"""Cores and threads: what Linux says in its files, of either version, from inside and outside."""

from __future__ import annotations

import os

import pytest

from engine.cores import own_cores
from gateway.cli import serve_plan
from policies.cores import Cores, cpu_limit, threads_each

V1 = "9:name=systemd:/\n4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        pytest.param({}, None, id="no cgroups"),
        pytest.param({"/proc/self/cgroup": "0::/\n"}, None, id="v2 root has no cpu.max"),
        pytest.param(
            {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "150000 100000\n"},
            1.5,
            id="v2 in a container",
        ),
        pytest.param(
            {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"},
            None,
            id="v2 without a limit",
        ),
        pytest.param(
            {
                "/proc/self/cgroup": "0::/user.slice/app.scope\n",
                "/sys/fs/cgroup/user.slice/app.scope/cpu.max": "max 100000\n",
                "/sys/fs/cgroup/user.slice/cpu.max": "400000 100000\n",
            },
            4.0,
            id="v2, of a group above",
        ),
        pytest.param(
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/cpu.max": "50000 20000\n",
                "/sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            },
            2.5,
            id="v2, the least counts",
        ),
        pytest.param(
            {
                "/proc/self/cgroup": V1,
                "/sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "350000\n",
                "/sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            },
            3.5,
            id="v1 on the host",
        ),
        pytest.param(
            {
                "/proc/self/cgroup": V1,  # the host's path, not to be seen in the container
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.0,
            id="v1 in a container",
        ),
        pytest.param(
            {
                "/proc/self/cgroup": V1,
                "/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            None,
            id="v1 without a limit",
        ),
        pytest.param(
            {"/proc/self/cgroup": "0::/\nnonsense\n", "/sys/fs/cgroup/cpu.max": "?"},
            None,
            id="unreadable",
        ),
    ],
)
def test_the_limit_of_a_process(files: dict[str, str], limit: float | None) -> None:
    assert cpu_limit(files.get) == limit


@pytest.mark.parametrize(
    ("cores", "engines", "threads"),
    [
        (Cores(64), 1, 64),
        (Cores(64), 3, 21),
        (Cores(2), 5, 1),
        (Cores(64, 1.5), 1, 1),  # never 64, and not 2 that stop together
        (Cores(64, 0.2), 1, 1),
        (Cores(64, 8.0), 2, 4),
        (Cores(2, 8.0), 1, 2),
    ],
)
def test_engines_of_a_machine_share_its_cores(cores: Cores, engines: int, threads: int) -> None:
    assert threads_each(cores, engines) == threads


def test_gateway_and_engine_read_the_same_of_this_machine() -> None:
    assert own_cores() == serve_plan.own_cores()
    assert own_cores().allowed == len(os.sched_getaffinity(0))
    assert 1 <= own_cores().usable <= own_cores().allowed
