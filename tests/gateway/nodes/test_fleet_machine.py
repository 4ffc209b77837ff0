"""Any order of joins, steps, reports, cuts, aborts and late frames leaves the books right."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gateway.nodes.engines import Engine
from gateway.nodes.legs import Leg
from gateway.nodes.placement import NoCapacity, NoNode
from gateway.nodes.streams import MAX_UNREAD_TOKENS, Flow, Stream
from policies.contract import wire
from policies.routing import RoutingPolicy
from tests.gateway.nodes.fake_node import Clock, FakeNode, fleet, info, keys, request
from tests.state_machines import run_machine

NODES = ("n1", "n2", "n3", "n4")
node_ids = st.sampled_from(NODES)
picks = st.integers(0, 2**16)
keys_or_none = st.sampled_from([None, b"a", b"b"])
ttft_or_none = st.sampled_from([None, None, 0.5, 4.0])


def credit(flow: Flow | Leg) -> int:
    return 0 if flow.credit is None else flow.credit.tokens


def computing(flow: Flow) -> Engine | None:
    """The engine for which it waits."""
    return None if flow.queued is None else flow.queued.what.computing.engine


class Fleet(RuleBasedStateMachine):
    """The model: what each node was told, and what each stream's owner has read."""

    @initialize(policy=st.sampled_from(RoutingPolicy), linked=st.integers(0, 4))
    def start(self, policy: RoutingPolicy, linked: int) -> None:
        self.clock = Clock()
        self.fleet = fleet(self.clock, policy=policy, max_in_flight=6)
        self.nodes = {name: FakeNode(self.fleet, name) for name in NODES}
        for name in NODES[:linked]:
            self.nodes[name].join()
        self.streams: list[Stream] = []
        self.ends: dict[tuple[int, int], Any] = {}  # by stream and lane
        self.requests = 0

    def linked(self, name: str) -> FakeNode | None:
        node = self.nodes[name]
        if node.session is None or node.session.outbox.closing is not None:
            return None
        return node

    def lane(self, node: FakeNode, pick: int) -> int:
        """A lane the node knows, or sometimes one that nobody gave."""
        lanes = [*node.request_by_lane, 1000]
        return lanes[pick % len(lanes)]

    @rule(name=node_ids, restarted=st.booleans())
    def join(self, name: str, restarted: bool) -> None:
        self.nodes[name].epoch += restarted
        self.nodes[name].join()

    @rule(name=node_ids)
    def cut(self, name: str) -> None:
        if self.linked(name):
            self.nodes[name].cut()

    @rule(name=node_ids, down=st.booleans(), uncached=st.integers(0, 5000))
    def report(self, name: str, down: bool, uncached: int) -> None:
        if node := self.linked(name):
            node.report(state="down" if down else "ready", uncached_tokens=uncached)

    @rule(seconds=st.sampled_from([0.05, 0.9, 5.2]))
    def time_passes(self, seconds: float) -> None:
        for _ in range(8 if seconds > 1 else 1):
            self.clock.now += seconds / 8 if seconds > 1 else seconds
            self.fleet.tick()

    @rule(
        tokens=st.sampled_from([1, 64, 65, 700, 3000]),
        key=keys_or_none,
        n=st.integers(1, 4),
        ttft_s=ttft_or_none,
    )
    def dispatch(self, tokens: int, key: bytes | None, n: int, ttft_s: float | None) -> None:
        self.ask(tokens, key, n, ttft_s)

    @rule(tokens=st.sampled_from([400, 700, 3000]), count=st.integers(2, 5), ttft_s=ttft_or_none)
    def many_come(self, tokens: int, count: int, ttft_s: float | None) -> None:
        for _ in range(count):
            self.ask(tokens, None, 1, ttft_s)

    def ask(self, tokens: int, key: bytes | None, n: int, ttft_s: float | None) -> None:
        self.requests += 1
        try:
            stream = self.fleet.dispatch(
                request(
                    self.requests,
                    tokens=tokens,
                    tenant=f"t{self.requests % 3}",
                    affinity_key=key,
                    deadline_s=30.0 if self.requests % 4 else 3.0,
                    n=n,
                    ttft_deadline_s=ttft_s,
                )
            )
        except (NoNode, NoCapacity):
            return
        self.streams.append(stream)

    @rule(name=node_ids)
    def read(self, name: str) -> None:
        if node := self.linked(name):
            node.read()

    @rule(name=node_ids, chosen=st.lists(picks, max_size=6), start=st.booleans())
    def step(self, name: str, chosen: list[int], start: bool) -> None:
        if node := self.linked(name):
            lanes = [self.lane(node, pick) for pick in chosen]
            rare = [wire.Started(lane, 0) for lane in lanes] if start else []
            node.step(lanes, rare=rare)

    @rule(name=node_ids, chosen=st.lists(picks, max_size=3), computed=st.integers(0, 800))
    def prompts_advance(self, name: str, chosen: list[int], computed: int) -> None:
        if node := self.linked(name):
            node.step([], computed=[(self.lane(node, pick), computed) for pick in chosen])

    @rule(name=node_ids, pick=picks, twice=st.booleans())
    def finish_at_node(self, name: str, pick: int, twice: bool) -> None:
        if node := self.linked(name):
            lane = self.lane(node, pick)
            node.end(lane, "abort" if lane in node.aborted else "length")
            if twice and lane not in node.request_by_lane:
                node.end(lane)

    @rule(name=node_ids, pick=picks, code=st.sampled_from(["engine_lost", "node_draining", "bad"]))
    def fail_at_node(self, name: str, pick: int, code: str) -> None:
        if node := self.linked(name):
            node.fail(self.lane(node, pick), code)

    @rule(name=node_ids, junk=st.binary(max_size=12))
    def junk(self, name: str, junk: bytes) -> None:
        node = self.linked(name)
        if node is not None and node.session is not None:
            self.fleet.receive(node.session, junk)

    @rule(name=node_ids)
    def a_lane_floods_its_slow_reader(self, name: str) -> None:
        if node := self.linked(name):
            node.step([self.lane(node, 0)] * (MAX_UNREAD_TOKENS + 1))

    @rule(name=node_ids, first=st.integers(0, 9), names=st.lists(st.integers(0, 20), max_size=5))
    def page_events(self, name: str, first: int, names: list[int]) -> None:
        if node := self.linked(name):
            stored = [wire.PageStored(key[:16]) for key in keys(*names)]
            node.send(wire.PageEvents(0, first, list(stored), snapshot=first == 0))

    @rule(name=node_ids, drain=st.booleans())
    def drain(self, name: str, drain: bool) -> None:
        if self.nodes[name].session is not None and name in {
            view.node_id for view in self.fleet.nodes()
        }:
            self.fleet.drain(name, drain)

    @rule(name=node_ids, pages=st.integers(50, 60))
    def engine_restarts(self, name: str, pages: int) -> None:
        if node := self.linked(name):
            node.infos = (info(num_pages=pages),)
            node.send(wire.EnginesChanged(node.infos))

    @precondition(lambda self: self.streams)
    @rule(pick=picks, keep=st.integers(0, 3))
    def end_by_owner(self, pick: int, keep: int) -> None:
        stream = self.streams[pick % len(self.streams)]
        lane = stream._flow.lanes[pick % len(stream._flow.lanes)]
        if not keep:
            stream.abort()
        elif lane.produced >= keep:
            stream.finish(lane.index, keep)

    @precondition(lambda self: self.streams)
    @rule(pick=picks)
    def read_stream(self, pick: int) -> None:
        index = pick % len(self.streams)
        for burst in self.streams[index].take():
            lane = index, burst.index
            if lane in self.ends:
                assert burst.tokens == [], "tokens after the end"
                assert burst.end is self.ends[lane], "a stream ended twice"
            elif burst.end is not None:
                self.ends[lane] = burst.end

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "streams"):
            return
        flows = [stream._flow for stream in self.streams]
        for flow in flows:
            live = [] if flow.session is None else list(flow.session.live.values())
            for lane in flow.lanes:
                is_live = lane in live or flow.queued is not None
                assert is_live == (lane.end is None), "live in one place until it ends"
            assert flow.queued is None or flow.session is None, "sent and queued"
            assert flow.num_live == sum(lane.end is None for lane in flow.lanes)
            assert not flow.is_over or credit(flow) == flow.seated_tokens == 0
            assert 1 <= flow.attempt <= 3
            assert flow.attempt == len(flow.tries)
            if len({*map(type, [lane.end for lane in flow.lanes])} & {type(None), wire.Failed}) > 1:
                raise AssertionError("a request fails whole")
        for node in self.fleet._node_by_id.values():
            session = node.session
            if session is not None:
                used = [*session.live, *session.legs, *session.ending, *session._free]
                assert sorted(used) == list(range(session._num_lanes)), "lanes are unique"
                assert session.in_flight <= 6
            for engine in node.engine_by_index.values():
                legs = [flow.leg for flow in flows if flow.leg is not None]
                ours = sum(credit(one) for one in (*flows, *legs) if one.engine is engine)
                assert engine.backlog.ours == ours
                seated = sum(flow.seated_tokens for flow in flows if flow.engine is engine)
                assert engine.seated_tokens == seated
                queued = [flow for flow in flows if computing(flow) is engine]
                assert {flow.queued for flow in queued} == set(engine.queue.entries())
                assert len(engine.queue) == len(queued)
                waiting = sum(flow.queued.tokens for flow in queued if flow.queued is not None)
                assert engine.queue.tokens == engine.backlog.queued == waiting
            assert node.num_queued == sum(
                len(flow.lanes) * (flow.queued.what.seat.node is node)
                + any(one is node for one in flow.queued.what.nodes[1:])
                for flow in flows
                if flow.queued is not None
            )

    def teardown(self) -> None:
        if not hasattr(self, "streams"):
            return
        for stream in self.streams:
            stream.abort()
            assert all(lane.end is not None for lane in stream._flow.lanes)
        for node in self.nodes.values():
            if self.linked(node.node_id):
                for lane in node.lanes():
                    node.end(lane, "abort")
        for view in self.fleet.nodes():
            assert view.in_flight == 0
            assert all(engine.outstanding_tokens == 0 for engine in view.engines)
        for node in self.fleet._node_by_id.values():
            assert node.num_queued == 0
            for engine in node.engine_by_index.values():
                assert engine.seated_tokens == engine.backlog.queued == engine.queue.tokens == 0
                assert not len(engine.queue)
        assert not self.fleet.queues


def test_fleet_machine() -> None:
    run_machine(Fleet, 60)


@pytest.mark.slow
def test_fleet_machine_full() -> None:
    run_machine(Fleet, int(os.environ.get("KAGARI_EXAMPLES", "3000")))
