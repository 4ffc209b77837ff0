"""One link's life: its lanes, its out-queue, and the dispatch of step frames to flows."""

from __future__ import annotations

from gateway.nodes.bundles import Assembly
from gateway.nodes.outbox import Outbox
from gateway.nodes.streams import MAX_UNREAD_TOKENS, Flow
from policies.contract import wire
from policies.contract.wire import Abort, Failed, Finished, FinishLane, Started, Step

MAX_ACKS_A_FRAME = 1024


class Session:
    """A lane is free again only after the node's terminal event for it.

    live: lane → flow that still takes tokens; ending: lane → (request_id, attempt) of flows that
    ended here while the node does not know yet. Frames for other lanes are late and ignored.
    """

    def __init__(self, *, node_id: str, opened_at: float, outbox: Outbox) -> None:
        self.node_id = node_id
        self.opened_at = opened_at
        self.outbox = outbox
        self.live: dict[int, Flow] = {}
        self.ending: dict[int, tuple[str, int]] = {}
        self.assemblies: dict[str, Assembly] = {}  # bundles asked for on this link
        self.late_tokens = 0
        self.skipped_frames = 0
        self._free: list[int] = []
        self._num_lanes = 0
        self._acks: list[tuple[str, int]] = []

    @property
    def in_flight(self) -> int:
        """Sequences the node may still be busy with."""
        return len(self.live) + len(self.ending)

    def submit(self, flow: Flow, engine: int, deadline_s: float) -> None:
        """Give the flow a lane and queue its Submit."""
        if self._free:
            lane = self._free.pop()
        else:
            lane = self._num_lanes
            self._num_lanes += 1
        flow.session, flow.lane = self, lane
        self.live[lane] = flow
        dispatch = flow.dispatch
        message = wire.Submit(
            request_id=dispatch.request_id,
            attempt=flow.attempt,
            engine=engine,
            lanes=(lane,),
            prompt=wire.pack_ids(dispatch.prompt),
            salt=dispatch.salt,
            sampling=dispatch.sampling,
            deadline_s=deadline_s,
        )
        self.outbox.send_submit(lane, wire.encode(message))

    def abort(self, flow: Flow) -> None:
        """Tell the node to stop."""
        self._tell_end(flow, Abort((flow.lane,)))

    def finish(self, flow: Flow, keep: int) -> None:
        """Tell the node to end the stream and bill keep completion tokens."""
        self._tell_end(flow, FinishLane(flow.lane, keep))

    def _tell_end(self, flow: Flow, message: Abort | FinishLane) -> None:
        """A Submit that was not sent yet is taken back instead: its end would overtake it."""
        if self.outbox.withdraw(flow.lane):
            self._release(flow)
        else:
            self._leave(flow)
            self.outbox.send_urgent(wire.encode(message))

    def on_step(self, step: Step) -> list[Flow]:
        """Hand tokens to their flows and return these, streams with a first token in front.

        The others start at another place with every step, else the same one would always be
        woken last.
        """
        get = self.live.get
        first: list[Flow] = []
        others: list[Flow] = []
        for lane, token in zip(step.lanes, step.tokens, strict=True):
            flow = get(lane)
            if flow is None:
                self.late_tokens += 1
                continue
            flow.unread.append(token)
            if flow.produced:
                others.append(flow)
            else:
                first.append(flow)
                if flow.engine is not None:
                    flow.engine.computed(flow)
            flow.produced += 1
        if others:
            start = step.step % len(others)
            first += others[start:]
            first += others[:start]
        return first

    def wake(self, flows: list[Flow]) -> list[Flow]:
        """Wake readers in order; returns flows whose reader is too far behind."""
        behind: list[Flow] = []
        for flow in flows:
            waiter = flow.waiter
            if waiter is None:
                if len(flow.unread) > MAX_UNREAD_TOKENS:
                    behind.append(flow)
            elif not waiter.done():
                waiter.set_result(None)
        return behind

    def started(self, event: Started) -> None:
        flow = self.live.get(event.lane)
        if flow is not None:
            flow.cached_tokens = event.cached_tokens
            flow.queue_s = event.queue_s
            flow.tier = event.tier

    def ended(self, event: Finished | Failed) -> Flow | None:
        """The node's terminal event: the lane is free. Returns the flow if it was still live."""
        lane = event.lane
        flow = self.live.get(lane)
        if flow is not None:
            self.acknowledge(flow.dispatch.request_id, flow.attempt)
            self._release(flow)
            return flow
        record = self.ending.pop(lane, None)
        if record is None:
            self.late_tokens += 1
        else:
            self.acknowledge(*record)
            self._free.append(lane)
        return None

    def acknowledge(self, request_id: str, attempt: int) -> None:
        """The node may forget this final usage; sent in batches by flush_acks."""
        self._acks.append((request_id, attempt))
        if len(self._acks) >= MAX_ACKS_A_FRAME:
            self.flush_acks()

    def flush_acks(self) -> None:
        if self._acks:
            self.outbox.send_urgent(wire.encode(wire.UsageAck(tuple(self._acks))))
            self._acks = []

    def cut(self) -> list[Flow]:
        """The link is gone: forget all lanes and return the flows that were live."""
        flows = list(self.live.values())
        self.live.clear()
        self.ending.clear()
        for flow in flows:
            flow.session = None
        return flows

    def _leave(self, flow: Flow) -> None:
        del self.live[flow.lane]
        self.ending[flow.lane] = (flow.dispatch.request_id, flow.attempt)
        flow.session = None

    def _release(self, flow: Flow) -> None:
        del self.live[flow.lane]
        self._free.append(flow.lane)
        flow.session = None
