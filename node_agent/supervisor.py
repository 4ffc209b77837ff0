"""Keeps one engine process running: start, watch, end, start again."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import structlog
from msgspec import Struct

from engine.framing import AGENT_CHANNEL
from node_agent.engine_socket import EngineSocket
from node_agent.errors import NodeError
from node_agent.outbox import EngineOutbox
from policies.contract.wire import (
    Drain,
    EngineInfo,
    EngineNews,
    EngineUp,
    PinResult,
    PurgeResult,
    UsageRecord,
    decode_from_engine,
)

PR_SET_PDEATHSIG = 1
MAX_LOG_LINE_BYTES = 1 << 16
LAST_WORDS = 12  # log lines kept for the error message
STALL_S = 0.5  # a look that comes later than this does not count as an engine's silence
# An engine says with these codes that its flags or its checkpoint cannot work (engine/__main__.py).
HOPELESS = ("exit code 2", "exit code 4")


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """All the waits of a supervisor, in seconds."""

    up_s: float = 600.0  # from the start to EngineUp
    silent_s: float = 5.0  # without EngineNews: reported as down
    kill_s: float = 20.0  # without EngineNews: killed and started again
    stuck_s: float = 120.0  # in one step, pulse or not: killed and started again
    stop_s: float = 2.0  # from SIGTERM to SIGKILL
    backoff_s: float = 0.5  # before the first restart; doubled before each later one
    backoff_cap_s: float = 30.0
    healthy_s: float = 60.0  # after this long the backoff begins anew
    watch_s: float = 0.25


class LoadingLine(Struct):
    """What an engine says on stderr of its own start; share is 0 … 1 of the stage."""

    event: Literal["engine_loading"]
    stage: str
    share: float


class EngineListener(Protocol):
    """Who is told; all calls are synchronous and must not raise."""

    def on_loading(self, index: int, stage: str, share: float) -> None: ...
    def on_up(self, index: int, up: EngineUp) -> None: ...
    def on_news(self, index: int, news: EngineNews) -> None: ...
    def on_usage(self, index: int, record: UsageRecord) -> None: ...
    def on_result(self, index: int, result: PinResult | PurgeResult) -> None: ...
    def on_step(self, index: int, channel: int, message: bytes) -> None: ...
    def on_lost(self, index: int, reason: str) -> None: ...


decode_loading = msgspec.json.Decoder(LoadingLine).decode


class EngineSupervisor:
    """One engine of this node, whatever process it is just now.

    `info` is None while no process is loaded. `is_silent` says that a loaded engine has not spoken
    for longer than it must. `outbox` may be filled at any time while info is not None; call
    `pump` after it.
    """

    def __init__(
        self,
        index: int,
        command: tuple[str, ...],
        *,
        listener: EngineListener,
        clock: Callable[[], float],
        timing: EngineTiming | None = None,
        max_failed_starts: int = 3,
    ) -> None:
        self.index = index
        self.outbox = EngineOutbox()
        self.info: EngineInfo | None = None
        self.is_silent = False
        self.pid: int | None = None
        self.restarts = 0
        self.unknown_frames = 0
        self._command = command
        self._listener = listener
        self._clock = clock
        self._timing = timing or EngineTiming()
        self._max_failed_starts = max_failed_starts
        self._socket: EngineSocket | None = None
        self._heard_at = 0.0
        self._step_age_s = 0.0  # when last heard of
        self._was_up = False  # in any life
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self._log = structlog.get_logger().bind(engine=index)

    @property
    def silence_s(self) -> float:
        """Seconds since the loaded engine last spoke."""
        return self._clock() - self._heard_at

    def pump(self) -> None:
        if self._socket is not None:
            self._socket.pump()

    def kill(self) -> None:
        """End the process at once; `run` would start another."""
        if self.pid is not None:
            _signal_group(self.pid, signal.SIGKILL)

    def drain(self) -> None:
        """Nothing more will come: the engine may begin to put its pages where they outlive it."""
        if self.info is not None and self.outbox.order(Drain(True)):
            self.pump()

    async def run(self) -> None:
        """Until cancelled; then the process is ended first. Raises NodeError when the engine
        never comes up."""
        backoff_s, failed_starts = self._timing.backoff_s, 0
        while True:
            begun = self._clock()
            reason = await self._one_life()
            lived_s = self._clock() - begun
            self._log.warning("engine_ended", reason=reason, lived_s=round(lived_s, 3))
            if not self._was_up:
                failed_starts += 1
                if failed_starts >= self._max_failed_starts or reason in HOPELESS:
                    raise NodeError(
                        f"engine {self.index}",
                        found=f"no start ({reason}): " + " | ".join(self._last_words),
                        allowed="an engine that loads its model and reports",
                        remedy="mend what its last lines say",
                    )
            if lived_s >= self._timing.healthy_s:
                backoff_s = self._timing.backoff_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, self._timing.backoff_cap_s)
            self.restarts += 1

    async def _one_life(self) -> str:
        """One process from start to end; returns why it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--fd",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
            except OSError as error:
                ours.close()
                return f"not started: {error}"
        self.pid = process.pid
        self._last_words.clear()
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [
            asyncio.create_task(self._copy_log(process.stdout, "stdout")),
            asyncio.create_task(self._copy_log(process.stderr, "stderr")),
        ]
        reason = "stopped"
        try:
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            _, engine_socket = await loop.create_connection(
                lambda: EngineSocket(self.outbox, self._on_frame), sock=ours
            )
            self._socket = engine_socket
            reason = await self._watch(process, engine_socket)
        finally:
            self._forget(reason)
            await self._end_process(process, asked=reason == "stopped")
            # A grandchild may hold the pipes open: the logs get a moment, not more.
            await asyncio.wait(pumps, timeout=0.5)
            for pump in pumps:
                pump.cancel()
        if process.returncode is not None and reason.startswith("socket closed"):
            return _how_it_ended(process.returncode)
        return reason

    async def _watch(self, process: asyncio.subprocess.Process, engine_socket: EngineSocket) -> str:
        """Waits for the end of the process or of our patience."""
        timing, begun = self._timing, self._clock()
        looked_at = begun
        ended: asyncio.Future[object] = asyncio.ensure_future(process.wait())
        closed: asyncio.Future[object] = asyncio.ensure_future(_result(engine_socket.closed))
        try:
            while True:
                await asyncio.wait(
                    {closed, ended},
                    timeout=timing.watch_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if engine_socket.closed.done():
                    return engine_socket.closed.result()
                if ended.done():
                    return "socket closed: the process ended"
                stalled_s = self._clock() - looked_at - timing.watch_s
                looked_at = self._clock()
                if stalled_s > STALL_S:  # we were stopped, not the engine: its news wait unread
                    self._heard_at += stalled_s
                if self.info is None:
                    if self._clock() - begun > timing.up_s:
                        return f"not up within {timing.up_s:.0f} s"
                    continue
                silence_s = self.silence_s
                if silence_s > timing.kill_s:
                    return f"silent for {silence_s:.0f} s"
                if self._step_age_s > timing.stuck_s:
                    return f"in one step for {self._step_age_s:.0f} s"
                if (silence_s > timing.silent_s) != self.is_silent:
                    self.is_silent = not self.is_silent
                    self._log.warning("engine_silent", is_silent=self.is_silent)
        finally:
            ended.cancel()
            closed.cancel()

    def _forget(self, reason: str) -> None:
        """The process is lost to us: say so at once, before it is reaped."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.outbox.clear()
        self.info = None
        self.is_silent = False
        self._listener.on_lost(self.index, reason)

    async def _end_process(self, process: asyncio.subprocess.Process, *, asked: bool) -> None:
        """SIGTERM and patience when asked to stop, else SIGKILL, to the whole group."""
        if asked and process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._timing.stop_s)
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        self.pid = None

    def _on_frame(self, channel: int, message: bytes) -> None:
        if channel != AGENT_CHANNEL:
            self._listener.on_step(self.index, channel, message)
            return
        try:
            decoded = decode_from_engine(message)
        except msgspec.MsgspecError as error:
            self.unknown_frames += 1
            self._log.warning("unknown_engine_frame", error=str(error))
            return
        match decoded:
            case UsageRecord():
                self._listener.on_usage(self.index, decoded)
            case PinResult() | PurgeResult():
                self._listener.on_result(self.index, decoded)
            case EngineNews():
                self._heard_at = self._clock()
                self._step_age_s = decoded.report.step_age_s
                self._listener.on_news(self.index, decoded)
            case EngineUp():
                self._heard_at = self._clock()
                self._was_up = True
                self._step_age_s = 0.0
                self.info = decoded.info
                self._listener.on_up(self.index, decoded)

    async def _copy_log(self, stream: asyncio.StreamReader, name: str) -> None:
        """An engine's lines become log lines of ours; over-long ones are cut."""
        torn = b""
        while data := await stream.read(MAX_LOG_LINE_BYTES):
            *lines, torn = (torn + data).split(b"\n")
            if len(torn) >= MAX_LOG_LINE_BYTES:
                lines.append(torn)
                torn = b""
            for line in lines:
                self._log_line(line, name)
        if torn:
            self._log_line(torn, name)

    def _log_line(self, line: bytes, name: str) -> None:
        text = line.decode(errors="replace").rstrip()
        loading = _loading(line)
        if loading is not None:
            self._listener.on_loading(self.index, loading.stage, loading.share)
        elif text:
            self._last_words.append(text)
            self._log.info("engine_said", stream=name, line=text)


def _loading(line: bytes) -> LoadingLine | None:
    try:
        return decode_loading(line)
    except msgspec.MsgspecError:
        return None  # any other line is for the log


def engine_command(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """`python -m engine serve …`, as safe from a folder named `engine` as this process is."""
    safe = ("-P",) if sys.flags.safe_path else ()
    return (sys.executable, *safe, "-m", "engine", "serve", *arguments)


def die_with_parent() -> Callable[[], None] | None:
    """For preexec_fn: the kernel kills the child when this process is gone, whatever it does.

    The socket's end of file is the first means; this holds for an engine that cannot read it.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    parent = os.getpid()

    def tether() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return tether


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


async def _result(future: asyncio.Future[str]) -> object:
    return await asyncio.shield(future)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
