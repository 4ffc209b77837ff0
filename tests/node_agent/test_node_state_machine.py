"""A node between two gateways and two engines, driven by a machine that looks for trouble.

Engines and links are fakes that move a message only when the machine says so; the node, its
outboxes, its lanes and its backlogs are the real ones.
"""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.framing import FrameReader
from node_agent.identity import Identity
from node_agent.node import Node
from node_agent.outbox import EngineOutbox
from node_agent.reports import PageStream, UsageBacklog
from policies.contract import wire
from tests.node_agent.conftest import info, submit

ENGINES = (0, 1)
GATEWAYS = (0, 1)


class FakeEngine:
    """Reads its outbox when told to; its own messages wait in `sent` until delivered."""

    def __init__(self, index: int, node: Node) -> None:
        self.index = index
        self.outbox = EngineOutbox()
        self.info: wire.EngineInfo | None = None
        self.is_silent = False
        self.silence_s = 0.0
        self.running: dict[tuple[int, int], wire.Submit] = {}
        self.sent: deque[tuple[str, int, object]] = deque()
        self._node = node
        self._reader = FrameReader()

    def pump(self) -> None:
        """The machine pumps."""

    def up(self) -> None:
        self.info = info(self.index)
        self._node.on_up(self.index, wire.EngineUp(self.info, 0.1))

    def die(self) -> None:
        """What a killed process had written is still read: the end of file comes after it."""
        while self.sent:
            self.deliver()
        self.info = None
        self.outbox.clear()
        self.running.clear()
        self._reader = FrameReader()
        self._node.on_lost(self.index, "killed")

    def read(self) -> None:
        data = self.outbox.pop()
        if data is None:
            return
        for channel, message in self._reader.feed(data):
            match wire.decode_from_agent(message):
                case wire.Submit() as new:
                    for lane in new.lanes:
                        assert (channel, lane) not in self.running, "a lane that is in use"
                        self.running[channel, lane] = new
                case wire.Abort(lanes=lanes):
                    for at, lane in list(self.running):
                        if at == channel and (not lanes or lane in lanes):
                            self.end(at, lane, "abort")
                case wire.FinishLane(lane=lane):
                    if (channel, lane) in self.running:
                        self.end(channel, lane, "stop")

    def end(self, channel: int, lane: int, reason: wire.FinishReason) -> None:
        new = self.running.pop((channel, lane))
        usage = wire.Usage(1, 0, 1)
        step = wire.Step(self.index, 1, [], [], [wire.Finished(lane, reason, usage)])
        self.sent.append(("step", channel, wire.encode(step)))
        record = wire.UsageRecord(new.request_id, new.attempt, lane, reason, usage)
        self.sent.append(("usage", 0, record))

    def deliver(self) -> None:
        kind, channel, message = self.sent.popleft()
        if kind == "usage":
            self._node.on_usage(self.index, message)
        else:
            self._node.on_step(self.index, channel, message)


class FakeLink:
    def __init__(self, index: int) -> None:
        self.index = index
        self.url = f"ws://{index}"
        self.channel = 0
        self.is_open = False
        self.usage = UsageBacklog()
        self.pages = PageStream()
        # What the gateway believes, of the link that is open now.
        self.live: dict[int, tuple[str, int]] = {}
        self.ended: Counter[tuple[str, int, int]] = Counter()  # by request, attempt and lane
        self.acknowledged: set[tuple[str, int, int]] = set()

    def send(self, data: bytes) -> None:
        if not self.is_open:
            return
        message = wire.decode_from_node(data)
        if isinstance(message, wire.Step):
            for rare in message.rare:
                assert rare.lane in self.live, "an end for a lane that is not live"
                self.ended[(*self.live.pop(rare.lane), rare.lane)] += 1

    def send_report(self, data: bytes) -> None:
        """Reports are values that are tested elsewhere."""

    def send_bundle(self, digest: str, encoded: bytes) -> None:
        """No bundle is asked for here."""


class NodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.node = Node(Identity("n", 1), "mixed", bundles={}, clock=lambda: 0.0)
        self.engines = [FakeEngine(index, self.node) for index in ENGINES]
        self.links = [FakeLink(index) for index in GATEWAYS]
        self.node.engines = self.engines  # type: ignore[assignment]
        self.node.links = self.links  # type: ignore[assignment]
        self.number = 0
        self.owner: dict[str, int] = {}
        for engine in self.engines:
            engine.up()
        for link in self.links:
            self.open(link)

    def open(self, link: FakeLink) -> None:
        self.node.hello(link)  # type: ignore[arg-type]
        link.is_open = True
        link.live.clear()
        self.node.on_open(link, wire.Welcome(1, "g"))  # type: ignore[arg-type]

    def tell(self, link: FakeLink, message: wire.GatewayToNode) -> None:
        if link.is_open:
            self.node.on_message(link, message)  # type: ignore[arg-type]

    @rule(gateway=st.sampled_from(GATEWAYS), engine=st.integers(0, 2), count=st.integers(1, 3))
    def submit(self, gateway: int, engine: int, count: int) -> None:
        link = self.links[gateway]
        lanes = tuple([lane for lane in range(40) if lane not in link.live][:count])
        self.number += 1
        message = submit(f"r{self.number}", "x", lanes=lanes, engine=engine)
        self.owner[message.request_id] = gateway
        if link.is_open:
            link.live.update({lane: (message.request_id, 0) for lane in lanes})
        self.tell(link, message)
        self.tell(link, message)  # twice is once

    @rule(gateway=st.sampled_from(GATEWAYS), lanes=st.sets(st.integers(0, 5), min_size=1))
    def abort(self, gateway: int, lanes: set[int]) -> None:
        self.tell(self.links[gateway], wire.Abort(tuple(lanes)))

    @rule(gateway=st.sampled_from(GATEWAYS), lane=st.integers(0, 5))
    def finish(self, gateway: int, lane: int) -> None:
        self.tell(self.links[gateway], wire.FinishLane(lane, 1))

    @rule(engine=st.sampled_from(ENGINES), count=st.integers(1, 4))
    def engine_reads(self, engine: int, count: int) -> None:
        for _ in range(count):
            self.engines[engine].read()

    @rule(engine=st.sampled_from(ENGINES), data=st.data())
    def stream_ends(self, engine: int, data: st.DataObject) -> None:
        running = self.engines[engine].running
        if running:
            channel, lane = data.draw(st.sampled_from(sorted(running)))
            self.engines[engine].end(channel, lane, "stop")

    @rule(engine=st.sampled_from(ENGINES), count=st.integers(1, 4))
    def agent_reads(self, engine: int, count: int) -> None:
        for _ in range(min(count, len(self.engines[engine].sent))):
            self.engines[engine].deliver()

    @rule(engine=st.sampled_from(ENGINES))
    def engine_dies_or_comes_up(self, engine: int) -> None:
        one = self.engines[engine]
        if one.info is None:
            one.up()
        else:
            one.die()

    @rule(gateway=st.sampled_from(GATEWAYS))
    def link_is_cut_or_comes_back(self, gateway: int) -> None:
        link = self.links[gateway]
        if link.is_open:
            link.is_open = False
            link.live.clear()
            self.node.on_cut(link)  # type: ignore[arg-type]
        else:
            self.open(link)

    @rule(drain=st.booleans(), gateway=st.sampled_from(GATEWAYS))
    def drain(self, drain: bool, gateway: int) -> None:
        self.tell(self.links[gateway], wire.Drain(drain))

    @rule(gateway=st.sampled_from(GATEWAYS), data=st.data())
    def acknowledge_a_lane_by_its_end(self, gateway: int, data: st.DataObject) -> None:
        """Before or after its usage record came, and perhaps again."""
        link = self.links[gateway]
        if link.is_open and link.ended:
            request_id, attempt, lane = data.draw(st.sampled_from(sorted(link.ended)))
            self.tell(link, wire.UsageAck(((request_id, attempt),), (lane,)))
            link.acknowledged.add((request_id, attempt, lane))

    @precondition(lambda self: any(len(link.usage) for link in self.links))
    @rule()
    def acknowledge(self) -> None:
        for link in filter(lambda link: link.is_open, self.links):
            for record in link.usage.all(0.0):
                request = record.request_id, record.attempt
                self.tell(link, wire.UsageAck((request,), (record.lane,)))
                self.tell(link, wire.UsageAck((request,), (record.lane,)))  # twice is once
                assert record not in link.usage.all(0.0)

    @invariant()
    def no_stream_ends_twice(self) -> None:
        for link in self.links:
            assert all(count == 1 for count in link.ended.values())

    @invariant()
    def what_was_acknowledged_is_not_told_again_and_nothing_else_is_lost(self) -> None:
        for link in self.links:
            waiting = {
                (record.request_id, record.attempt, record.lane) for record in link.usage.all(0.0)
            }
            assert not waiting & link.acknowledged
            assert len(waiting) == len(link.usage)

    @invariant()
    def usages_wait_for_the_gateway_that_submitted(self) -> None:
        for link in self.links:
            for record in link.usage.all(0.0):
                assert self.owner[record.request_id] == link.index

    def teardown(self) -> None:
        """Let everything arrive: then no lane is live and no book has an entry."""
        for engine in self.engines:
            for _ in range(10_000):
                engine.read()
                if not len(engine.outbox._urgent) and not len(engine.outbox._submits):
                    break
            for channel, lane in list(engine.running):
                engine.end(channel, lane, "length")
            while engine.sent:
                engine.deliver()
        assert [link.live for link in self.links] == [{}, {}]
        assert len(self.node.streams) == 0
        assert not self.node.streams._by_request
        assert not self.node.streams._by_lane


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestNodeMachineFullCount(NodeMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=60, deadline=None)
