"""A whole Kagari on loopback as a context manager: `kagari serve --json` in a child process."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from gateway.cli.children import die_with_parent, python_module
from gateway.cli.client import Server, call
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.requests import requests

START_S = 180.0
STOP_S = 30.0


class StackFailed(Exception):
    """It did not come up, or did not end; the message holds what it said on stderr."""


class Stack:
    """Started by `with`; ended by Ctrl-C at the end of it, by force if that fails."""

    def __init__(self, home: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.home = home
        self._flags = flags
        self._environment = {**os.environ, **(environment or {})}
        self._log = home / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> Stack:
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = python_module("gateway.cli.main", "serve", "--json", "--home", str(self.home))
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*argv, *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environment,
                process_group=0,
                preexec_fn=die_with_parent(),
            )
        try:
            self.ready = json.loads(self._first_line())
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def api(self) -> Server:
        return Server(self.ready["url"].removesuffix("/v1"), self.ready["api_key"])

    @property
    def model(self) -> str:
        name: str = self.ready["models"][0]
        return name

    def nodes(self) -> list[dict[str, Any]]:
        """Every node as the operator sees it."""
        token = (self.home / "admin.token").read_text().strip()
        answer = call(Server(self.ready["admin_url"], token), "GET", "/admin/v1/nodes")
        nodes: list[dict[str, Any]] = answer["nodes"]
        return nodes

    def kagari(self, *arguments: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """Run another command on the same home."""
        return subprocess.run(
            [*python_module("gateway.cli.main", *arguments), "--home", str(self.home)],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def requests(self) -> list[dict[str, Any]]:
        """The ledger's rows, oldest first, as `kagari usage --requests --json` prints them."""
        lines = msgspec.json.encode(list(requests(self.home / LEDGER_NAME)))
        rows: list[dict[str, Any]] = msgspec.json.decode(lines)
        return rows

    def interrupt(self) -> None:
        """One Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None when it still runs after timeout_s."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> int:
        """Drain and end; the exit code. Raises StackFailed when force was needed."""
        if self.process.poll() is None:
            self.interrupt()
        code = self.wait(STOP_S)
        if code is None:
            self.kill()
            raise StackFailed(f"it ran on {STOP_S:.0f} s after Ctrl-C; {self.said()}")
        self._close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(5)
        self._close()

    def said(self) -> str:
        """The last of what it wrote on stderr."""
        return self._log.read_text(errors="replace")[-4000:]

    def warnings(self, most: int = 6) -> str:
        """The last lines of its processes' logs that are no routine, for an error message."""
        lines = [
            f"{log.stem}: {line[:600]}"
            for log in sorted((self.home / "logs").glob("*.log"))
            for line in log.read_text(errors="replace").splitlines()
            if '"level":"info"' not in line
        ]
        return "\n    ".join(lines[-most:])

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _first_line(self) -> bytes:
        """Of stdout: the ready object. Raises StackFailed after START_S or at an early end."""
        out = self.process.stdout
        assert out is not None
        deadline = time.monotonic() + START_S
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise StackFailed(f"not ready in {START_S:.0f} s; {self.said()}")
                data = os.read(out.fileno(), 65536)
                if not data:
                    raise StackFailed(f"ended before it was ready; {self.said()}")
                line += data
        return line
