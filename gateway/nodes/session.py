"""One link's life: its lanes, its out-queue, and the dispatch of step frames to flows."""

from __future__ import annotations

from gateway.nodes.bundles import Assembly
from gateway.nodes.legs import Leg
from gateway.nodes.outbox import Outbox
from gateway.nodes.streams import MAX_UNREAD_TOKENS, Flow, Lane
from policies.contract import wire
from policies.contract.wire import (
    Abort,
    Failed,
    Finished,
    FinishLane,
    Logprobs,
    PromptLogprobs,
    Role,
    Started,
    Step,
)
from policies.residency import slower_tokens, tokens_by_tier

MAX_ACKS_A_FRAME = 1024


class Session:
    """A lane is free again only after the node's terminal event for it.

    live: number → lane that still takes tokens; legs: number → prefill half of a split, which takes
    none; ending: number → (request_id, attempt) of lanes that ended here while the node does not
    know yet. Frames for other lanes are late and ignored.
    """

    def __init__(self, *, node_id: str, opened_at: float, outbox: Outbox) -> None:
        self.node_id = node_id
        self.opened_at = opened_at
        self.outbox = outbox
        self.live: dict[int, Lane] = {}
        self.legs: dict[int, Leg] = {}
        self.ending: dict[int, tuple[str, int]] = {}
        self.assemblies: dict[str, Assembly] = {}  # bundles asked for on this link
        self.late_tokens = 0
        self.skipped_frames = 0
        self._free: list[int] = []
        self._num_lanes = 0
        self._acks: list[tuple[str, int]] = []
        self._acked_lanes: list[int] = []

    @property
    def in_flight(self) -> int:
        """Sequences the node may still be busy with."""
        return len(self.live) + len(self.legs) + len(self.ending)

    def flows(self) -> list[Flow]:
        """Those with a live lane."""
        return list(dict.fromkeys([lane.flow for lane in self.live.values()]))

    def submit(
        self, flow: Flow, engine: int, deadline_s: float, transfer: bytes | None = None
    ) -> None:
        """Give the flow's lanes their numbers and queue its Submit. transfer: how its prompt comes
        from elsewhere."""
        for lane in flow.lanes:
            lane.number = self._take_number()
            self.live[lane.number] = lane
        flow.session = self
        numbers = tuple([lane.number for lane in flow.lanes])
        role: Role = "mixed" if transfer is None else "decode"
        self._send_submit(flow, engine, numbers, deadline_s, role, transfer)

    def submit_leg(self, leg: Leg, engine: int, deadline_s: float, transfer: bytes) -> None:
        """The same for the half that computes the prompt and tells nothing of it here."""
        leg.number = self._take_number()
        self.legs[leg.number] = leg
        leg.session = self
        self._send_submit(leg.flow, engine, (leg.number,), deadline_s, "prefill", transfer)

    def _send_submit(
        self,
        flow: Flow,
        engine: int,
        numbers: tuple[int, ...],
        deadline_s: float,
        role: Role,
        transfer: bytes | None,
    ) -> None:
        dispatch = flow.dispatch
        message = wire.Submit(
            request_id=dispatch.request_id,
            attempt=flow.attempt,
            engine=engine,
            lanes=numbers,
            prompt=wire.pack_ids(dispatch.prompt),
            salt=dispatch.salt,
            sampling=dispatch.sampling,
            deadline_s=deadline_s,
            role=role,
            transfer=transfer,
            retention_s=dispatch.retention_s,
        )
        self.outbox.send_submit(numbers[0], wire.encode(message))

    def _take_number(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_lanes += 1
        return self._num_lanes - 1

    def abort(self, flow: Flow) -> None:
        """Tell the node to stop what is left of the flow.

        A Submit that was not sent yet is taken back instead: its end would overtake it.
        """
        live = [lane for lane in flow.lanes if self.live.get(lane.number) is lane]
        flow.session = None
        # While a Submit waits, its first lane is live; later that number may be another's.
        if live and live[0] is flow.lanes[0] and self.outbox.withdraw(live[0].number):
            for lane in live:
                self._release(lane)
        elif live:
            for lane in live:
                self._leave(lane)
            self.outbox.send_urgent(wire.encode(Abort(tuple([lane.number for lane in live]))))

    def abort_leg(self, leg: Leg) -> None:
        """As abort, of a leg that lives here."""
        del self.legs[leg.number]
        if self.outbox.withdraw(leg.number):
            self._free.append(leg.number)
        else:
            self.ending[leg.number] = (leg.flow.dispatch.request_id, leg.attempt)
            self.outbox.send_urgent(wire.encode(Abort((leg.number,))))

    def finish(self, lane: Lane, keep: int) -> None:
        """Tell the node to end one lane, on which tokens came, and bill keep of them."""
        self._leave(lane)
        self.outbox.send_urgent(wire.encode(FinishLane(lane.number, keep)))

    def on_step(self, step: Step) -> list[Lane]:
        """Hand tokens to their lanes and return these, those with a first token in front.

        The others start at another place with every step, else the same one would always be
        woken last.
        """
        get = self.live.get
        for number, tokens in step.computed:
            lane = get(number)
            one = lane.flow if lane is not None else self.legs.get(number)
            if one is not None and one.engine is not None:
                one.engine.advance(one, tokens, step.step)
        first: list[Lane] = []
        others: list[Lane] = []
        for number, token in zip(step.lanes, step.tokens, strict=True):
            lane = get(number)
            if lane is None:
                self.late_tokens += 1
                continue
            lane.unread.append(token)
            if lane.produced:
                others.append(lane)
            else:
                first.append(lane)
                if not lane.flow.is_answered:
                    lane.flow.answered(step.step)
            lane.produced += 1
        if others:
            start = step.step % len(others)
            first += others[start:]
            first += others[:start]
        return first

    def wake(self, lanes: list[Lane]) -> list[Flow]:
        """Wake readers in order; returns flows whose reader is too far behind."""
        behind: list[Flow] = []
        for lane in lanes:
            future = lane.waiter.future
            if future is None:
                if len(lane.unread) > MAX_UNREAD_TOKENS:
                    behind.append(lane.flow)
            elif not future.done():
                future.set_result(None)
        return behind

    def started(self, event: Started) -> None:
        """The first lane computes the prompt, or finds it cached; the others share what it has."""
        lane = self.live.get(event.lane)
        if lane is not None and lane.index == 0:
            flow = lane.flow
            flow.cached_tokens = event.cached_tokens
            flow.queue_s = event.queue_s
            flow.cached_by_tier = tokens_by_tier(
                event.cached_tokens, slower_tokens(event), slowest=event.tier
            )

    def on_logprobs(self, event: Logprobs | PromptLogprobs) -> None:
        lane = self.live.get(event.lane)
        if lane is None:
            return
        if isinstance(event, Logprobs):
            lane.logprobs += event.entries
        elif event.start == len(lane.flow.prompt_logprobs) + 1:  # else told twice, or out of order
            lane.flow.prompt_logprobs += event.entries

    def ended(self, event: Finished | Failed) -> Lane | Leg | None:
        """The node's terminal event: the number is free. Returns who had it, if still here."""
        number = event.lane
        lane = self.live.get(number)
        if lane is not None:
            self.acknowledge(lane.flow.dispatch.request_id, lane.flow.attempt, number)
            self._release(lane)
            self._count_tiers(lane, event.usage)
            return lane
        leg = self.legs.pop(number, None)
        if leg is not None:
            leg.session = None
            self.acknowledge(leg.flow.dispatch.request_id, leg.attempt, number)
            self._free.append(number)
            return leg
        record = self.ending.pop(number, None)
        if record is None:
            self.late_tokens += 1
        else:
            self.acknowledge(*record, number)
            self._free.append(number)
        return None

    def _count_tiers(self, lane: Lane, usage: wire.Usage) -> None:
        """The first lane's end knows the split for certain; a start may have told the slowest."""
        flow = lane.flow
        slower = slower_tokens(usage)
        if lane.index == 0 and usage.cached_tokens == flow.cached_tokens and any(slower.values()):
            flow.cached_by_tier = tokens_by_tier(usage.cached_tokens, slower)

    def acknowledge(self, request_id: str, attempt: int, number: int) -> None:
        """The node may forget this final usage; sent in batches by flush_acks."""
        self._acks.append((request_id, attempt))
        self._acked_lanes.append(number)
        if len(self._acks) >= MAX_ACKS_A_FRAME:
            self.flush_acks()

    def flush_acks(self) -> None:
        if self._acks:
            message = wire.UsageAck(tuple(self._acks), tuple(self._acked_lanes))
            self.outbox.send_urgent(wire.encode(message))
            self._acks, self._acked_lanes = [], []

    def cut(self) -> tuple[list[Flow], list[Leg]]:
        """The link is gone: forget all lanes; the flows that had live ones, and the legs."""
        flows, legs = self.flows(), list(self.legs.values())
        self.live.clear()
        self.legs.clear()
        self.ending.clear()
        for flow in flows:
            flow.session = None
        for leg in legs:
            leg.session = None
        return flows, legs

    def _leave(self, lane: Lane) -> None:
        del self.live[lane.number]
        self.ending[lane.number] = (lane.flow.dispatch.request_id, lane.flow.attempt)

    def _release(self, lane: Lane) -> None:
        del self.live[lane.number]
        self._free.append(lane.number)
