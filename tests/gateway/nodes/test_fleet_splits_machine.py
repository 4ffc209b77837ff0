"""The fleet's machine again, over nodes of several roles: legs come, fail and end in any order."""

from __future__ import annotations

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from policies.contract import wire
from policies.pairing import SplitMode
from policies.routing import RoutingPolicy
from tests.gateway.nodes.fake_node import Clock, FakeNode, fleet, info
from tests.gateway.nodes.test_fleet_machine import (
    Fleet,
    credit,
    keys_or_none,
    node_ids,
    picks,
    ttft_or_none,
)
from tests.state_machines import run_machine

ROLES: dict[str, wire.Role] = {"n1": "prefill", "n2": "decode", "n3": "decode"}
CODES = ["transfer_lost", "transfer_refused", "engine_lost", "node_draining", "bad"]


class SplitFleet(Fleet):
    """Every request that may be is split; tokens also come on lanes that should have none."""

    @initialize(policy=st.sampled_from(RoutingPolicy), fourth=st.sampled_from(["prefill", "mixed"]))
    def start(self, policy: RoutingPolicy, fourth: wire.Role) -> None:
        self.clock = Clock()
        self.fleet = fleet(self.clock, policy=policy, max_in_flight=6, split=SplitMode.ALWAYS)
        roles = {**ROLES, "n4": fourth}
        self.nodes = {
            name: FakeNode(self.fleet, name, info(peer=f"{name}:1"), role=role)
            for name, role in roles.items()
        }
        for node in self.nodes.values():
            node.join()
        self.streams = []
        self.ends = {}
        self.requests = 0

    @rule(
        tokens=st.sampled_from([64, 700, 3000]),
        key=keys_or_none,
        n=st.sampled_from([1, 1, 1, 2]),
        ttft_s=ttft_or_none,
    )
    def dispatch(self, tokens: int, key: bytes | None, n: int, ttft_s: float | None) -> None:
        self.ask(tokens, key, n, ttft_s)

    def half(self, pick: int) -> tuple[FakeNode, int, FakeNode, int] | None:
        """A split that waits for its first token: its nodes and its lanes there."""
        waiting = [
            flow
            for flow in [stream._flow for stream in self.streams]
            if flow.leg is not None and flow.leg.session is not None and flow.is_untouched
        ]
        if not waiting:
            return None
        flow = waiting[pick % len(waiting)]
        prefill, decode = self.nodes[flow.leg.node_id], self.nodes[flow.tries[-1].node_id]
        for node in (prefill, decode):
            node.read()
        return prefill, flow.leg.number, decode, flow.lanes[0].number

    @rule(pick=picks, code=st.sampled_from(CODES), by_decode=st.booleans())
    def a_half_fails(self, pick: int, code: str, by_decode: bool) -> None:
        if found := self.half(pick):
            node, lane = found[2:] if by_decode else found[:2]
            node.fail(lane, code)

    @rule(pick=picks, reason=st.sampled_from(["stop", "length", "length", "abort"]))
    def prefill_is_done(self, pick: int, reason: wire.FinishReason) -> None:
        if found := self.half(pick):
            found[0].end(found[1], reason)

    @rule(pick=picks)
    def decode_answers(self, pick: int) -> None:
        if found := self.half(pick):
            found[2].start(found[3])

    @rule(name=node_ids, role=st.sampled_from(["mixed", "prefill", "decode"]))
    def role_is_ordered(self, name: str, role: wire.Role) -> None:
        if self.linked(name) and self.requests % 3 == 0:
            self.fleet.set_role(name, role)

    @invariant()
    def halves_belong_together(self) -> None:
        if not hasattr(self, "streams"):
            return
        flows = [stream._flow for stream in self.streams]
        for flow in flows:
            leg = flow.leg
            if leg is None:
                continue
            assert leg.attempt == flow.attempt, "a leg of another attempt"
            assert leg.node_id == flow.tries[-1].prefill_node != flow.tries[-1].node_id
            if leg.session is not None:
                assert leg.session.legs[leg.number] is leg
                assert flow.is_answered or not flow.is_over, "a leg for nobody"
            else:
                assert (credit(leg) > 0) == (flow.queued is not None)
        for node in self.fleet._node_by_id.values():
            if node.session is not None:
                assert all(leg.flow.leg is leg for leg in node.session.legs.values())
        for flow in flows:
            assert flow.num_splits <= 2
            assert flow.tries[-1].path == "mixed" or len(flow.lanes) == 1 or not flow.num_splits
        pairs = self.fleet.pairs
        over = sum(flow.is_over and flow.tries[-1].path == "split" for flow in flows)
        assert sum(pairs.outcomes.values()) >= over


def test_fleet_splits_machine() -> None:
    run_machine(SplitFleet, 50)


@pytest.mark.slow
def test_fleet_splits_machine_full() -> None:
    run_machine(SplitFleet, int(os.environ.get("KAGARI_EXAMPLES", "3000")))
