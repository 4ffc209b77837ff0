"""What a node does with each message: forwards it, answers it or refuses it. No I/O of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

import structlog

from engine.framing import MAX_CHANNEL
from node_agent.identity import Identity
from node_agent.link import GatewayLink
from node_agent.reports import PageMirror, engine_report, node_report, node_state
from node_agent.streams import LiveStreams
from node_agent.supervisor import EngineSupervisor
from policies.contract.wire import (
    MIN_WIRE_VERSION,
    WIRE_VERSION,
    Abort,
    Drain,
    Draining,
    EngineInfo,
    EngineNews,
    EngineReport,
    EnginesChanged,
    EngineUp,
    Failed,
    Finished,
    FinishLane,
    GatewayToNode,
    Hello,
    NodeToGateway,
    Pin,
    PinResult,
    Purge,
    PurgeResult,
    Quotas,
    Rare,
    Refused,
    Resync,
    Role,
    SetRole,
    Step,
    Submit,
    Unpin,
    Usage,
    UsageAck,
    UsageRecord,
    Welcome,
    encode,
)

SOFTWARE = "kagari 0.1.0"
PROMPT_ID_BYTES = 4


class Node:
    """Engines on one side, links on the other, and the books between them.

    Give it `engines` and `links` before anything runs. `bundles` maps digests to encoded tokenizer
    bundles. All methods are synchronous: nothing interleaves with them.
    """

    def __init__(
        self,
        identity: Identity,
        role: Role,
        *,
        bundles: Mapping[str, bytes],
        clock: Callable[[], float],
        on_ready: Callable[[], None] = lambda: None,
        on_engine_up: Callable[[EngineUp], None] = lambda _: None,
        on_engine_loading: Callable[[int, str, float], None] = lambda *_: None,
    ) -> None:
        self.engines: Sequence[EngineSupervisor] = ()
        self.links: Sequence[GatewayLink] = ()
        self.streams = LiveStreams()
        self.is_draining = False
        self.repeated_submits = 0
        self._is_stopping = False
        self._identity = identity
        self._role = role
        self._bundles = bundles
        self._clock = clock
        self._on_ready: Callable[[], None] | None = on_ready
        self._on_engine_up = on_engine_up
        self._on_engine_loading = on_engine_loading
        self._link_by_channel: dict[int, GatewayLink] = {}
        self._last_channel = 0
        self._greeted: dict[int, tuple[EngineInfo, ...]] = {}  # link → engines of its Hello
        self._mirrors: dict[int, PageMirror] = {}
        self._reports: dict[int, EngineReport] = {}  # the last of each engine
        self._up: set[int] = set()
        self._was_up: set[int] = set()
        self._report_sequence = 0
        self._log = structlog.get_logger()

    # --- state -----------------------------------------------------------------------------------

    def infos(self) -> tuple[EngineInfo, ...]:
        """The engines that are loaded now."""
        return tuple(engine.info for engine in self.engines if engine.info is not None)

    def drain(self, reason: str, *, for_good: bool = False) -> None:
        """Take nothing new; for_good: no gateway may undo it."""
        self._is_stopping = self._is_stopping or for_good
        if not self.is_draining:
            self.is_draining = True
            self._log.info("draining", reason=reason)
            self._broadcast(Draining(reason))
        self.report()

    def resume(self) -> None:
        if self.is_draining and not self._is_stopping:
            self.is_draining = False
            self._log.info("resumed")
        self.report()

    def report(self) -> None:
        """Tell every gateway how things are. Call each second."""
        engines = [self._engine_report(engine) for engine in self.engines]
        state = node_state(engines, is_draining=self.is_draining, was_ready=bool(self._was_up))
        self._report_sequence += 1
        epoch = self._identity.node_epoch
        data = encode(node_report(epoch, self._report_sequence, state, engines, self._role))
        for link in self.links:
            link.send_report(data)

    def resend_overdue(self) -> None:
        """Tell open links again what they have not acknowledged for too long."""
        for link in self.links:
            if link.is_open:
                self._send_all(link, link.usage.overdue(self._clock()))

    def _engine_report(self, engine: EngineSupervisor) -> EngineReport:
        if engine.info is None:
            return EngineReport(engine.index, "down" if engine.index in self._was_up else "loading")
        last = self._reports.get(engine.index) or EngineReport(engine.index, "ready")
        return engine_report(last, age_s=engine.silence_s, is_down=engine.is_silent)

    # --- from engines ----------------------------------------------------------------------------

    def on_loading(self, index: int, stage: str, share: float) -> None:
        self._on_engine_loading(index, stage, share)

    def on_up(self, index: int, up: EngineUp) -> None:
        self._up.add(index)
        self._was_up.add(index)
        self._mirrors[index] = PageMirror()
        self._reports.pop(index, None)
        self._log.info("engine_up", engine=index, model=up.info.model, load_s=round(up.load_s, 3))
        self._on_engine_up(up)
        self._broadcast(EnginesChanged(self.infos()))
        for link in self.links:
            self._send_snapshot(link, index)
        self.report()
        self._notice_ready()

    def on_news(self, index: int, news: EngineNews) -> None:
        self._reports[index] = news.report
        if not news.events:  # a pulse out of a long step knows no numbers; a gap shows later
            return
        mirror = self._mirrors.setdefault(index, PageMirror())
        if not mirror.apply(news.first_event, news.events):
            self._log.warning("page_events_missing", engine=index, first=news.first_event)
            for link in self.links:
                self._send_snapshot(link, index)
        else:
            for link in self.links:
                if link.is_open:
                    self._send_all(link, link.pages.frames(index, news.events))

    def on_usage(self, index: int, record: UsageRecord) -> None:
        entry = self.streams.end(record.request_id, record.attempt, record.lane)
        if entry is None:
            self._log.warning("usage_of_nobody", request_id=record.request_id, engine=index)
        elif record.lane in entry.early_acks:
            entry.early_acks.discard(record.lane)
        else:
            self.links[entry.gateway].usage.add(record, self._clock())

    def on_result(self, index: int, result: PinResult | PurgeResult) -> None:
        """To every gateway: ids are drawn at random, and whoever did not ask knows none of them."""
        self._broadcast(result)

    def on_step(self, index: int, channel: int, message: bytes) -> None:
        link = self._link_by_channel.get(channel)
        if link is not None:
            link.send(message)

    def on_lost(self, index: int, reason: str) -> None:
        """Fail what ran there on every link at once, then say that the engine is gone."""
        rare_by_channel: dict[int, list[Rare]] = {}
        for entry, lanes in self.streams.lose_engine(index):
            rare_by_channel.setdefault(entry.channel, []).extend(
                Failed(lane, "engine_lost", f"engine {index}: {reason}") for lane in lanes
            )
        for channel, rare in rare_by_channel.items():
            self._send_rare(self._link_by_channel.get(channel), index, rare)
        if index not in self._up:
            return
        self._up.discard(index)
        self._reports.pop(index, None)
        mirror = self._mirrors.setdefault(index, PageMirror())
        mirror.restart()
        self._broadcast(EnginesChanged(self.infos()))
        for link in self.links:
            self._send_snapshot(link, index)
        self.report()

    # --- from gateways ---------------------------------------------------------------------------

    def hello(self, link: GatewayLink) -> Hello:
        infos = self.infos()
        self._greeted[link.index] = infos
        identity = self._identity
        return Hello(
            WIRE_VERSION,
            MIN_WIRE_VERSION,
            identity.node_id,
            identity.node_epoch,
            self._role,
            infos,
            SOFTWARE,
            tuple(self._bundles),
        )

    def on_open(self, link: GatewayLink, welcome: Welcome) -> None:
        link.channel = self._free_channel()
        self._link_by_channel[link.channel] = link
        greeted = self._greeted[link.index]
        self._send_bundles(link, welcome.wanted_bundles)
        if greeted != self.infos():  # an engine came or went since the Hello
            link.send(encode(EnginesChanged(self.infos())))
        for info in self.infos():
            self._send_snapshot(link, info.engine)
        self._send_all(link, link.usage.all(self._clock()))
        if self.is_draining:
            link.send(encode(Draining("still draining")))
        self.report()
        self._notice_ready()

    def on_cut(self, link: GatewayLink) -> None:
        """Nobody reads what this link's streams produce: stop them."""
        channel, link.channel = link.channel, 0
        if self._link_by_channel.pop(channel, None) is None:
            return
        for engine in self.engines:
            if engine.info is not None:
                self._abort(link, channel, engine, ())
        self.streams.cut(channel)

    def on_message(self, link: GatewayLink, message: GatewayToNode) -> None:
        match message:
            case Submit():
                self._submit(link, message)
            case Abort(lanes=lanes):
                self._abort_lanes(link, lanes)
            case FinishLane(lane=lane):
                entry = self.streams.of_lane(link.channel, lane)
                if entry is not None and lane not in entry.aborting:
                    engine = self.engines[entry.engine]
                    engine.outbox.finish(link.channel, message)
                    engine.pump()
            case UsageAck(records=records, lanes=lanes):
                self._acknowledge(link, records, lanes)
            case Resync(engine=index):
                if index in self._mirrors:
                    self._send_snapshot(link, index)
            case Pin() | Unpin() | Purge() | Quotas():
                self._order(link, message)
            case Drain(drain=True):
                self.drain("asked by a gateway")
            case Drain():
                self.resume()
            case SetRole(role=role):
                self._log.info("role_set", role=role, was=self._role)
                self._role = role
                self.report()
            case Welcome(wanted_bundles=wanted):
                self._send_bundles(link, wanted)
            case Refused(code=code, message=text):
                self._log.warning("refused_late", gateway=link.url, code=code, text=text)

    def _submit(self, link: GatewayLink, submit: Submit) -> None:
        if not submit.lanes:  # nobody to answer
            self._log.warning("submit_without_lanes", request_id=submit.request_id)
            return
        known = self.streams.gateway_of(submit.request_id, submit.attempt)
        if known == link.index:
            self.repeated_submits += 1
            return
        refusal = self._refusal(submit, is_known=known is not None)
        if refusal is not None:
            code, text = refusal
            rare: list[Rare] = [Failed(lane, code, text) for lane in submit.lanes]
            self._send_rare(link, submit.engine, rare)
            if known is None:
                self.streams.remember(link.index, submit.request_id, submit.attempt)
            return
        self.streams.add(link.index, link.channel, submit)
        engine = self.engines[submit.engine]
        if not engine.outbox.submit(link.channel, submit):
            entry = self.streams.of_request(submit.request_id, submit.attempt)
            assert entry is not None
            self.streams.drop(entry)
            text = f"engine {submit.engine} does not keep up: its queue is full"
            rare = [Failed(lane, "engine_full", text) for lane in submit.lanes]
            self._send_rare(link, submit.engine, rare)
            return
        engine.pump()

    def _order(self, link: GatewayLink, order: Pin | Unpin | Purge | Quotas) -> None:
        """A purge that cannot be passed on is left unanswered: the gateway asks again, and what is
        on this disk must not be told gone."""
        engine = self.engines[order.engine] if 0 <= order.engine < len(self.engines) else None
        if engine is not None and engine.info is not None and engine.outbox.order(order):
            engine.pump()
            return
        is_known = engine is not None and engine.info is not None
        self._log.warning("order_refused", engine=order.engine, kind=type(order).__name__)
        if isinstance(order, Pin):
            code = "capacity_exceeded" if is_known else "engine_lost"
            text = f"engine {order.engine} {'does not keep up' if is_known else 'is not loaded'}"
            link.send(encode(PinResult(order.engine, order.pin_id, 0, code, text)))

    def _refusal(self, submit: Submit, *, is_known: bool) -> tuple[str, str] | None:
        if is_known:
            return "invalid_submit", "request_id is another gateway's; draw ids at random"
        if self.is_draining:
            return "node_draining", "this node takes nothing new"
        if not 0 <= submit.engine < len(self.engines):
            return "engine_lost", f"no engine {submit.engine} on this node"
        if self.engines[submit.engine].info is None:
            return "engine_lost", f"engine {submit.engine} is not loaded"
        return None

    def _abort_lanes(self, link: GatewayLink, lanes: tuple[int, ...]) -> None:
        if not lanes:
            for engine in self.engines:
                self._abort(link, link.channel, engine, ())
            return
        lanes_by_engine: dict[int, list[int]] = {}
        for lane in lanes:
            entry = self.streams.of_lane(link.channel, lane)
            if entry is None or lane in entry.aborting:  # over already, or on its way to be
                continue
            entry.aborting.add(lane)
            lanes_by_engine.setdefault(entry.engine, []).append(lane)
        for index, theirs in lanes_by_engine.items():
            self._abort(link, link.channel, self.engines[index], tuple(theirs))

    def _abort(
        self, link: GatewayLink, channel: int, engine: EngineSupervisor, lanes: tuple[int, ...]
    ) -> None:
        """A Submit that never reached the engine ends here, with nothing produced."""
        rare: list[Rare] = []
        for submit in engine.outbox.abort(channel, lanes):
            entry = self.streams.of_request(submit.request_id, submit.attempt)
            if entry is not None:
                usage = Usage(prompt_tokens=len(submit.prompt) // PROMPT_ID_BYTES)
                rare += [Finished(lane, "abort", usage) for lane in self.streams.drop(entry)]
        self._send_rare(link, engine.index, rare)
        engine.pump()

    def _acknowledge(
        self, link: GatewayLink, records: Iterable[tuple[str, int]], lanes: Iterable[int]
    ) -> None:
        """A gateway that names no lanes means the request's oldest."""
        for (request_id, attempt), lane in zip_longest(records, lanes):
            if link.usage.acknowledge(request_id, attempt, lane):
                continue
            entry = self.streams.of_request(request_id, attempt)
            if entry is not None and entry.gateway == link.index:
                waiting = entry.lanes - entry.early_acks
                if lane in waiting or (lane is None and waiting):
                    entry.early_acks.add(min(waiting) if lane is None else lane)

    # --- to gateways -----------------------------------------------------------------------------

    def _send_bundles(self, link: GatewayLink, digests: Iterable[str]) -> None:
        for digest in digests:
            encoded = self._bundles.get(digest)
            if encoded is None:
                self._log.warning("unknown_bundle_wanted", gateway=link.url, digest=digest)
            else:
                link.send_bundle(digest, encoded)

    def _send_snapshot(self, link: GatewayLink, index: int) -> None:
        if link.is_open:
            events = self._mirrors[index].snapshot()
            self._send_all(link, link.pages.frames(index, events, snapshot=True))

    def _send_rare(self, link: GatewayLink | None, engine: int, rare: list[Rare]) -> None:
        if link is not None and rare:
            link.send(encode(Step(engine, 0, [], [], rare)))

    def _send_all(self, link: GatewayLink, messages: Iterable[NodeToGateway]) -> None:
        for message in messages:
            link.send(encode(message))

    def _broadcast(self, message: NodeToGateway) -> None:
        data = encode(message)
        for link in self.links:
            link.send(data)

    def _free_channel(self) -> int:
        """A number that no open link has and that was given back longest ago: late frames of a
        cut link must not reach the next one."""
        for step in range(1, MAX_CHANNEL + 1):
            channel = (self._last_channel + step - 1) % MAX_CHANNEL + 1
            if channel not in self._link_by_channel:
                self._last_channel = channel
                return channel
        raise AssertionError("more links than channels")

    def _notice_ready(self) -> None:
        """Once: every engine is loaded and a gateway knows of it."""
        if self._on_ready is None or len(self._up) < len(self.engines):
            return
        if any(link.is_open for link in self.links):
            told, self._on_ready = self._on_ready, None
            told()
