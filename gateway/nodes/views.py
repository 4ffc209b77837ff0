"""What the fleet shows: servable models for the API, nodes for operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from policies.contract.wire import EngineInfo, EngineReport, NodeState, Role, Tier

if TYPE_CHECKING:
    from gateway.nodes.bundles import Bundles
    from gateway.nodes.engines import Engine
    from gateway.nodes.node import Node
    from gateway.text.model import TextModel


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be served now. info is of its first engine; nodes serve as that one does."""

    name: str
    info: EngineInfo
    text: TextModel
    nodes: int
    alias_of: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """An engine of a node, to be ordered something. engine: this life of it.

    speaks: its wire version knows pins and purges. is_serving: it would be given requests.
    """

    node_id: str
    engine: Engine
    speaks: bool
    is_serving: bool

    @property
    def index(self) -> int:
        return self.engine.info.engine


class EngineView(Struct, frozen=True):
    """outstanding_tokens: of the backlog, those of this gateway; queued ones wait here for it."""

    info: EngineInfo
    report: EngineReport | None
    bundle: str  # "loaded", "waiting" or why it was refused
    backlog_tokens: int
    outstanding_tokens: int
    resident_pages: int
    event_gaps: int
    queued_requests: int = 0
    queued_tokens: int = 0


class Residence(Struct, frozen=True):
    """An engine that holds a page, and in which tiers, fastest first."""

    node_id: str
    engine: int
    tiers: tuple[Tier, ...]


class SessionView(Struct, frozen=True):
    """What the gateway knows of a session; ages in seconds.

    resident: where the deepest of prompt_pages, the full pages of its last prompt, is now; a chain
    is evicted tail first, so that page proves those before it.
    """

    home: str
    home_age_s: float  # since that node is its home
    idle_s: float  # since its last turn
    prompt_pages: int
    resident: tuple[Residence, ...]


class NodeView(Struct, frozen=True):
    """One row of the admin's list of nodes; ages in seconds.

    role: as the node says; next_role: what it will be once it has drained.
    """

    node_id: str
    state: NodeState
    role: Role
    epoch: int
    software: str
    engines: tuple[EngineView, ...]
    in_flight: int
    link_age_s: float | None  # None: no link
    report_age_s: float
    queued_bytes: int
    late_tokens: int
    skipped_frames: int
    next_role: Role | None = None


def node_view(node: Node, state: NodeState, bundles: Bundles, now: float) -> NodeView:
    """A node as it is now, on the fleet's clock."""
    session = node.session
    return NodeView(
        node_id=node.node_id,
        state=state,
        role=node.role.current,
        epoch=node.epoch,
        software=node.software,
        engines=tuple(_engine_view(one, bundles) for one in node.engine_by_index.values()),
        in_flight=session.in_flight if session is not None else 0,
        link_age_s=now - session.opened_at if session is not None else None,
        report_age_s=now - node.reported_at,
        queued_bytes=session.outbox.size_bytes if session is not None else 0,
        late_tokens=session.late_tokens if session is not None else 0,
        skipped_frames=session.skipped_frames if session is not None else 0,
        next_role=node.role.order if node.role.is_switching else None,
    )


def _engine_view(engine: Engine, bundles: Bundles) -> EngineView:
    digest = engine.info.bundle_digest
    problem = bundles.problem_by_digest.get(digest, "waiting")
    return EngineView(
        info=engine.info,
        report=engine.report,
        bundle="loaded" if bundles.text(digest) is not None else problem,
        backlog_tokens=engine.backlog.tokens,
        outstanding_tokens=engine.backlog.ours,
        resident_pages=len(engine.residency),
        event_gaps=engine.residency.gaps,
        queued_requests=len(engine.queue),
        queued_tokens=engine.queue.tokens,
    )
