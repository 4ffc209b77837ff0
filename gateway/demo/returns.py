"""Act 4: one conversation comes back, and its pages come from ever further away.

cold      nothing of it is known
device    it comes again at once
host      another conversation took the pool meanwhile
disk      its node was killed (-9) in the middle of a stream, and started again
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.cli.client import ChatReply, HttpError, StreamFailed, stream_chat
from gateway.demo.acts import Killed, Return
from gateway.demo.scenario import Conversation, Message
from gateway.demo.stack import Stack, StackFailed
from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.requests import RequestLine, requests

# A conversation has 58 pages: the pool holds one, memory and disk hold two and more.
POOL_TOKENS = 66 * 64
FLAGS = (
    *("--kv-device-tokens", str(POOL_TOKENS)),
    *("--kv-host-mb", "256"),
    *("--kv-disk-mb", "256"),
)
LONG_ANSWER_TOKENS = 200  # of the stream that the kill breaks
ON_DISK_S = 20.0
BACK_S = 120.0
BROKEN_S = 30.0
SETTLED_S = 5.0


@dataclass(slots=True)
class _Stream:
    """A stream in a thread of its own, until it ends or breaks."""

    begun: threading.Event
    error: str = ""
    reply: ChatReply | None = None


def play_returns(stack: Stack, tell: Callable[[Return], None]) -> tuple[list[Return], Killed]:
    """All four returns of agent 0's conversation, told one by one. Raises StackFailed."""
    session = Conversation(0)
    messages = list(session.ask(1))
    returns: list[Return] = []

    def come_back(tier: str) -> None:
        reply = _ask(stack, messages)
        line = _settled(stack, lambda line: line.request_id == reply.request_id)
        returns.append(Return(tier, reply, line.tiers))
        tell(returns[-1])

    come_back("cold")
    come_back("device")
    _ask(stack, stranger())
    come_back("host")
    _wait_on_disk(stack, returns[-1].reply.cached_tokens)
    killed = _kill_mid_stream(stack, messages)
    come_back("disk")
    return returns, killed


def stranger() -> list[Message]:
    """Another conversation of the same length that shares nothing with the first."""
    return [
        {**message, "content": " ".join(reversed(message["content"].split(" ")))}
        for message in Conversation(1).ask(1)
    ]


def _ask(stack: Stack, messages: list[Message]) -> ChatReply:
    try:
        return stream_chat(stack.api, _body(stack, messages, 8), HEADERS)
    except (StreamFailed, HttpError, OSError) as error:
        raise StackFailed(f"{error}\n    {stack.warnings()}") from error


HEADERS = {"x-session-affinity": "demo-returns"}


def _body(stack: Stack, messages: list[Message], max_tokens: int) -> dict[str, Any]:
    return {
        "model": stack.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
    }


def _wait_on_disk(stack: Stack, tokens: int) -> None:
    """Pages are written behind the answers: wait until so many tokens' are there."""
    deadline = time.monotonic() + ON_DISK_S
    while True:
        (node,) = stack.nodes()
        (engine,) = node["engines"]
        used = {tier["tier"]: tier["pages_used"] for tier in engine["report"]["tiers"]}
        pages = used.get("disk", 0)
        if pages * engine["info"]["page_size"] >= tokens:
            return
        if time.monotonic() > deadline:
            raise StackFailed(f"{pages} pages on disk after {ON_DISK_S:.0f} s; {stack.warnings()}")
        time.sleep(0.2)


def _kill_mid_stream(stack: Stack, messages: list[Message]) -> Killed:
    """Kill the node once an answer has begun; returns when the node serves again."""
    (node,) = stack.nodes()
    stream = _Stream(threading.Event())

    def read() -> None:
        body = _body(stack, [*messages, {"role": "user", "content": "Go on."}], LONG_ANSWER_TOKENS)
        try:
            stream.reply = stream_chat(stack.api, body, HEADERS, on_text=stream.begun.set)
        except (StreamFailed, HttpError, OSError) as error:
            stream.error = str(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    if not stream.begun.wait(BROKEN_S):
        raise StackFailed(f"no text of an answer in {BROKEN_S:.0f} s; {stack.warnings()}")
    os.kill(stack.ready["pids"][node["node_id"]], signal.SIGKILL)
    began = time.monotonic()
    reader.join(BROKEN_S)
    line = _settled(stack, lambda line: line.status == "failed" or line.completion_tokens > 100)
    _wait_back(stack, node["epoch"])
    return Killed(
        error=stream.error,
        status=line.status,
        charge_nano_usd=line.charge_nano_usd,
        back_s=time.monotonic() - began,
    )


def _wait_back(stack: Stack, old_epoch: int) -> None:
    deadline = time.monotonic() + BACK_S
    while True:
        (node,) = stack.nodes()
        if node["epoch"] > old_epoch and node["state"] == "ready":
            return
        if time.monotonic() > deadline:
            raise StackFailed(f"the node is not back after {BACK_S:.0f} s; {stack.warnings()}")
        time.sleep(0.2)


def _settled(stack: Stack, is_it: Callable[[RequestLine], bool]) -> RequestLine:
    """The first row of that kind that has ended."""
    ledger: Path = stack.home / LEDGER_NAME
    deadline = time.monotonic() + SETTLED_S
    while True:
        for line in requests(ledger):
            if line.status != "open" and is_it(line):
                return line
        if time.monotonic() > deadline:
            raise StackFailed(f"a row did not settle in {SETTLED_S:.0f} s")
        time.sleep(0.02)
