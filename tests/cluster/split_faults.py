"""A split Kagari on real processes, of which a test stops, kills or disconnects engines."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import children
from gateway.cli.client import ChatReply, HttpError, StreamFailed, stream_chat
from gateway.demo.scenario import AREAS, NOUNS, VERBS
from gateway.demo.stack import Stack

FLAGS = (
    *("--prefill", "1", "--decode", "1", "--split", "always", "--port", "0", "--threads", "1"),
    *("--kv-device-tokens", "8192", "--kv-host-mb", "0", "--kv-disk-mb", "0"),
    *("--step-tokens", "128"),
)
PREFILL, DECODE = "n1", "n2"
PROMPT_TOKENS = 1500  # seconds of work
PATIENCE_S = 90.0
_PIDFD_GETFD = 438


def words(count: int, seed: int) -> str:
    """So many tokens, nearly."""
    return " ".join(random.Random(seed).choices((*VERBS, *NOUNS, *AREAS), k=count))


@dataclass(frozen=True, slots=True)
class Failed:
    """A clean end: an error before the first byte, or an error event."""

    why: str


End = ChatReply | Failed


def question(stack: Stack, text: str, tokens: int) -> dict[str, Any]:
    return {
        "model": stack.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def ask(stack: Stack, text: str, tokens: int, on_text: Callable[[], object] = lambda: None) -> End:
    """Raises whatever is not a clean end: a cut stream, one that stands still, a 500."""
    try:
        return stream_chat(
            stack.api, question(stack, text, tokens), {}, PATIENCE_S, on_text=on_text
        )
    except HttpError as error:
        if error.status not in (502, 503):
            raise
        return Failed(str(error))
    except StreamFailed as error:
        if "ended in an error" not in str(error):
            raise
        return Failed(str(error))


class Scene:
    """The two engines of a stack, and what was asked of it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._pool = ThreadPoolExecutor(4)
        self.pid_by_node = {
            node: children(stack.ready["pids"][node])[0] for node in (PREFILL, DECODE)
        }
        self._stopped: set[int] = set()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.all_go_on()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def ask(
        self, text: str, tokens: int, on_text: Callable[[], object] = lambda: None
    ) -> Future[End]:
        return self._pool.submit(ask, self.stack, text, tokens, on_text)

    def stop(self, node: str) -> None:
        self._stopped.add(self.pid_by_node[node])
        self._send(self.pid_by_node[node], signal.SIGSTOP)

    def all_go_on(self) -> None:
        while self._stopped:
            self._send(self._stopped.pop(), signal.SIGCONT)

    def kill(self, node: str) -> None:
        self._stopped.discard(self.pid_by_node[node])
        self._send(self.pid_by_node[node], signal.SIGKILL)

    def _send(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def report(self, node_id: str) -> dict[str, Any]:
        """What its engine last said; empty while none is there."""
        for node in self.stack.nodes():
            if node["node_id"] == node_id and node["engines"]:
                return dict(node["engines"][0]["report"] or {})
        return {}

    def wait(self, what: Callable[[], bool], why: str, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while not what():
            assert time.monotonic() < deadline, f"{why}: {self.stack.nodes()}"
            time.sleep(0.02)

    def transfers(self) -> list[int]:
        """Descriptors of the prefill engine's connections to the decode engine."""
        info = next(node for node in self.stack.nodes() if node["node_id"] == DECODE)["engines"][0]
        port = int(info["info"]["peer"].rpartition(":")[2])
        inodes = {
            fields[9]
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if (fields := line.split())[2].endswith(f":{port:04X}") and fields[3] == "01"
        }
        found = []
        for entry in Path(f"/proc/{self.pid_by_node[PREFILL]}/fd").iterdir():
            with suppress(FileNotFoundError):
                inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
                if inode is not None and inode[1] in inodes:
                    found.append(int(entry.name))
        return found

    def cut(self) -> None:
        """Both ends see the connection closed, as by a network between them."""
        cut = False
        pidfd = os.pidfd_open(self.pid_by_node[PREFILL])
        try:
            for descriptor in self.transfers():
                taken = ctypes.CDLL(None, use_errno=True).syscall(
                    _PIDFD_GETFD, pidfd, descriptor, 0
                )
                assert taken >= 0, f"pidfd_getfd: {os.strerror(ctypes.get_errno())}"
                with socket.socket(fileno=taken) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                    cut = True
        finally:
            os.close(pidfd)
        assert cut, "there is no connection to cut"
