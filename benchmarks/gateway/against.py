"""Beside vllm-router and LiteLLM: same client, same bodies, turn by turn in one run.

Peers stand before a server that answers at once, as the gateway stands before nodes that do. The
gateway and they share a core, turn by turn; client, nodes and server have the other one. Where that
other core is full, or the one that is measured is not, requests are counted per second of CPU of
the process under test, on all sides; the row's unit says which.

The musts hold against vllm-router at its default policy, which routes by prefix as we do. Under
round robin it looks at no prompt; LiteLLM does its whole pipeline. Both are published beside it.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.children import cpu_s
from benchmarks.gateway.bodies import body, conversation
from benchmarks.gateway.http_load import Answer, Load, post
from benchmarks.gateway.peers import NotUp, litellm, upstream, vllm_router
from benchmarks.gateway.processes import KEY, gateway, nodes
from benchmarks.gateway.rows import Bench, Pair, percentile
from benchmarks.gateway.scripted_nodes import MODEL
from benchmarks.gateway.scripted_upstream import Sent
from benchmarks.gateway.whole import read_log
from benchmarks.peers.catalogue import Absent, Present, find

AT_A_TIME = 16
FULL = 0.9  # of a core: what bounds the rate
CASES = (  # name, characters, messages; (must, good) warm, and with one new message each
    ("1kb", 1_000, 2, (0.18, 0.38), (0.13, 0.22)),
    ("8kb", 8_000, 8, (0.18, 0.33), (0.11, 0.16)),
    ("120kb", 120_000, 32, (0.15, 0.35), (0.10, 0.16)),
)
STREAM_CASES = ((8, 25), (64, 200))  # streams, tokens/s of each
LITELLM_TOKENS_PER_S = 500  # it passes 600 to 1,500 on a core: more would measure its queue
OURS, ROUTER, ROUND_ROBIN, LITELLM = "ours", "vllm-router", "vllm-router round robin", "LiteLLM"
NEW = "########"  # a number's place


def requests(chars: int, messages: int, *, fresh: bool) -> Iterator[bytes]:
    """For ever; fresh: the last message of each is new, by its first word."""
    turns = conversation(messages, chars // messages)
    turns[-1]["content"] = NEW + turns[-1]["content"]
    encoded = json.dumps({"model": MODEL, "messages": turns, "max_tokens": 40}).encode()
    before, _, after = post(encoded, KEY).partition(NEW.encode())
    for number in itertools.count():
        yield b"%b%08d%b" % (before, number if fresh else 0, after)


@dataclass
class Side:
    """One of those under test: its client, and what it did so far in this case."""

    name: str
    pid: int
    load: Load
    helpers: tuple[int, ...]  # processes on the other core, beside our own
    idle: list[socket.socket | None] = field(default_factory=lambda: [None] * AT_A_TIME)
    answered: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    other_cpu_s: float = 0.0
    took_ms: list[float] = field(default_factory=list)

    def forget(self) -> None:
        self.answered, self.wall_s, self.cpu_s, self.other_cpu_s = 0, 0.0, 0.0, 0.0
        self.took_ms.clear()

    def run(self, bodies: Iterator[bytes], seconds: float) -> None:
        """AT_A_TIME requests at a time for so long; ends with none under way."""
        before = (time.monotonic(), cpu_s(self.pid), self._other_cpu_s())
        end = before[0] + seconds
        connections, self.idle = self.idle, []

        def again(answer: Answer) -> None:
            self.answered += 1
            assert answer.done_at is not None
            self.took_ms.append((answer.done_at - answer.sent_at) * 1e3)
            if time.monotonic() < end:
                self.load.send(next(bodies), answer.socket)
            else:
                self.idle.append(answer.socket)

        for connection in connections:
            self.load.send(next(bodies), connection)
        self.load.run(lambda: len(self.idle) == AT_A_TIME, again)
        self.wall_s += time.monotonic() - before[0]
        self.cpu_s += cpu_s(self.pid) - before[1]
        self.other_cpu_s += self._other_cpu_s() - before[2]

    def one_at_a_time(self, bodies: Iterator[bytes], seconds: float) -> None:
        """The time of each request when there is no other."""
        connection: socket.socket | None = None
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer = self.load.send(next(bodies), connection)
            self.load.until_done(answer)
            assert answer.done_at is not None
            self.took_ms.append((answer.done_at - answer.sent_at) * 1e3)
            connection = answer.socket
        self.load.close(answer)

    def _other_cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in (os.getpid(), *self.helpers))

    @property
    def is_bound_by_itself(self) -> bool:
        return self.cpu_s / self.wall_s >= FULL and self.other_cpu_s / self.wall_s < FULL

    def __str__(self) -> str:
        return (
            f"{self.name} {self.answered / self.wall_s:.0f}/s,"
            f" {self.cpu_s / self.answered * 1e6:.0f} µs each, its core"
            f" {self.cpu_s / self.wall_s:.2f}, the other {self.other_cpu_s / self.wall_s:.2f}"
        )


# --- who is there ---------------------------------------------------------------------------------

ROUTER_POLICY = {ROUTER: "cache_aware", ROUND_ROBIN: "round_robin"}


def _open(bench: Bench, stack: ExitStack, name: str, tick_s: float) -> tuple[Side, Path] | None:
    """One of them with its nodes or its upstream, whose log is whole when the stack is closed.

    None: it is not here, or does not come up; the bench says so.
    """
    if name == OURS:
        served = stack.enter_context(gateway(bench.folder))
        helper, log = stack.enter_context(nodes(bench, served.link_url, tick_s=tick_s))
        served.wait_for_model()
        pid, port, helper_pid = served.process.pid, served.port, helper.pid
    else:
        match find("litellm" if name == LITELLM else "vllm-router"):
            case Absent(_, why):
                bench.leave_out(name, why)
                return None
            case Present() as found:
                pass
        helper_pid, upstream_port, log = stack.enter_context(upstream(bench, tick_s=tick_s))
        if name == LITELLM:
            peer = litellm(bench, found, upstream_port)
        else:
            peer = vllm_router(bench, found, ROUTER_POLICY[name], upstream_port)
        try:
            pid, port = stack.enter_context(peer)
        except NotUp as error:
            bench.leave_out(name, str(error))
            return None
    load = Load("127.0.0.1", port)
    stack.callback(load.end)
    return Side(name, pid, load, (helper_pid,)), log


# --- requests -------------------------------------------------------------------------------------


def against_peers(bench: Bench) -> None:
    """JSON requests of each size, warm and with a new message each."""
    with ExitStack() as stack:
        opened = (_open(bench, stack, name, 0.0) for name in (OURS, ROUTER, ROUND_ROBIN, LITELLM))
        sides = [found[0] for found in opened if found is not None]
        for name, chars, messages, warm, fresh in CASES:
            for kind, budget in (("", warm), ("_new", fresh)):
                bodies = requests(chars, messages, fresh=kind == "_new")
                _compare(bench, f"{name}{kind}", sides, bodies, budget)
        _alone(bench, sides)


def _compare(
    bench: Bench, name: str, sides: list[Side], bodies: Iterator[bytes], budget: Pair
) -> None:
    _each(bench, sides, lambda side: side.run(bodies, 0.5))  # caches, connections
    for side in sides:
        side.forget()
    for _ in range(3 if bench.quick else 6):
        _each(bench, sides, lambda side: side.run(bodies, 0.7 if bench.quick else 2.0))
    by_name = {side.name: side for side in sides}
    if ROUTER in by_name:
        unit, rates = _rates([by_name[OURS], by_name[ROUTER]])
        detail = f"{by_name[OURS]}; {by_name[ROUTER]}"
        bench.add(
            f"rps_vs_vllm_router_{name}",
            rates[OURS] / rates[ROUTER],
            *budget,
            f"of its {unit}",
            more_is_better=True,
            detail=detail,
        )
    else:
        bench.leave_out(f"rps_vs_vllm_router_{name}", bench.absent[ROUTER])
    unit, rates = _rates(sides)
    detail = "; ".join(str(side) for side in sides)
    ours = rates.pop(OURS)
    bench.add_beside(f"requests_{name}", ours, rates, unit, more_is_better=True, detail=detail)
    _add(bench, f"cpu_{name}", {one.name: one.cpu_s / one.answered * 1e6 for one in sides}, "µs")
    for share in (0.5, 0.99):
        spans = {side.name: percentile(side.took_ms, share) for side in sides}
        _add(bench, f"latency_{name}_at_16_p{share * 100:.0f}", spans, "ms")


def _each(bench: Bench, sides: list[Side], work: Callable[[Side], None]) -> None:
    """A peer that fails on the way is left out from there on; we must not."""
    for side in list(sides):
        try:
            work(side)
        except OSError as error:
            if side.name == OURS:
                raise
            sides.remove(side)
            bench.leave_out(side.name, f"it failed under load: {error}")


def _rates(sides: list[Side]) -> tuple[str, dict[str, float]]:
    if all(side.is_bound_by_itself for side in sides):
        return "requests/s", {side.name: side.answered / side.wall_s for side in sides}
    return "requests per CPU-s", {side.name: side.answered / side.cpu_s for side in sides}


def _alone(bench: Bench, sides: list[Side]) -> None:
    bodies = requests(1_000, 2, fresh=False)
    for side in sides:
        side.forget()
    for _ in range(3):
        _each(bench, sides, lambda side: side.one_at_a_time(bodies, 0.7 if bench.quick else 2.0))
    for share in (0.5, 0.99):
        spans = {side.name: percentile(side.took_ms, share) for side in sides}
        _add(bench, f"latency_1kb_alone_p{share * 100:.0f}", spans, "ms")


def _add(bench: Bench, name: str, figures: dict[str, float], unit: str) -> None:
    peers = dict(figures)
    bench.add_beside(name, peers.pop(OURS), peers, unit)


# --- streams --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streamed:
    """What a side made of the same streams."""

    cpu_us: float  # per token
    share: float  # of the tokens that were made meanwhile
    delay_p50_ms: float
    delay_p99_ms: float


def streams_against_peers(bench: Bench) -> None:
    """Streams that step together; a token's delay runs from when it is sent to our read of it."""
    for streams, rate in STREAM_CASES:
        found: dict[str, Streamed] = {}
        for name in (OURS, ROUTER, ROUND_ROBIN, LITELLM):
            too_much = name == LITELLM and streams * rate > LITELLM_TOKENS_PER_S
            if name in bench.absent or too_much:
                continue
            try:
                measured = _streamed(bench, name, streams, rate)
            except OSError as error:
                if name == OURS:
                    raise
                bench.leave_out(name, f"it failed under {streams} streams: {error}")
            else:
                found |= {name: measured} if measured is not None else {}
        prefix = f"streams_{streams}x{rate}"
        _add(bench, f"{prefix}_cpu_per_token", {k: v.cpu_us for k, v in found.items()}, "µs")
        shares = {name: one.share for name, one in found.items()}
        ours = shares.pop(OURS)
        bench.add_beside(f"{prefix}_share", ours, shares, "of the rate", more_is_better=True)
        _add(bench, f"{prefix}_delay_p50", {k: v.delay_p50_ms for k, v in found.items()}, "ms")
        _add(bench, f"{prefix}_delay_p99", {k: v.delay_p99_ms for k, v in found.items()}, "ms")


def _streamed(bench: Bench, name: str, streams: int, rate: int) -> Streamed | None:
    """None where it does not come up."""
    seconds = 4 if bench.quick else 10
    with ExitStack() as stack:
        opened = _open(bench, stack, name, 1 / rate)
        if opened is None:
            return None
        side, log = opened
        answers: list[Answer] = []
        for number in range(streams):
            request = post(body(400, 100_000, stream=True, turn=number), KEY)
            answers.append(side.load.send(request))
            side.load.until_reads(answers[-1], 1)
        side.load.for_s(1.0)
        began, cpu = time.monotonic(), cpu_s(side.pid)
        side.load.for_s(seconds)
        ended, used = time.monotonic(), cpu_s(side.pid) - cpu
    if name == OURS:
        told = read_log(log)
        firsts = [told.submits[answer.request_id][2] for answer in answers]
        steps = told.steps[0]
    else:
        sent = msgspec.json.decode(log.read_bytes(), type=Sent)
        firsts = [sent.firsts[str(number)] for number in range(streams)]
        steps = sent.steps
    delays: list[float] = []
    tokens = 0
    for answer, first in zip(answers, firsts, strict=True):
        seen = 0
        for at, marks in answer.reads:
            if began <= at <= ended:
                delays.append((at - steps[first + seen]) * 1e3)
                tokens += marks
            seen += marks
    made = sum(1 for at in steps if began <= at <= ended) * streams
    return Streamed(
        cpu_us=used / tokens * 1e6,
        share=tokens / made,
        delay_p50_ms=percentile(delays, 0.5),
        delay_p99_ms=percentile(delays, 0.99),
    )
