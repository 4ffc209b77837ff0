"""An engine process of its own, spoken to as its agent would, one stream at a time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from engine.framing import AGENT_CHANNEL, FrameReader, frame
from policies.contract import wire

ROOT = Path(__file__).resolve().parents[2]
_CHANNEL = 1
_START_S = 120.0
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class Answer:
    """ttft_s: from the submit to the first token's frame."""

    tokens: list[int]
    ttft_s: float
    started: wire.Started
    end: wire.Finished | wire.Failed

    @property
    def usage(self) -> wire.Usage:
        return self.end.usage


class OneEngine:
    """`python -m engine serve` of a catalogue's spec (JSON as a dict) with more flags."""

    def __init__(self, spec: dict[str, object], *flags: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_START_S)
        command = [sys.executable, "-m", "engine", "serve", "--fd", str(theirs.fileno())]
        command += ["--model-spec", json.dumps(spec), "--engine-index", "0", *flags]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        self._reader = FrameReader()
        self._pending: list[tuple[int, object]] = []
        self._lane = 0
        self.report: wire.EngineReport | None = None
        self.events: list[wire.PageEvent] = []
        self.info = self.wait(lambda m: m.info if isinstance(m, wire.EngineUp) else None)

    def send(self, message: wire.AgentToEngine, channel: int = _CHANNEL) -> None:
        self._socket.sendall(frame(channel, wire.encode(message)))

    def next(self, timeout_s: float) -> tuple[int, object]:
        """Raises TimeoutError, or EOFError with the engine's last words when it is gone."""
        self._socket.settimeout(timeout_s)
        while not self._pending:
            data = self._socket.recv(1 << 20)
            if not data:
                assert self.process.stderr is not None
                raise EOFError(self.process.stderr.read().decode())
            for channel, message in self._reader.feed(data):
                decode = wire.decode_from_node if channel else wire.decode_from_engine
                self._pending.append((channel, decode(message)))
        channel, found = self._pending.pop(0)
        if channel == AGENT_CHANNEL and isinstance(found, wire.EngineNews):
            self.report = found.report
            self.events += found.events
        return channel, found

    def wait(
        self, pick: Callable[[object], Message | None], timeout_s: float = _START_S
    ) -> Message:
        """The first thing that pick finds in a message; raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            found = pick(self.next(left)[1])
            if found is not None:
                return found
        raise TimeoutError("messages come, but not what is waited for")

    def start(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int = 8,
        salt: bytes = bytes(32),
        **fields: object,
    ) -> int:
        """Submit greedily; returns the lane."""
        self._lane += 1
        submit = wire.Submit(
            request_id=f"r{self._lane}",
            attempt=0,
            engine=0,
            lanes=(self._lane,),
            prompt=wire.pack_ids(array("I", prompt)),
            salt=salt,
            sampling=wire.Sampling(max_tokens, temperature=0.0),
            deadline_s=600.0,
        )
        self.send(msgspec.structs.replace(submit, **fields))  # type: ignore[arg-type]
        return self._lane

    def finish(self, lane: int, started_at: float) -> Answer:
        """Read on until this lane's end; what others get meanwhile is lost."""
        tokens: list[int] = []
        first_at = 0.0
        started = wire.Started(lane, 0)
        while True:
            channel, message = self.next(_START_S)
            if channel != _CHANNEL or not isinstance(message, wire.Step):
                continue
            mine = [
                token for at, token in zip(message.lanes, message.tokens, strict=True) if at == lane
            ]
            if mine and not tokens:
                first_at = time.monotonic()
            tokens += mine
            for rare in message.rare:
                if rare.lane != lane:
                    continue
                if isinstance(rare, wire.Started):
                    started = rare
                elif isinstance(rare, wire.Finished | wire.Failed):
                    return Answer(tokens, first_at - started_at, started, rare)

    def ask(self, prompt: Iterable[int], **fields: object) -> Answer:
        started_at = time.monotonic()
        return self.finish(self.start(prompt, **fields), started_at)  # type: ignore[arg-type]

    def tiers(
        self, until: Callable[[dict[str, wire.TierReport]], bool]
    ) -> dict[str, wire.TierReport]:
        """The first report whose tiers are so."""

        def pick(message: object) -> dict[str, wire.TierReport] | None:
            if not isinstance(message, wire.EngineNews):
                return None
            found = {report.tier: report for report in message.report.tiers}
            return found if until(found) else None

        return self.wait(pick, 30.0)

    def kill(self) -> None:
        """As a machine that loses power would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> str:
        """The agent goes; returns what the engine said."""
        self._socket.close()
        try:
            self.process.wait(10)
        finally:
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(5)
            assert self.process.stderr is not None
            said = self.process.stderr.read().decode()
            self.process.stderr.close()
        return said

    def __enter__(self) -> OneEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.stderr is not None and not self.process.stderr.closed:
            self.close()
