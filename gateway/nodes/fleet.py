"""The nodes of this gateway: who serves what, where a request goes, what happens when one is lost.

Everything here is synchronous and runs in the event loop, so every change is whole before anybody
else looks. Time comes from an injected clock; `tick` does what is due.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files

import msgspec
import structlog

from gateway.nodes.balance import Balance
from gateway.nodes.bundles import Assembly, BundleError, Bundles, is_digest
from gateway.nodes.engines import Engine
from gateway.nodes.greeting import MAX_ENGINES, find_problem, refuse_hello
from gateway.nodes.legs import Leg
from gateway.nodes.node import LOST_AFTER_S, SUSPECT_AFTER_S, Node
from gateway.nodes.outbox import OUTBOX_BYTES, Outbox
from gateway.nodes.pairs import RETRYABLE, TRANSFER_CODES, Pairs, Plan, Seat
from gateway.nodes.placement import Choice, Placement
from gateway.nodes.placement import NoCapacity as NoCapacity  # what dispatch raises is ours too
from gateway.nodes.placement import NoNode as NoNode
from gateway.nodes.placement import OldNodes as OldNodes
from gateway.nodes.placement import TooLate as TooLate
from gateway.nodes.queue_moves import QueueMoves
from gateway.nodes.queued import Queued, Queues
from gateway.nodes.served import ServedModels
from gateway.nodes.session import Session
from gateway.nodes.streams import Dispatch, Flow, Lane, Stream, Try, Waiter
from gateway.nodes.views import NodeView, Place, Residence, ServedModel, SessionView, node_view
from policies.contract import wire
from policies.contract.wire import (
    BundlePart,
    Draining,
    EngineInfo,
    EnginesChanged,
    Failed,
    Finished,
    Hello,
    Logprobs,
    PageEvents,
    PinResult,
    PromptLogprobs,
    PurgeResult,
    Refused,
    Report,
    Role,
    Started,
    Step,
    UsageRecord,
    Welcome,
)
from policies.pairing import PairingParameters, SplitMode
from policies.pairing import parse_parameters as parse_pairing
from policies.queue import QueueBounds
from policies.residency import event_keys
from policies.routing import RoutingParameters, RoutingPolicy, parse_parameters

log = structlog.get_logger("kagari.nodes")

MAX_ATTEMPTS = 3
MAX_KNOWN_REQUESTS = 65_536
FORGET_AFTER_S = 600.0
TICK_S = 0.05
MAX_TICK_GAP_S = 1.0


class UnknownNode(LookupError):
    """An operator named a node that is not known."""


class OldNode(Exception):
    """An operator ordered a role of a node whose wire version knows none."""


def default_parameters() -> RoutingParameters:
    """policies/defaults/routing.toml as it is installed."""
    return parse_parameters(files("policies").joinpath("defaults/routing.toml").read_text("utf-8"))


def default_pairing() -> PairingParameters:
    """policies/defaults/pairing.toml as it is installed."""
    text = files("policies").joinpath("defaults/pairing.toml").read_text("utf-8")
    return parse_pairing(text)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """policy: see RoutingPolicy; default_models lead the list of models, in this order.

    moves_roles: by load, as pairing.roles says; else only an operator does.
    """

    gateway_id: str = "gateway"
    policy: RoutingPolicy = RoutingPolicy.COST
    parameters: RoutingParameters = field(default_factory=default_parameters)
    default_models: tuple[str, ...] = ()
    max_in_flight: int = 256  # sequences of this gateway on one node, queued ones too
    queue: QueueBounds = field(default_factory=QueueBounds)  # of each engine
    outbox_bytes: int = OUTBOX_BYTES
    split: SplitMode = SplitMode.AUTO
    pairing: PairingParameters = field(default_factory=default_pairing)
    moves_roles: bool = False


class Fleet:
    """Nodes, models and streams of one gateway.

    on_usage_record takes final usages of requests this process does not know (its predecessor's);
    they are acknowledged once it returns. on_order_result takes a node's answers to `order`. draw:
    so many bytes that nobody can foretell.
    """

    def __init__(
        self,
        bundles: Bundles,
        config: FleetConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_usage_record: Callable[[UsageRecord], None] = lambda record: None,
        on_order_result: Callable[[str, PinResult | PurgeResult], None] = lambda *_: None,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.config = config = config or FleetConfig()
        self.bundles = bundles
        self.skipped_frames = 0
        self._clock = clock
        self._on_usage_record = on_usage_record
        self._on_order_result = on_order_result
        self._node_by_id: dict[str, Node] = {}
        self._served = ServedModels(self._node_by_id, bundles, config.default_models)
        routing = config.parameters
        self._placement = Placement(
            self._node_by_id, self._served, config.policy, routing, config.max_in_flight
        )
        self.pairs = Pairs(
            self._node_by_id, self._placement, routing, config.split, config.pairing, draw
        )
        self._balance = Balance(
            self._node_by_id,
            self._served,
            config.pairing.roles if config.moves_roles else None,
            routing.fallback_tokens_per_s,
        )
        self.queues = Queues(
            routing.fallback_tokens_per_s, self._send_queued, self._placement.uncached_tokens
        )
        self._moves = QueueMoves(self.queues, self._replace, self._fail)
        self._known_requests: OrderedDict[str, None] = OrderedDict()
        self._orphans: deque[Flow] = deque()
        self._ticked_at = clock()

    # --- what is served ---------------------------------------------------------------------------

    def models(self) -> list[ServedModel]:
        """What can be served now: configured defaults first, then as joined, aliases last."""
        return self._served.all()

    def model(self, name: str) -> ServedModel | None:
        """One model by its name or alias, None when it cannot be served now."""
        return self._served.find(name)

    # --- requests ---------------------------------------------------------------------------------

    def dispatch(self, dispatch: Dispatch, waiter: Waiter | None = None) -> Stream:
        """Choose a node and submit, or queue for it. Raises NoNode, NoCapacity or TooLate; then
        nothing was changed.

        waiter: one that several streams share, so that their owner waits for all of them.
        """
        now = self._clock()
        flow = Flow(dispatch, event_keys(dispatch.page_keys), now, waiter)
        self._placement.find_home(flow, now)
        try:
            self._place(flow, now)
        except NoCapacity as refusal:
            self.queues.sheds["ttft" if isinstance(refusal, TooLate) else "full"] += 1
            raise
        self._known_requests[dispatch.request_id] = None
        if len(self._known_requests) > MAX_KNOWN_REQUESTS:
            self._known_requests.popitem(last=False)
        return Stream(flow, self)

    def _place(self, flow: Flow, now: float) -> None:
        plan = self.pairs.plan(flow, now, is_last=flow.attempt + 1 >= MAX_ATTEMPTS)
        self._take_place(flow, plan, now)
        pairing = plan.choice.pairing
        if pairing is not None and pairing.reason != "short":
            self._balance.prompt_tokens += pairing.uncached_tokens

    def _take_place(self, flow: Flow, plan: Plan, now: float) -> None:
        """Count it there, and send it at once if nothing waits for that engine and it has room."""
        seat, prefill = plan.seat, plan.prefill
        flow.attempt += 1
        if prefill is None:
            flow.tries.append(Try(seat.node.node_id, plan.choice.path))
        else:
            source = prefill.node.node_id, prefill.engine.info
            flow.tries.append(Try(seat.node.node_id, plan.choice.path, *source))
            flow.leg = Leg(flow, prefill.node.node_id)
        flow.cached_tokens = None
        flow.cached_by_tier = {}
        flow.prompt_logprobs = []
        seat.engine.seat(flow)
        goes_now = self.queues.has_room(prefill or seat, now)
        if goes_now or prefill is not None:  # decode computes nothing of a split one
            seat.engine.credit(flow, seat.uncached_tokens)
        if goes_now:
            if prefill is not None and flow.leg is not None:
                prefill.engine.credit(flow.leg, prefill.uncached_tokens)
            self._send(flow, seat, prefill, now)
        else:
            fetch_s = (prefill or seat).fetch_s
            queued = Queued(flow, seat, prefill, fetch_s, now)
            self.queues.add(queued, arrived_at=flow.arrived_at)
        self._placement.settle(flow, plan.choice, now)

    def _send(self, flow: Flow, seat: Seat, prefill: Seat | None, now: float) -> None:
        """Decode is told first, so that it usually knows who comes."""
        session = seat.node.session
        assert session is not None  # its state is ready
        left_s = max(0.001, flow.deadline - now)
        session.submit(flow, seat.engine.info.engine, left_s, seat.transfer)
        if prefill is None:
            return
        session = prefill.node.session
        assert session is not None  # as above
        assert flow.leg is not None
        assert prefill.transfer is not None
        session.submit_leg(flow.leg, prefill.engine.info.engine, left_s, prefill.transfer)

    def _send_queued(self, queued: Queued, now: float) -> None:
        flow = queued.flow
        flow.waited_s += now - queued.since
        self._send(flow, queued.seat, queued.prefill, now)

    def explain(self, dispatch: Dispatch) -> Choice:
        """Where it would go now; nothing is sent or changed. Raises NoNode or NoCapacity."""
        now = self._clock()
        flow = Flow(dispatch, event_keys(dispatch.page_keys), now)
        self._placement.find_home(flow, now)
        return self.pairs.plan(flow, now, is_last=False).choice

    def decided(self, request_id: str) -> list[tuple[float, Choice]]:
        """Why a recent request went where it did: (seconds ago, choice) of each attempt."""
        now = self._clock()
        return [(now - one.at, one.choice) for one in self._placement.decided(request_id)]

    def abort(self, flow: Flow) -> None:
        """Stream.abort."""
        if not flow.is_over:
            self._stop(flow)
            for lane in flow.lanes:
                if lane.end is None:
                    end = Finished(lane.number, "abort", flow.usage(lane.produced))
                    self._end(lane, end)
            self._pump()

    def finish(self, lane: Lane, keep: int) -> None:
        """Stream.finish."""
        if lane.end is None:
            assert lane.flow.session is not None  # a flow that has not ended has a place
            lane.flow.session.finish(lane, keep)
            self._end(lane, Finished(lane.number, "stop", lane.flow.usage(keep)))
            self._pump()

    def _pump(self) -> None:
        """What has room now is sent now."""
        if self.queues:
            self.queues.pump(self._clock())

    def orphaned(self, flow: Flow) -> None:
        """A Stream was collected unended, in whatever thread: the next tick aborts its flow."""
        self._orphans.append(flow)

    def _stop(self, flow: Flow) -> None:
        if flow.queued is not None:
            flow.waited_s += self._clock() - flow.queued.what.since
            self.queues.remove(flow)
        if flow.session is not None:
            flow.session.abort(flow)
        if flow.leg is not None:
            flow.leg.stop()
            flow.leg = None

    def _end(self, lane: Lane, end: Finished | Failed) -> None:
        flow = lane.flow
        lane.end = end
        flow.num_live -= 1
        if flow.is_over:
            flow.session = None
            if flow.engine is not None:
                flow.engine.leave(flow)
            if flow.leg is not None and not flow.is_answered:
                flow.leg.stop()  # else it has all but said that it is done
            self.pairs.ended(flow, end)
        flow.wake()

    def _fail(self, flow: Flow, code: str, message: str) -> None:
        """A request fails whole: what its other lanes still do is for nobody."""
        self._stop(flow)
        for lane in flow.lanes:
            if lane.end is None:
                self._end(lane, Failed(lane.number, code, message, flow.usage(lane.produced)))

    def _fault(
        self, flow: Flow, code: str, message: str, now: float, *, prefill: bool = False
    ) -> None:
        """A place failed, or a pair: try another one before the first token, else tell the reader.

        prefill: it was the prefill node's fault.
        """
        self._stop(flow)
        if flow.engine is not None:
            flow.engine.leave(flow)
        if flow.is_untouched and flow.attempt < MAX_ATTEMPTS and now < flow.deadline:
            self.pairs.failed(flow, code, now, prefill=prefill)
            try:
                self._place(flow, now)
            except (NoNode, NoCapacity) as error:
                message = f"{message}; {error}"
            else:
                self.pairs.replaced(flow)
                log.info(
                    "redispatched",
                    request_id=flow.dispatch.request_id,
                    attempt=flow.attempt,
                    node=flow.tries[-1].node_id,
                    prefill_node=flow.tries[-1].prefill_node,
                    code=code,
                    why=message[:200],
                )
                return
        self._fail(flow, code, message)

    def _leg_failed(self, leg: Leg, code: str, message: str, now: float) -> None:
        """Before the first token decode would wait for pages that do not come."""
        if leg.flow.is_over or leg.flow.is_answered:
            leg.stop()
        else:
            self._fault(leg.flow, code, message, now, prefill=True)

    def _replace(self, flow: Flow, now: float) -> NoNode | NoCapacity | None:
        """Another place for what was sent to none, so the old one counts as no attempt. A refusal
        leaves it where it is."""
        last = flow.tries.pop()
        flow.attempt -= 1
        try:
            plan = self.pairs.plan(flow, now, is_last=flow.attempt + 1 >= MAX_ATTEMPTS)
        except (NoNode, NoCapacity) as refusal:
            flow.tries.append(last)
            flow.attempt += 1
            return refusal
        self._stop(flow)
        if flow.engine is not None:
            flow.engine.leave(flow)
        self._take_place(flow, plan, now)
        return None

    # --- links ------------------------------------------------------------------------------------

    def attach(self, hello: Hello) -> Session | Refused:
        """A node's first frame: the session it speaks on from now on, with Welcome queued."""
        refused = refuse_hello(hello) or self._refuse_epoch(hello)
        if refused is not None:
            log.warning("node_refused", node=hello.node_id, code=refused.code)
            return refused
        now = self._clock()
        node = self._node_by_id.setdefault(hello.node_id, Node(hello.node_id, self.config.queue))
        if node.session is not None:
            self.detach(node.session, "replaced by a newer link of the same node")
        outbox = Outbox(self.config.outbox_bytes)
        session = Session(node_id=hello.node_id, opened_at=now, outbox=outbox)
        node.join(hello, session, now)
        self._served.forget()
        self._welcome(node, session, hello.bundles[:MAX_ENGINES])
        self._tell_drain(node)
        log.info("node_joined", node=node.node_id, epoch=node.epoch, engines=len(hello.engines))
        return session

    def _refuse_epoch(self, hello: Hello) -> Refused | None:
        node = self._node_by_id.get(hello.node_id)
        if node is None or node.session is None or hello.node_epoch >= node.epoch:
            return None
        return Refused(
            "stale_epoch",
            f"node_id {hello.node_id!r} is linked with epoch {node.epoch}, this one has"
            f" {hello.node_epoch}; give each node its own node_id",
        )

    def _welcome(self, node: Node, session: Session, promised: tuple[str, ...] = ()) -> None:
        """Say which bundles we lack; the node follows with snapshots of its pages.

        promised: bundles of engines that still load, longer than we take for their text.
        """
        digests = [digest for digest in promised if is_digest(digest)]
        for engine in node.engine_by_index.values():
            self._served.note(engine.info.model)
            if is_digest(engine.info.bundle_digest):
                digests.append(engine.info.bundle_digest)
        wanted = self.bundles.missing(digests)
        for digest in wanted:
            session.assemblies.setdefault(digest, Assembly(digest))
        welcome = Welcome(node.wire_version, self.config.gateway_id, wanted)
        session.outbox.send_urgent(wire.encode(welcome))

    def detach(self, session: Session, why: str) -> None:
        """A link ended: its streams move on or fail now. Idempotent."""
        node = self._node_by_id.get(session.node_id)
        if node is None or node.session is not session:
            return
        now = self._clock()
        self._served.forget()
        node.session = None
        node.detached_at = now
        session.outbox.close(1001, why)
        flows, legs = session.cut()
        log.warning("node_lost", node=node.node_id, why=why, streams=len(flows))
        message = f"node {node.node_id} was lost: {why}"
        for flow in flows:
            self._fault(flow, "node_lost", message, now)
        for leg in legs:
            self._leg_failed(leg, "node_lost", message, now)
        self._moves.node_changed(node, now)
        self._pump()

    def receive(self, session: Session, frame: bytes) -> None:
        """One frame of a node. What cannot be read is counted and skipped, the link stays."""
        node = self._node_by_id.get(session.node_id)
        if node is None or node.session is not session:
            return
        try:
            message = wire.decode_from_node(frame)
        except (msgspec.MsgspecError, TypeError):
            self._skip(session)
            return
        if isinstance(message, Step):
            self._on_step(node, session, message)
        else:
            self._on_rare(node, session, message)
        self._pump()

    def _on_rare(self, node: Node, session: Session, message: wire.NodeToGateway) -> None:
        self._served.forget()
        match message:
            case PageEvents():
                engine = node.engine_by_index.get(message.engine)
                if engine is not None:
                    self._on_page_events(engine, session, message)
            case Report():
                self._on_report(node, session, message)
            case UsageRecord(request_id, attempt):
                if request_id not in self._known_requests:
                    self._on_usage_record(message)
                session.acknowledge(request_id, attempt, message.lane)
            case BundlePart():
                self._on_bundle_part(node, session, message)
            case EnginesChanged(engines):
                self._on_engines_changed(node, session, engines)
            case Draining():
                node.draining_itself = True
                self._moves.node_changed(node, self._clock())
            case PinResult() | PurgeResult():
                self._on_order_result(node.node_id, message)
            case _:  # a second Hello
                self._skip(session)

    def _skip(self, session: Session) -> None:
        session.skipped_frames += 1
        self.skipped_frames += 1

    def _on_step(self, node: Node, session: Session, step: Step) -> None:
        if len(step.lanes) != len(step.tokens):
            self._skip(session)
            return
        for rare in step.rare:
            if isinstance(rare, Started):
                session.started(rare)
            elif isinstance(rare, Logprobs | PromptLogprobs):
                session.on_logprobs(rare)
        for flow in session.wake(session.on_step(step)):
            if not flow.is_over:  # a lane may come twice in a frame
                unread = max([len(lane.unread) for lane in flow.lanes])
                message = f"{unread} tokens were not read; the client reads too slowly"
                self._fail(flow, "slow_reader", message)
        for rare in step.rare:
            if not isinstance(rare, Finished | Failed) or (ended := session.ended(rare)) is None:
                continue
            if isinstance(ended, Leg):
                self._on_leg_end(ended, rare)
            elif isinstance(rare, Finished):
                self._end(ended, rare)
            elif rare.code in RETRYABLE or rare.code in TRANSFER_CODES:
                self._fault(ended.flow, rare.code, rare.message, self._clock())
            else:
                self._end(ended, rare)
                self._fail(ended.flow, rare.code, rare.message)

    def _on_leg_end(self, leg: Leg, end: Finished | Failed) -> None:
        if isinstance(end, Failed):
            self._leg_failed(leg, end.code, end.message, self._clock())
        elif end.reason in ("stop", "length"):
            leg.stop()  # decode has all
        else:  # it ended by itself: decode must not go on with half of a prompt
            self._leg_failed(leg, "transfer_lost", f"prefill ended: {end.reason}", self._clock())

    def _on_engines_changed(
        self, node: Node, session: Session, engines: tuple[EngineInfo, ...]
    ) -> None:
        problem = find_problem(engines)
        if problem is not None:
            self._skip(session)
            log.error("engines_refused", node=node.node_id, problem=problem)
            return
        node.set_engines(engines)
        self._welcome(node, session)
        self._moves.node_changed(node, self._clock())

    def _on_page_events(self, engine: Engine, session: Session, frame: PageEvents) -> None:
        lost = engine.residency.apply(frame)
        if frame.snapshot:
            engine.resync_asked = False
        elif lost and not engine.resync_asked:
            session.outbox.send_urgent(wire.encode(wire.Resync(engine.info.engine)))
            engine.resync_asked = True

    def _on_report(self, node: Node, session: Session, report: Report) -> None:
        now = self._clock()
        for engine, load in node.take_report(report, now):
            engine.take_report(load, now)
            if load.state != "down":
                continue
            message = f"an engine of {node.node_id} went down"
            for flow in [one for one in session.flows() if one.engine is engine]:
                self._fault(flow, "engine_lost", message, now)
            for leg in [one for one in session.legs.values() if one.engine is engine]:
                self._leg_failed(leg, "engine_lost", message, now)
        self._moves.node_changed(node, now)

    def _on_bundle_part(self, node: Node, session: Session, part: BundlePart) -> None:
        assembly = session.assemblies.get(part.digest)
        if assembly is None:
            self._skip(session)
            return
        try:
            whole = assembly.add(part)
        except BundleError as error:
            del session.assemblies[part.digest]
            log.error("bundle_broken", node=node.node_id, digest=part.digest, error=str(error))
            return
        if whole is not None:
            del session.assemblies[part.digest]
            self.bundles.add(part.digest, whole)

    # --- time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what is due: suspect and lose silent nodes, send acknowledgements, drop orphans."""
        now = self._clock()
        self._served.forget()  # a bundle may have been loaded
        slept = now - self._ticked_at - TICK_S
        self._ticked_at = now
        for node in list(self._node_by_id.values()):
            if slept > MAX_TICK_GAP_S:
                node.reported_at += slept  # we were stopped, not they: their frames wait unread
            self._tick_node(node, now)
        while self._orphans:
            self.abort(self._orphans.popleft())
        if self.queues:
            self._moves.tick(now)
            self.queues.tick(now)
        self._balance.tick(now)

    def _tick_node(self, node: Node, now: float) -> None:
        session = node.session
        if session is None:
            if now - node.detached_at > FORGET_AFTER_S and not node.is_ordered:
                del self._node_by_id[node.node_id]
            return
        session.flush_acks()
        self._tell_drain(node)
        silent_s = now - node.reported_at
        if silent_s > LOST_AFTER_S - TICK_S:  # the next tick would be too late
            self.detach(session, f"no report for {silent_s:.1f} s")
        elif silent_s >= SUSPECT_AFTER_S and not node.suspect:
            node.suspect = True
            self._served.forget()
            log.warning("node_suspect", node=node.node_id)
            self._moves.node_changed(node, now)

    # --- operators --------------------------------------------------------------------------------

    def drain(self, node_id: str, drain: bool) -> None:
        """Take a node out of routing, or back; it outlives reconnects. What waits for it alone is
        still sent there, and then it is told. Raises UnknownNode."""
        node = self._known(node_id)
        node.drained_by_operator = drain
        self._served.forget()
        if drain:
            self._moves.node_changed(node, self._clock())
            self._pump()
            self._tell_drain(node)
        elif node.session is not None:
            node.is_told_to_drain = False
            node.session.outbox.send_urgent(wire.encode(wire.Drain(False)))

    def _tell_drain(self, node: Node) -> None:
        """Once no Submit of ours is on its way there: the node refuses those from then on."""
        session = node.session
        if session is None or not node.drained_by_operator or node.is_told_to_drain:
            return
        if not node.num_queued and not session.outbox.has_submits:
            node.is_told_to_drain = True
            session.outbox.send_urgent(wire.encode(wire.Drain(True)))

    def set_role(self, node_id: str, role: Role) -> None:
        """Order a node to do other work from now on: first what it has of ours ends, or DRAIN_S
        passes. Raises UnknownNode or OldNode."""
        node = self._known(node_id)
        if node.wire_version < wire.SPLIT_VERSION:
            raise OldNode(f"node {node_id} speaks wire version {node.wire_version}")
        node.role.ask(role, self._clock())
        self._moves.node_changed(node, self._clock())
        self._pump()

    def _known(self, node_id: str) -> Node:
        node = self._node_by_id.get(node_id)
        if node is None:
            known = ", ".join(self._node_by_id) or "none"
            raise UnknownNode(f"node_id is {node_id!r}, known are: {known}")
        return node

    def places(self, *, linked: bool = True) -> list[Place]:
        """Engines of nodes that are linked, or of all that are or lately were."""
        return [
            Place(
                node.node_id,
                engine,
                speaks=node.wire_version >= wire.TIERS_VERSION,
                is_serving=self._served.state(node) == "ready" and self._served.is_servable(engine),
            )
            for node in self._node_by_id.values()
            if node.session is not None or not linked
            for engine in node.engine_by_index.values()
        ]

    def order(self, place: Place, order: wire.Pin | wire.Unpin | wire.Purge | wire.Quotas) -> bool:
        """Send it; False when that engine is gone or the node's out-queue has no room."""
        node = self._node_by_id.get(place.node_id)
        if node is None or node.session is None:
            return False
        if node.engine_by_index.get(place.index) is not place.engine:
            return False
        frame = wire.encode(order)
        outbox = node.session.outbox
        if not outbox.has_room(len(frame)):
            return False
        outbox.send_urgent(frame)
        return True

    def nodes(self) -> list[NodeView]:
        """Every node that is or lately was linked."""
        now = self._clock()
        return [
            node_view(node, self._served.state(node), self.bundles, now)
            for node in self._node_by_id.values()
        ]

    def session_keys(self) -> list[bytes]:
        """The affinity keys of all sessions that have a home."""
        return self._placement.homes.keys()

    def session(self, affinity_key: bytes) -> SessionView | None:
        """A session's home and where its prefix lies; None when it is not known, or no more."""
        now = self._clock()
        home = self._placement.homes.look(affinity_key, now)
        if home is None:
            return None
        return SessionView(
            home=home.node_id,
            home_age_s=now - home.since,
            idle_s=now - home.used_at,
            prompt_pages=home.prompt_pages,
            resident=self._residences(home.page_key) if home.page_key is not None else (),
        )

    def _residences(self, page_key: bytes) -> tuple[Residence, ...]:
        return tuple(
            Residence(node.node_id, engine.info.engine, tiers)
            for node in self._node_by_id.values()
            for engine in node.engine_by_index.values()
            if (tiers := engine.residency.tiers(page_key))
        )
