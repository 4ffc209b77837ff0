"""A Mooncake cluster of processes for tests, in a network namespace of its own."""

from __future__ import annotations

import atexit
import functools
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.mooncake import Network, start_master

CLIENT_TTL_S = 3  # the master forgets an owner that says nothing for so long
PATIENCE_S = 30.0
LASTING_MB = 16  # the least that Mooncake takes

OWNER = """
import os, sys
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
segment, master = int(sys.argv[1]), sys.argv[2]
code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 1 << 24, "tcp", "", master)
print(code, flush=True)
sys.stdin.read()
os._exit(0)
"""


class Inside:
    """An object whose methods run in a network, whoever calls them."""

    def __init__(self, network: Network, inner: Any) -> None:
        self._network, self._inner = network, inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **named: Any) -> Any:
            with self._network.inside():
                return value(*args, **named)

        return call


class Cluster:
    """A master, and owners that give it memory. stop() ends all that was started."""

    def __init__(self, network: Network, folder: Path, *, port: int = 21051) -> None:
        self.network = network
        self.url = f"mooncake://127.0.0.1:{port}?segment_mb=0&admin_port={port + 1}"
        self._port = port
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    def master(self) -> subprocess.Popen[str]:
        with self.network.inside():
            master = start_master(self._folder, port=self._port, client_ttl_s=CLIENT_TTL_S)
        self._processes.append(master)
        return master

    def owner(self, megabytes: int = 24) -> subprocess.Popen[str]:
        with self.network.inside():
            owner = subprocess.Popen(
                [sys.executable, "-c", OWNER, str(megabytes << 20), f"127.0.0.1:{self._port}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        self._processes.append(owner)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "0\n"
        return owner

    def ask(self, path: str) -> str:
        """The master's admin port."""
        with self.network.inside():
            connection = http.client.HTTPConnection("127.0.0.1", self._port + 1, timeout=PATIENCE_S)
            connection.request("GET", path)
            answer = connection.getresponse().read().decode()
            connection.close()
        return answer

    def raw(self) -> Any:
        """A client without our tier's care."""
        with self.network.inside():
            from mooncake.store import MooncakeDistributedStore

            client = MooncakeDistributedStore()
            assert (
                client.setup(
                    "127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", f"127.0.0.1:{self._port}"
                )
                == 0
            )
        return Inside(self.network, client)

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


class Memory:
    """The memory that an owner gives to the store, as it lies there."""

    def __init__(
        self, cluster: Cluster, owner: subprocess.Popen[str], client: Any, megabytes: int
    ) -> None:
        piece, addresses = 1 << 18, []
        names = [f"probe{at}" for at in range((megabytes << 20) // piece)]
        for name in names:  # until it is full: these lie from its start to its end
            if client.put(name, b"probe" * (piece // 5)) == 0:
                found = json.loads(cluster.ask(f"/query_key?key={name}"))
                if "data" in found:  # else the master evicted it meanwhile: it is nearly full
                    addresses.append(found["data"][0]["buffer_address_"])
        client.remove_by_regex("probe.*", True)
        assert len(addresses) > len(names) // 2
        for line in Path(f"/proc/{owner.pid}/maps").read_text().splitlines():
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            assert match is not None
            start, end = (int(part, 16) for part in match.groups())
            if start <= addresses[0] < end:
                self._start = max(start, min(addresses) - piece)
                self._size = min(end, max(addresses) + 2 * piece) - self._start
        self._path = f"/proc/{owner.pid}/mem"
        self._zeroes = 0
        self._copy = memoryview(bytearray(self._size))
        self._surely = (min(addresses), max(addresses) + piece // 5 * 5)

    def read(self) -> bytes:
        """Without the zeroes around."""
        with open(self._path, "rb", 0) as memory:
            assert os.preadv(memory.fileno(), [self._copy], self._start) == self._size
        used = np.flatnonzero(np.frombuffer(self._copy, np.uint64))
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, -1)
        self._zeroes = 8 * first
        return bytes(self._copy[8 * first : 8 * last + 8])

    def write(self, at: int, data: bytes) -> None:
        """at: an offset into what was read last."""
        with open(self._path, "r+b", 0) as memory:
            memory.seek(self._start + self._zeroes + at)
            memory.write(data)

    def clear(self) -> None:
        with open(self._path, "r+b", 0) as memory:
            start, end = self._surely
            memory.seek(start)
            memory.write(bytes(end - start))


@functools.cache
def network() -> Network:
    try:
        return Network()
    except PermissionError as error:
        pytest.skip(str(error))


@functools.cache
def lasting_cluster() -> tuple[Cluster, Memory, Any]:
    """One for the whole run, with a small owner, and a client to clear it."""
    folder = tempfile.TemporaryDirectory()
    cluster = Cluster(network(), Path(folder.name), port=21061)
    atexit.register(folder.cleanup)
    atexit.register(cluster.stop)
    cluster.master()
    owner = cluster.owner(LASTING_MB)
    client = cluster.raw()
    return cluster, Memory(cluster, owner, client, LASTING_MB), client


def until(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop(process: subprocess.Popen[str]) -> None:
    """SIGSTOP, and until each of its threads has it: before, one may answer once more."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    until(lambda: all(_state(task) == "T" for task in tasks.iterdir()))


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
