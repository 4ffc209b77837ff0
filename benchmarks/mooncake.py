"""A Mooncake master of one's own, in a network namespace with nothing but loopback.

Mooncake listens on every address and asks nobody who they are, so it is started nowhere else.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x41
_START_S = 60.0
_CLIENT_TTL_S = 10
_TOLD_CHARS = 2000  # of its log, where it does not serve


class Network:
    """A network namespace; a thread is in it or not. Raises PermissionError for all but root."""

    def __init__(self) -> None:
        made: list[int] = []

        def make() -> None:  # on a thread that ends with it
            if _libc().unshare(_CLONE_NEWNET):
                return
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                up = struct.pack("16sh", b"lo", _IFF_UP_RUNNING)
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, up)
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if not made:
            raise PermissionError(
                "Mooncake has no authentication: only root can give it a network of its own"
            )
        self._fd = made[0]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Threads and processes begun within are in it for good."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        assert _libc().setns(self._fd, 0) == 0
        try:
            yield
        finally:
            assert _libc().setns(home, 0) == 0
            os.close(home)


def start_master(folder: Path, *, port: int, client_ttl_s: int) -> subprocess.Popen[str]:
    """On port, its admin port on the next; returns once both are open. Its log goes to folder.

    port: below 32768 and not 12300 to 17000, or one day an outgoing connection of the network, or a
    Mooncake client, has it already, and the master ends.
    """
    with (folder / "master.log").open("w") as log:
        master = subprocess.Popen(
            [
                Path(sys.executable).with_name("mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={port + 1}",
                f"--client_ttl={client_ttl_s}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            cwd=folder,
        )
    deadline = time.monotonic() + _START_S
    while not (_is_open(port) and _is_open(port + 1)):
        is_over = master.poll() is not None
        if is_over or time.monotonic() > deadline:
            master.kill()
            master.wait()
            how = (
                f"ended with {master.returncode}" if is_over else f"has no port after {_START_S} s"
            )
            told = (folder / "master.log").read_text(errors="replace")[-_TOLD_CHARS:]
            raise RuntimeError(f"mooncake_master {how}; its log ends:\n{told}")
        time.sleep(0.01)
    return master


@contextmanager
def own_store(*, port: int, segment_mb: int) -> Iterator[str]:
    """The URL of a store that is there for the time, to engines begun within; their caller is in
    its network. Raises what Network and start_master raise."""
    with tempfile.TemporaryDirectory() as folder, Network().inside():
        master = start_master(Path(folder), port=port, client_ttl_s=_CLIENT_TTL_S)
        try:
            yield f"mooncake://127.0.0.1:{port}?segment_mb={segment_mb}&admin_port={port + 1}"
        finally:
            master.kill()
            master.wait()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
