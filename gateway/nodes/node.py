"""One node as the gateway knows it, and its state: joining, ready, suspect, draining or lost."""

from __future__ import annotations

from typing import Literal

from gateway.nodes.engines import Engine
from gateway.nodes.roles import NodeRole
from gateway.nodes.session import Session
from policies.contract import wire
from policies.contract.wire import EngineInfo, EngineReport, Hello, NodeState, Report
from policies.queue import QueueBounds

SUSPECT_AFTER_S = 5.0  # without a report: out of routing
LOST_AFTER_S = 7.0  # without a report: its sequences fail
Work = Literal["whole", "prefill"]  # a request, or the first half of a split one


class Node:
    """Survives its links: a node that reconnects within the same epoch keeps its pages' book."""

    def __init__(self, node_id: str, queue_bounds: QueueBounds | None = None) -> None:
        self.node_id = node_id
        self.num_queued = 0  # sequences that were placed here and are not sent yet
        self._queue_bounds = queue_bounds or QueueBounds()
        self.role = NodeRole()
        self.epoch = -1
        self.software = ""
        self.wire_version = wire.WIRE_VERSION  # the newest that both ends speak
        self.session: Session | None = None
        self.engine_by_index: dict[int, Engine] = {}
        self.report: Report | None = None
        self.reported_at = 0.0  # or attached, whichever is later
        self.detached_at = 0.0
        self.suspect = False
        self.drained_by_operator = False
        self.is_told_to_drain = False  # on this link, by us
        self.draining_itself = False

    def join(self, hello: Hello, session: Session, now: float) -> None:
        is_new_epoch = hello.node_epoch != self.epoch
        if is_new_epoch:
            self.engine_by_index = {}
        self.role.greet(hello.role, now, is_new_epoch=is_new_epoch)
        self.epoch = hello.node_epoch
        self.software = hello.software
        self.wire_version = min(hello.version, wire.WIRE_VERSION)
        self.session = session
        self.report = None
        self.reported_at = now
        self.suspect = False
        self.draining_itself = False
        self.is_told_to_drain = False
        self.set_engines(hello.engines)
        for engine in self.engine_by_index.values():
            engine.resync_asked = False  # what the old link asked for does not come

    def set_engines(self, infos: tuple[EngineInfo, ...]) -> None:
        """The full list; an engine that is unchanged keeps its books, a new one starts empty."""
        before = self.engine_by_index
        self.engine_by_index = {}
        for info in infos:
            old = before.get(info.engine)
            kept = old is not None and old.info == info
            self.engine_by_index[info.engine] = (
                old if kept and old is not None else Engine(info, self._queue_bounds)
            )

    def take_report(self, report: Report, now: float) -> list[tuple[Engine, EngineReport]]:
        """The engines it speaks of; empty when it is stale (another epoch, or out of order)."""
        if report.node_epoch != self.epoch:
            return []
        if self.report is not None and report.sequence <= self.report.sequence:
            return []
        self.report = report
        self.reported_at = now
        self.suspect = False
        self.draining_itself = report.state == "draining"
        if report.role is not None:
            self.role.hear(report.role)
        pairs = [(self.engine_by_index.get(one.engine), one) for one in report.engines]
        return [(engine, one) for engine, one in pairs if engine is not None]

    @property
    def is_ordered(self) -> bool:
        """An operator's word on it stands, and is to be remembered while the node is away."""
        return self.drained_by_operator or self.role.order is not None

    def takes(self, engine: Engine, work: Work) -> bool:
        """Whether its role is to do such work now."""
        if self.role.is_switching:
            return False
        if work == "prefill":
            return self.role.current == "prefill" and self.splits(engine)
        return self.role.current != "prefill"

    def splits(self, engine: Engine) -> bool:
        """Whether that engine could be half of a split."""
        return bool(engine.info.peer) and self.wire_version >= wire.SPLIT_VERSION

    def state(self, *, servable: bool) -> NodeState:
        """servable: one of its engines is up and its bundle is loaded."""
        if self.session is None:
            return "lost"
        if self.drained_by_operator or self.draining_itself:
            return "draining"
        if self.suspect:
            return "suspect"
        return "ready" if servable else "joining"
