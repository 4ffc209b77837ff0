"""The engine as a process: a socketpair to its node agent, a reader thread, and the loop.

The agent is the only peer. When it is gone (end of file) there is nobody to compute for. Where no
tier outlives the process there is nothing to save either: the reader thread ends it at once, in the
middle of a step too, and SIGTERM keeps its default action. Where one does, the loop has LEAVE_S to
put into it what it lacks, and to leave what it shares with other engines.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from engine.engine import Engine, Frame
from engine.framing import FrameError, FrameReader, frame
from policies.contract import wire

NEWS_EVERY_S = 1.0
EXIT_AGENT_GONE = 0
EXIT_ENGINE_ERROR = 1
EXIT_BAD_FRAMES = 3

_INBOX_MESSAGES = 4096
_STALLED_WAIT_S = 0.005  # there is work, but nothing of it can run now
LEAVE_S = 1.0  # for copies into a lasting tier, once the agent is gone or SIGTERM came
_LEAVE_AT_MOST_S = 1.8  # then the process ends, whatever hangs: its agent waits 2 s
_SEND_TIMEOUT_S = 10.0  # an agent that reads nothing for so long is as good as gone
_SEND_BUFFER_BYTES = 4 << 20
_RECEIVE_BYTES = 1 << 18

Message = tuple[int, wire.AgentToEngine]


class Connection:
    """Frames to and from the agent. Both directions are bounded: a full inbox stops the reading,
    a full socket buffer stops the engine until the agent reads on."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        send_timeout_s: float = _SEND_TIMEOUT_S,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._socket = sock
        self._exit = exit_process
        self._inbox: queue.Queue[Message | None] = queue.Queue(_INBOX_MESSAGES)  # None: wake up
        self._leaves_slowly = False
        self.is_leaving = False  # the loop is to end
        self._sending = threading.Lock()
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # Not settimeout(): that would cut the reader's waiting short as well.
        timeout = struct.pack("ll", int(send_timeout_s), int(send_timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._reader = threading.Thread(target=self._read, name="agent-reader", daemon=True)
        self._reader.start()

    def send(self, frames: Iterable[Frame]) -> None:
        """Raises OSError when the agent is gone, or has not read for send_timeout_s."""
        data = b"".join([frame(channel, message) for channel, message in frames])
        if data:
            with self._sending:
                self._socket.sendall(data)

    def receive(self, timeout_s: float) -> list[Message]:
        """All messages that have come; waits up to timeout_s for the first, or for a wake-up."""
        messages: list[Message] = []
        try:
            message = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else None
            while True:
                if message is not None:
                    messages.append(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return messages

    def wake(self) -> None:
        """End the loop's wait; from any thread, and soon forgotten if the loop is busy."""
        with suppress(queue.Full):
            self._inbox.put_nowait(None)

    def leave_slowly(self) -> None:
        """From now on the agent's end, or SIGTERM, lets the loop end by itself, within bounds."""
        self._leaves_slowly = True
        signal.signal(signal.SIGTERM, lambda number, frame: self._leave(128 + number))

    def _leave(self, code: int) -> None:
        if not self._leaves_slowly:
            self._exit(code)
            return
        if not self.is_leaving:
            self.is_leaving = True
            last = threading.Timer(_LEAVE_AT_MOST_S, self._exit, (code,))
            last.daemon = True
            last.start()
        self.wake()

    def _read(self) -> None:
        reader = FrameReader()
        code = EXIT_AGENT_GONE
        try:
            while data := self._socket.recv(_RECEIVE_BYTES):
                for channel, message in reader.feed(data):
                    try:
                        decoded = wire.decode_from_agent(message)
                    except msgspec.MsgspecError as error:
                        # A newer agent may say what we do not know; the socket stays good.
                        _log("message_skipped", channel=channel, error=str(error))
                    else:
                        self._inbox.put((channel, decoded))
        except FrameError as error:
            _log("bad_frame", error=str(error))
            code = EXIT_BAD_FRAMES
        except OSError as error:
            _log("agent_lost", error=str(error))
        self._leave(code)


def run(engine: Engine, connection: Connection, clock: Callable[[], float] = time.monotonic) -> int:
    """Serve until the agent is gone or the runner breaks; returns the process's exit code."""
    told = Told(clock())
    over = threading.Event()
    pulse = threading.Thread(
        target=_pulse, args=(engine, connection, clock, told, over), name="pulse", daemon=True
    )
    pulse.start()
    try:
        return _run(engine, connection, clock, told)
    except OSError as error:
        _log("agent_lost", error=str(error))
        return EXIT_AGENT_GONE
    finally:
        engine.close(LEAVE_S)
        over.set()
        pulse.join(_SEND_TIMEOUT_S)


@dataclass(slots=True)
class Told:
    """When the agent last heard of the engine's load."""

    at: float


def _pulse(
    engine: Engine,
    connection: Connection,
    clock: Callable[[], float],
    told: Told,
    over: threading.Event,
) -> None:
    """A step longer than the news interval is not silence: say how long it has run."""
    while not over.wait(NEWS_EVERY_S):
        if clock() - told.at > 1.5 * NEWS_EVERY_S:
            try:
                connection.send(engine.pulse())
            except OSError:
                return  # the loop meets the same end and says so


def _run(engine: Engine, connection: Connection, clock: Callable[[], float], told: Told) -> int:
    connection.send([engine.news()])  # before the first step, which may be a long one
    news_at = clock() + NEWS_EVERY_S
    while True:
        if engine.advanced and engine.has_work:
            wait_s = 0.0
        elif engine.has_work:
            wait_s = _STALLED_WAIT_S
        else:
            wait_s = max(0.0, news_at - clock())
        messages = connection.receive(wait_s)
        if connection.is_leaving:
            return EXIT_AGENT_GONE
        try:
            for channel, message in messages:
                engine.handle(channel, message)
            frames = engine.step()
        except Exception as error:
            traceback.print_exc()
            _log("engine_error", error=f"{type(error).__name__}: {error}")
            connection.send(
                engine.fail(
                    "engine_error",
                    f"engine: found {type(error).__name__} in a step, allowed none; it restarts, "
                    "send the request again",
                )
            )
            return EXIT_ENGINE_ERROR
        # Residency is news for routing: told each second, and as soon as the work is done.
        fresh = not engine.has_work and bool(engine.scheduler.page_events)
        if fresh or clock() >= news_at:
            frames.append(engine.news())
            told.at = clock()
            news_at = told.at + NEWS_EVERY_S
        connection.send(frames)


def _log(event: str, **fields: object) -> None:
    line = msgspec.json.encode({"event": f"engine_{event.removeprefix('engine_')}", **fields})
    sys.stderr.write(line.decode() + "\n")
    sys.stderr.flush()
