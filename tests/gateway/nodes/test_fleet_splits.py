"""Split requests over nodes in memory: both halves, every fault at every moment, and its price."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.nodes.fleet import Fleet, OldNode, UnknownNode
from gateway.nodes.pair_faults import MAX_PAUSE_S, PairFaults
from gateway.nodes.placement import NoCapacity
from gateway.nodes.roles import DRAIN_S, NodeRole
from gateway.nodes.streams import Stream
from policies.contract import wire
from policies.pairing import SplitMode
from policies.routing import RoutingPolicy
from tests.gateway.nodes.fake_node import Clock, FakeNode, fleet, info, request

ROLES: dict[str, wire.Role] = {"p": "prefill", "d": "decode"}


class Pair:
    """A fleet of these roles, whose nodes are told apart by their first letter."""

    def __init__(self, *names: str, mode: SplitMode = SplitMode.ALWAYS, **changes: Any) -> None:
        self.clock = Clock()
        self.fleet = fleet(self.clock, split=mode, **changes)
        self.nodes = {name: self.node(name) for name in names or ("p1", "d1")}

    def node(self, name: str, **changes: Any) -> FakeNode:
        one = info(**({"peer": f"{name}:7", "page_bytes": 64_000} | changes))
        role = ROLES.get(name[0], "mixed")
        return FakeNode(self.fleet, name, one, role=role).join()

    def ask(self, number: int = 1, tokens: int = 640, **changes: Any) -> Stream:
        return self.fleet.dispatch(request(number, tokens=tokens, **changes))

    def submits(self, name: str) -> list[wire.Submit]:
        return [one for one in self.nodes[name].read() if isinstance(one, wire.Submit)]

    def backlog(self) -> dict[str, int]:
        views = {view.node_id: view for view in self.fleet.nodes()}
        return {name: views[name].engines[0].outstanding_tokens for name in self.nodes}

    def in_flight(self) -> int:
        return sum(view.in_flight for view in self.fleet.nodes())

    @property
    def outcomes(self) -> dict[str, int]:
        return dict(self.fleet.pairs.outcomes)


def halves(pair: Pair) -> tuple[wire.Submit, wire.Transfer, wire.Submit, wire.Transfer]:
    (prefill,), (decode,) = pair.submits("p1"), pair.submits("d1")
    assert prefill.transfer is not None
    assert decode.transfer is not None
    return (
        prefill,
        wire.decode_transfer(prefill.transfer),
        decode,
        wire.decode_transfer(decode.transfer),
    )


# --- the way it should go ------------------------------------------------------------------------


def test_both_halves_get_one_transfer_and_each_the_others_address() -> None:
    pair = Pair()
    stream = pair.ask()
    prefill, sent, decode, taken = halves(pair)
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert (prefill.request_id, prefill.attempt) == (decode.request_id, decode.attempt) == ("r1", 1)
    assert (prefill.prompt, prefill.salt, prefill.sampling) == (
        decode.prompt,
        decode.salt,
        decode.sampling,
    )
    assert (sent.peer, taken.peer) == ("d1:7", "p1:7")
    same = [
        (one.transfer_id, one.secret, one.return_id, one.return_secret) for one in (sent, taken)
    ]
    assert same[0] == same[1]
    assert [*map(len, same[0])] == [16, 32, 16, 32]
    assert len(set(same[0])) == 4
    assert (stream.node_id, stream.prefill_node, stream.path) == ("d1", "p1", "split")
    assert stream.pairing is not None
    assert stream.pairing.reason == "always"


def test_prefills_lane_brings_nothing_and_ends_by_itself() -> None:
    pair = Pair()
    stream = pair.ask()
    p, d = pair.nodes["p1"], pair.nodes["d1"]
    (leg,), (lane,) = p.lanes(), d.lanes()
    assert pair.backlog() == {"p1": 640, "d1": 0}
    p.step([leg])  # it should not; nobody is told
    assert stream.take() == []
    d.step([lane], rare=[wire.Started(lane, 64)])
    assert pair.backlog() == {"p1": 0, "d1": 0}, "the prompt is work no more"
    (burst,) = stream.take()
    assert (burst.tokens, stream.cached_tokens) == ([7], 64)
    d.end(lane)
    assert stream.take()[0].end is not None
    assert pair.in_flight() == 1, "the leg's number is free after the node's own end of it"
    p.end(leg, "length")
    assert pair.in_flight() == 0
    assert p.read() == [], "nobody told it to end"
    assert pair.outcomes == {"ok": 1}


def test_prefills_steps_tell_how_far_it_is() -> None:
    pair = Pair()
    with pair.ask():
        (leg,) = pair.nodes["p1"].lanes()
        pair.nodes["p1"].send(wire.Step(0, 1, [], [], computed=[(leg, 512)]))
        assert pair.backlog() == {"p1": 128, "d1": 0}


def test_prefill_may_say_that_it_is_done_before_decode_speaks() -> None:
    pair = Pair()
    stream = pair.ask()
    (leg,), (lane,) = pair.nodes["p1"].lanes(), pair.nodes["d1"].lanes()
    pair.nodes["p1"].end(leg, "stop")
    assert (stream.attempt, pair.backlog()["p1"]) == (1, 0)
    pair.nodes["d1"].start(lane)
    pair.nodes["d1"].end(lane)
    assert stream.take()[0].end is not None


def test_both_are_expected_to_have_the_prompt_then() -> None:
    pair = Pair()
    with pair.ask() as stream:
        pair.nodes["d1"].start(*pair.nodes["d1"].lanes())
        stream.take()
    views = {view.node_id: view.engines[0].resident_pages for view in pair.fleet.nodes()}
    assert views == {"p1": 10, "d1": 10}


@pytest.mark.parametrize(
    ("at_prefill", "at_decode", "returns"),
    [
        ({}, {}, True),
        # its pages would mean something else there
        ({"compute": "fast"}, {"compute": "fast", "layout_id": "fp8"}, False),
        ({"host_arena": "a"}, {"host_arena": "a"}, False),
        ({"host_arena": "a"}, {"host_arena": "b"}, True),
    ],
)
def test_what_decode_computes_is_sent_back_where_nothing_else_brings_it(
    at_prefill: dict[str, Any], at_decode: dict[str, Any], returns: bool
) -> None:
    pair = Pair("x1")
    pair.nodes |= {"p1": pair.node("p1", **at_prefill), "d1": pair.node("d1", **at_decode)}
    tiers = (wire.TierReport("host", 9, 0),)
    for name in ("p1", "d1"):
        pair.nodes[name].report(tiers=tiers)
    pair.nodes["x1"].cut()
    with pair.ask(compute=at_prefill.get("compute", "exact")) as stream:
        assert stream.path == "split"
        _, sent, _, taken = halves(pair)
        assert sent.return_id == taken.return_id
        assert bool(sent.return_id) is bool(sent.return_secret) is returns


# --- who goes where ------------------------------------------------------------------------------


def test_a_fleet_of_mixed_nodes_is_never_split() -> None:
    pair = Pair("m1", "m2")
    with pair.ask() as stream:
        assert (stream.path, stream.prefill_node, stream.pairing) == ("mixed", None, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n": 2}, "lanes"),
        ({"sampling": wire.Sampling(max_tokens=3, prompt_logprobs=1)}, "prompt_logprobs"),
    ],
)
def test_what_one_engine_must_compute_goes_whole_to_decode(changes: Any, reason: str) -> None:
    pair = Pair()
    with pair.ask(**changes) as stream:
        assert (stream.path, stream.node_id) == ("bypass", "d1")
        assert stream.pairing is not None
        assert stream.pairing.reason == reason
        assert [submit.role for submit in pair.submits("d1")] == ["mixed"]
        assert pair.submits("p1") == []


def test_never_means_never_and_auto_lets_short_prompts_by() -> None:
    never = Pair(mode=SplitMode.NEVER)
    with never.ask(tokens=4000) as stream:
        assert (stream.path, stream.pairing.reason) == ("bypass", "never")
    auto = Pair(mode=SplitMode.AUTO)
    with auto.ask(tokens=2000) as stream:
        assert (stream.path, stream.pairing.reason) == ("bypass", "short")


def test_auto_splits_once_others_decode() -> None:
    pair = Pair(mode=SplitMode.AUTO)
    with pair.ask(1, tokens=4000) as alone:
        assert (alone.path, alone.pairing.reason) == ("bypass", "slower")
        pair.nodes["d1"].start(*pair.nodes["d1"].lanes())
        with pair.ask(2, tokens=4000, page_keys=[]) as beside:
            assert (beside.path, beside.pairing.reason) == ("split", "pays")
            assert beside.pairing.spared_s == pytest.approx(4.0)


def test_prefill_nodes_take_whole_requests_only_while_nobody_else_serves() -> None:
    pair = Pair()
    with pair.ask() as stream:
        pair.nodes["d1"].cut()
        assert (stream.node_id, stream.path, stream.attempt) == ("p1", "bypass", 2)
    full = Pair(max_in_flight=1)
    with full.ask(1), pytest.raises(NoCapacity):
        full.ask(2)  # decode is there, and full


def test_a_lone_decode_node_serves_whole() -> None:
    pair = Pair("d1")
    with pair.ask() as stream:
        assert (stream.path, stream.pairing.reason) == ("bypass", "no_pair")


@pytest.mark.parametrize(
    "changes",
    [
        {"peer": ""},
        {"identity": "other"},
        {"page_size": 32, "num_pages": 2000},
        {"layout_id": "fp8"},  # as exact engines: what comes would not be what they compute
    ],
)
def test_engines_that_cannot_exchange_pages_are_no_pair(changes: dict[str, Any]) -> None:
    pair = Pair("p1")
    pair.nodes["d1"] = pair.node("d1", **changes)
    with pair.ask() as stream:
        assert (stream.path, stream.node_id) == ("bypass", "d1")


def test_decode_is_chosen_by_its_pool_and_prefill_by_its_queue() -> None:
    pair = Pair("p1", "p2", "d1", "d2")
    pair.nodes["d1"].report(pages_held=500, pages_total=1000)
    pair.nodes["p2"].report(uncached_tokens=50_000)
    with pair.ask() as stream:
        assert (stream.prefill_node, stream.node_id) == ("p1", "d2")


def test_a_burst_within_one_report_is_spread_over_both_kinds() -> None:
    pair = Pair("p1", "p2", "d1", "d2")
    streams = [pair.ask(number, tokens=3200) for number in range(8)]
    for place in ("node_id", "prefill_node"):
        names = [getattr(stream, place) for stream in streams]
        assert sorted(map(names.count, set(names))) == [4, 4]
    for stream in streams:
        stream.abort()


def test_nodes_in_turn_take_turns_as_pairs_too() -> None:
    pair = Pair("p1", "p2", "d1", "d2", policy=RoutingPolicy.ROUND_ROBIN)
    streams = [pair.ask(number) for number in range(4)]
    assert [stream.node_id for stream in streams] == ["d1", "d2", "d1", "d2"]
    assert [stream.prefill_node for stream in streams] == ["p1", "p2", "p1", "p2"]
    for stream in streams:
        stream.abort()


def test_a_sessions_home_is_where_it_decodes() -> None:
    pair = Pair("p1", "d1", "d2")
    with pair.ask(1, affinity_key=b"s") as first:
        assert first.affinity == "new"
        home = first.node_id
        pair.nodes[home].start(*pair.nodes[home].lanes())
    with pair.ask(2, affinity_key=b"s") as second:
        assert (second.node_id, second.affinity) == (home, "hit")
        pair.nodes[home].cut()
        assert second.affinity == "spill"


# --- faults --------------------------------------------------------------------------------------

Fault = Callable[[Pair], None]


def lane_of(pair: Pair, name: str) -> int:
    (lane,) = pair.nodes[name].lanes()
    return lane


def fail(name: str, code: str) -> Fault:
    return lambda pair: pair.nodes[name].fail(lane_of(pair, name), code)


def end(name: str, reason: wire.FinishReason) -> Fault:
    return lambda pair: pair.nodes[name].end(lane_of(pair, name), reason)


def prefill_is_done(pair: Pair) -> None:
    end("p1", "length")(pair)
    fail("d1", "transfer_corrupt")(pair)


def go_down(name: str) -> Fault:
    return lambda pair: pair.nodes[name].report(state="down")


PAIR_FAULTS: dict[str, Fault] = {
    "decode: lost": fail("d1", "transfer_lost"),
    "decode: refused": fail("d1", "transfer_refused"),
    "decode: late": fail("d1", "transfer_timeout"),
    "decode: another layout": fail("d1", "transfer_layout"),
    "prefill: lost": fail("p1", "transfer_lost"),
    "prefill: engine died": fail("p1", "engine_lost"),
    "prefill: draining": fail("p1", "node_draining"),
    "prefill: never heard of": fail("p1", "something_new"),
    "prefill: gave up without a word": end("p1", "abort"),
    "decode has half of it": prefill_is_done,
}


@pytest.mark.parametrize("fault", PAIR_FAULTS.values(), ids=PAIR_FAULTS)
def test_a_pair_that_fails_is_tried_once_more_then_decode_computes_by_itself(fault: Fault) -> None:
    pair = Pair()
    stream = pair.ask()
    _, first, _, _ = halves(pair)
    fault(pair)
    assert (stream.attempt, stream.path, stream.node_id) == (2, "split", "d1")
    for node in pair.nodes.values():  # what was told to end does
        for lane in [lane for lane in node.lanes() if lane in node.aborted]:
            node.end(lane, "abort")
    told = [one for node in pair.nodes.values() for one in node.received]
    again = [one for one in told if isinstance(one, wire.Submit) and one.attempt == 2]
    assert {one.role for one in again} == {"prefill", "decode"}
    for one in again:
        assert one.transfer is not None
        assert wire.decode_transfer(one.transfer).transfer_id != first.transfer_id
    fault(pair)
    assert (stream.attempt, stream.path, stream.node_id) == (3, "bypass", "d1")
    assert (stream.prefill_node, [one.prefill_node for one in stream.tries]) == (
        None,
        ["p1", "p1", None],
    )
    for node in pair.nodes.values():
        for lane in [lane for lane in node.lanes() if lane in node.aborted]:
            node.end(lane, "abort")
    lane = lane_of(pair, "d1")
    pair.nodes["d1"].start(lane)
    pair.nodes["d1"].end(lane)
    assert isinstance(stream.take()[0].end, wire.Finished)
    assert (pair.in_flight(), pair.backlog()) == (0, {"p1": 0, "d1": 0})
    assert pair.outcomes == {"retried": 1, "local": 1}
    assert sum(pair.fleet.pairs.failures.values()) == 2


@pytest.mark.parametrize("loss", [lambda pair: pair.nodes["p1"].cut(), go_down("p1")])
def test_without_its_prefill_node_decode_goes_on_alone(loss: Fault) -> None:
    pair = Pair()
    with pair.ask() as stream:
        halves(pair)
        loss(pair)
        assert stream.attempt == 2
        pair.nodes["d1"].read()
        assert pair.nodes["d1"].aborted, "it waits for pages that do not come"
        if pair.nodes["p1"].session is not None and stream.path == "split":
            loss(pair)
        assert stream.node_id == "d1"


def test_another_prefill_node_is_tried_first() -> None:
    pair = Pair("p1", "p2", "d1")
    with pair.ask() as stream:
        first = stream.prefill_node
        assert first is not None
        pair.nodes[first].cut()
        assert (stream.path, stream.node_id) == ("split", "d1")
        assert stream.prefill_node not in (None, first)


def test_a_prefill_node_that_failed_it_is_exchanged_though_it_is_the_cheaper_one() -> None:
    pair = Pair("p1", "p2", "d1")
    pair.nodes["p2"].report(uncached_tokens=50_000)
    with pair.ask() as stream:
        assert stream.prefill_node == "p1"
        fail("d1", "transfer_lost")(pair)
        assert (stream.path, stream.prefill_node) == ("split", "p2")


def test_the_last_try_is_where_part_of_the_prompt_lies_though_another_node_is_cheaper() -> None:
    pair = Pair("p1", "d1", "d2")
    with pair.ask() as stream:
        for _ in range(2):
            last = stream.node_id
            lanes = pair.nodes[last].lanes()
            pair.nodes[last].fail(lanes[-1], "transfer_timeout")
            pair.nodes[stream.node_id].report(uncached_tokens=50_000)
        assert (stream.path, stream.node_id, stream.attempt) == ("bypass", last, 3)
        other = ({"d1", "d2"} - {last}).pop()
        costs = {one.candidate.node_id: one.cost_s for one in stream.decision.scored}
        assert costs[other] < costs[last]


def test_no_request_spends_its_last_try_on_a_pair() -> None:
    pair = Pair("d1", "d2")
    with pair.ask() as stream:
        pair.nodes["p1"] = pair.node("p1")
        pair.nodes[stream.node_id].cut()
        assert (stream.attempt, stream.path) == (2, "split")
        fail(stream.node_id, "transfer_lost")(pair)
        assert (stream.attempt, stream.path) == (3, "bypass")


def test_decode_that_ends_by_itself_before_a_token_takes_prefill_along() -> None:
    pair = Pair()
    stream = pair.ask()
    lane_of(pair, "p1")
    end("d1", "error")(pair)
    assert stream.take()[0].end is not None
    assert [type(message) for message in pair.nodes["p1"].read()] == [wire.Abort]


def test_losing_decode_before_the_first_token_moves_both_halves() -> None:
    pair = Pair("p1", "d1", "d2")
    with pair.ask() as stream:
        lost = stream.node_id
        pair.nodes["p1"].read()
        pair.nodes[lost].cut()
        assert (stream.attempt, stream.path) == (2, "split")
        assert stream.node_id != lost
        kinds = [type(message) for message in pair.nodes["p1"].read()]
        assert kinds == [wire.Abort, wire.Submit]


def test_after_the_first_token_prefill_may_be_lost() -> None:
    pair = Pair()
    stream = pair.ask()
    lane = lane_of(pair, "d1")
    pair.nodes["d1"].start(lane)
    pair.nodes["p1"].cut()
    pair.nodes["d1"].end(lane)
    (burst,) = stream.take()
    assert (burst.tokens, type(burst.end), stream.attempt) == ([7], wire.Finished, 1)


def test_after_the_first_token_decodes_loss_is_an_error_and_ends_prefill() -> None:
    pair = Pair()
    stream = pair.ask()
    lane_of(pair, "p1")
    pair.nodes["d1"].start(lane_of(pair, "d1"))
    pair.nodes["d1"].cut()
    assert isinstance(stream.take()[0].end, wire.Failed)
    assert pair.nodes["p1"].lanes() == [*pair.nodes["p1"].aborted]


@pytest.mark.parametrize("moment", ["submits wait", "submits are sent", "prefill is done", "token"])
def test_a_client_that_leaves_ends_both_halves_at_once(moment: str) -> None:
    pair = Pair()
    stream = pair.ask()
    p, d = pair.nodes["p1"], pair.nodes["d1"]
    if moment != "submits wait":
        (leg,), (lane,) = p.lanes(), d.lanes()
        if moment == "prefill is done":
            p.end(leg, "length")
        elif moment == "token":
            d.start(lane)
    stream.abort()
    stream.abort()
    assert pair.backlog() == {"p1": 0, "d1": 0}
    told = [[type(message) for message in node.read()] for node in (p, d)]
    assert told == {
        "submits wait": [[], []],
        "prefill is done": [[], [wire.Abort]],
    }.get(moment, [[wire.Abort], [wire.Abort]])
    for node in (p, d):
        for number in node.lanes():
            node.end(number, "abort")
    assert pair.in_flight() == 0
    assert pair.outcomes == {"ok" if moment == "token" else "left": 1}


def test_late_and_doubled_ends_of_a_leg_free_its_number_once() -> None:
    pair = Pair()
    stream = pair.ask()
    leg = lane_of(pair, "p1")
    stream.abort()
    for _ in range(3):
        pair.nodes["p1"].end(leg, "length")
    with pair.ask(2) as second:
        assert second.prefill_node == "p1"
        assert pair.nodes["p1"].lanes() == [leg]
        pair.nodes["p1"].fail(99, "transfer_lost")
        assert second.attempt == 1


def test_a_pair_that_keeps_failing_is_let_alone_for_a_while() -> None:
    pair = Pair()

    def broken(number: int) -> Stream:
        stream = pair.ask(number)
        while stream.path == "split":
            lanes = [
                lane for lane in pair.nodes["d1"].lanes() if lane not in pair.nodes["d1"].aborted
            ]
            pair.nodes["d1"].fail(lanes[-1], "transfer_refused")
        return stream

    broken(1).abort()
    with pair.ask(2) as beside:
        assert (beside.path, beside.pairing.reason, beside.attempt) == ("bypass", "no_pair", 1)
    pair.clock.now += 5.0
    assert broken(3).attempt == 2, "one failure more is enough now"
    pair.clock.now += 5.0
    with pair.ask(4) as beside:
        assert beside.path == "bypass"
    pair.clock.now += 5.0
    with pair.ask(5) as beside:
        assert beside.path == "split"


def test_pauses_grow_to_a_bound_and_end_with_a_success() -> None:
    faults = PairFaults()
    for _ in range(40):
        faults.failed("p", "d", 0.0)
    assert not faults.allows("p", "d", MAX_PAUSE_S - 1)
    assert faults.allows("p", "d", MAX_PAUSE_S)
    assert faults.allows("p", "e", 0.0)
    faults.worked("p", "d")
    assert faults.allows("p", "d", 0.0)
    for number in range(5000):
        faults.failed("p", f"d{number}", 0.0)
    assert len(faults._faults) == 4096


# --- roles ---------------------------------------------------------------------------------------


def view(gateway: Fleet, name: str) -> Any:
    return next(one for one in gateway.nodes() if one.node_id == name)


def test_a_node_that_drained_takes_its_new_role() -> None:
    pair = Pair("p1", "d1", "d2")
    with pair.ask() as stream:
        busy = stream.node_id
        pair.fleet.set_role(busy, "prefill")
        assert (view(pair.fleet, busy).role, view(pair.fleet, busy).next_role) == (
            "decode",
            "prefill",
        )
        with pair.ask(2) as beside:
            assert beside.node_id != busy
        pair.fleet.tick()
        assert wire.SetRole("prefill") not in pair.nodes[busy].read()
        lane = lane_of(pair, busy)
        pair.nodes[busy].start(lane)
        pair.nodes[busy].end(lane)
    pair.fleet.tick()
    assert wire.SetRole("prefill") in pair.nodes[busy].read()
    assert view(pair.fleet, busy).next_role == "prefill", "it has not said so yet"
    pair.nodes[busy].report()
    assert (view(pair.fleet, busy).role, view(pair.fleet, busy).next_role) == ("prefill", None)


def test_a_drain_has_an_end() -> None:
    pair = Pair("p1", "d1", "d2")
    with pair.ask() as stream:
        pair.fleet.set_role(stream.node_id, "prefill")
        for node in pair.nodes.values():
            node.read()
        for _ in range(21):
            pair.clock.now += DRAIN_S / 20
            for node in pair.nodes.values():
                node.report()
            pair.fleet.tick()
        assert wire.SetRole("prefill") in pair.nodes[stream.node_id].read()
        assert stream.attempt == 1, "what runs there goes on"


def test_the_only_node_serves_while_its_role_changes() -> None:
    pair = Pair("m1")
    pair.fleet.set_role("m1", "decode")
    with pair.ask() as stream:
        assert stream.node_id == "m1"


def test_roles_of_unknown_and_of_old_nodes_are_refused() -> None:
    pair = Pair()
    with pytest.raises(UnknownNode):
        pair.fleet.set_role("n9", "mixed")
    FakeNode(pair.fleet, "old", version=wire.SPLIT_VERSION - 1).join()
    with pytest.raises(OldNode):
        pair.fleet.set_role("old", "mixed")


def test_an_order_outlives_the_nodes_restart() -> None:
    pair = Pair()
    pair.fleet.set_role("p1", "decode")
    pair.fleet.tick()
    pair.nodes["p1"].read()
    pair.nodes["p1"].report()
    assert view(pair.fleet, "p1").role == "decode"
    pair.nodes["p1"].cut()
    pair.nodes["p1"].epoch, pair.nodes["p1"].role = 2, "prefill"  # as its command line says
    pair.nodes["p1"].join()
    pair.fleet.tick()
    assert wire.SetRole("decode") in pair.nodes["p1"].read()


@pytest.mark.parametrize("how", ["report", "hello"])
def test_another_gateways_later_order_counts(how: str) -> None:
    role = NodeRole()
    role.greet("decode", 0.0, is_new_epoch=True)
    role.ask("prefill", 0.0)
    assert role.due(1.0, is_idle=False) is None
    assert role.due(1.0, is_idle=True) == "prefill"
    role.hear("decode")  # sent before the order came
    assert role.is_switching
    role.hear("prefill")
    assert not role.is_switching
    if how == "report":
        role.hear("mixed")
    else:
        role.greet("mixed", 2.0, is_new_epoch=False)
    assert (role.current, role.order, role.is_switching) == ("mixed", None, False)
    assert role.due(99.0, is_idle=True) is None


def test_an_order_overtakes_the_one_before() -> None:
    role = NodeRole()
    role.ask("prefill", 0.0)
    role.ask("mixed", 0.0)  # which it is
    assert not role.is_switching
    role.ask("prefill", 0.0)
    assert role.due(0.0, is_idle=True) == "prefill"
    role.ask("mixed", 1.0)
    role.hear("prefill")
    assert role.due(1.0, is_idle=True) == "mixed"
    role.hear("mixed")
    assert (role.current, role.order, role.is_switching) == ("mixed", "mixed", False)


def test_the_fleet_moves_a_node_where_it_is_told_to() -> None:
    pair = Pair("p1", "d1", "d2", moves_roles=True)
    for second in range(200):
        pair.clock.now += 1.0
        for node in pair.nodes.values():
            node.report()
        stream = pair.ask(second, tokens=2000)  # twice what the one prefill node computes
        stream.abort()
        pair.fleet.tick()
        moved = [
            name for name, node in pair.nodes.items() if wire.SetRole("prefill") in node.read()
        ]
        if moved:
            break
    assert moved in (["d1"], ["d2"])
    assert second >= 119, "a window's mean, for a window"
