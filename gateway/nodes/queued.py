"""Flows that were placed and are not sent yet: each waits in the queue of the engine that computes
its prompt, counted in that engine's backlog, and its Submits go out when its turn comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from policies.queue import Entry

if TYPE_CHECKING:
    from gateway.nodes.engines import Engine
    from gateway.nodes.legs import Leg
    from gateway.nodes.node import Node
    from gateway.nodes.pairs import Seat
    from gateway.nodes.streams import Flow

# full: no node had room; ttft: its first token would have come too late, by the estimate when it
# came or while it was queued; deadline: the request's own passed in the queue
Shed = Literal["full", "ttft", "ttft_queued", "deadline"]


@dataclass(frozen=True, slots=True)
class Queued:
    """Where a flow goes once it is its turn. fetch_s: of what slower tiers hold of its prompt."""

    flow: Flow
    seat: Seat
    prefill: Seat | None
    fetch_s: float
    since: float  # on the fleet's clock

    @property
    def computing(self) -> Seat:
        return self.prefill or self.seat

    @property
    def counted(self) -> Flow | Leg:
        """Who has the credit for its prompt."""
        if self.prefill is None:
            return self.flow
        assert self.flow.leg is not None  # it came with the place
        return self.flow.leg

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.seat.node,) if self.prefill is None else (self.seat.node, self.prefill.node)

    def can_be_sent(self) -> bool:
        """Its nodes hear us now; else it waits, or is moved by who saw that they do not."""
        return all(
            [
                node.session is not None and not node.suspect and node.session.outbox.has_room()
                for node in self.nodes
            ]
        )


class Queues:
    """The queues of all engines. send: give a flow to its nodes, now; measure: what a flow would
    have to compute on an engine by what is known of its pages."""

    def __init__(
        self,
        fallback_tokens_per_s: float,
        send: Callable[[Queued, float], None],
        measure: Callable[[Flow, Engine], int],
    ) -> None:
        self.sheds: Counter[Shed] = Counter()
        self._fallback_tokens_per_s = fallback_tokens_per_s
        self._send = send
        self._measure_flow = measure
        self._engines: dict[Engine, None] = {}  # those for which something waits

    def __bool__(self) -> bool:
        return bool(self._engines)

    def rate(self, engine: Engine) -> float:
        return engine.tokens_per_s or self._fallback_tokens_per_s

    def has_room(self, seat: Seat, now: float) -> bool:
        """Whether its prompt may go there at once."""
        engine = seat.engine
        return not engine.queue.tokens and engine.window.fits(
            seat.uncached_tokens, now, self.rate(engine)
        )

    def add(self, queued: Queued, *, arrived_at: float) -> None:
        """Count its prompt and let it wait. arrived_at: its age is that of the request."""
        flow, seat = queued.flow, queued.computing
        tokens = seat.uncached_tokens
        seat.engine.enqueue(queued.counted, tokens)
        flow.queued = Entry(queued, flow.dispatch.tenant, tokens, arrived_at)
        seat.engine.queue.add(flow.queued)
        self._engines[seat.engine] = None
        self._count(queued, 1)

    def remove(self, flow: Flow) -> None:
        """It ended, or goes elsewhere; its credit is closed by its owner. Idempotent."""
        entry = flow.queued
        if entry is not None:
            engine = entry.what.computing.engine
            engine.queue.remove(entry)
            self._forget(entry)
            engine.has_changed = True  # who could not enter for its sake may now

    def entries(self) -> list[Entry[Queued]]:
        return [entry for engine in self._engines for entry in engine.queue.entries()]

    def first_token_s(self, entry: Entry[Queued], now: float, enough_s: float) -> float:
        """Seconds until its first token, as far as is known; at most so many, if enough."""
        queued = entry.what
        engine = queued.computing.engine
        rate = self.rate(engine)
        most_s = engine.backlog.tokens / rate + queued.fetch_s  # all of it, its own too
        if most_s <= enough_s:
            return most_s
        before = engine.window.outstanding(now, rate)
        before += engine.queue.before(entry, rate)
        return (before + entry.tokens) / rate + queued.fetch_s

    def pump(self, now: float) -> None:
        """Send what may be sent, to the engines whose backlog became less."""
        for engine in [one for one in self._engines if one.has_changed]:
            self._release(engine, now)

    def tick(self, now: float) -> None:
        """The same to all: what others asked of an engine becomes less by itself."""
        for engine in list(self._engines):
            self._release(engine, now)

    def _release(self, engine: Engine, now: float) -> None:
        engine.has_changed = False
        rate, window, queue = self.rate(engine), engine.window, engine.queue

        def fits(entry: Entry[Queued]) -> bool:
            return window.fits(entry.tokens, now, rate) and entry.what.can_be_sent()

        while True:
            most = window.tokens if window.has_large else None
            entry = queue.take(fits, self._measure, rate, most=most)
            if entry is None:
                return
            self._forget(entry)
            engine.send_queued(entry.what.counted)
            self._send(entry.what, now)

    def _measure(self, entry: Entry[Queued]) -> int:
        """Of prompts that begin alike the next find the pages of the first."""
        queued = entry.what
        engine = queued.computing.engine
        tokens = min(entry.tokens, self._measure_flow(queued.flow, engine))
        engine.resize_queued(queued.counted, tokens)
        return tokens

    def _forget(self, entry: Entry[Queued]) -> None:
        queued = entry.what
        engine = queued.computing.engine
        queued.flow.queued = None
        self._count(queued, -1)
        if not len(engine.queue):
            self._engines.pop(engine, None)
            engine.window.nobody_waits()

    def _count(self, queued: Queued, sign: int) -> None:
        queued.seat.node.num_queued += sign * len(queued.flow.lanes)
        if queued.prefill is not None:
            queued.prefill.node.num_queued += sign
