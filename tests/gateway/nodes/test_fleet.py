"""The fleet with nodes in memory: dispatch, redispatch, states, books, traps of other routers."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import msgspec
import pytest

from gateway.nodes.fleet import Fleet, UnknownNode
from gateway.nodes.placement import NoCapacity, NoNode, OldNodes
from gateway.nodes.session import Session
from gateway.nodes.streams import MAX_UNREAD_TOKENS, Burst, Stream
from policies.contract import wire
from policies.routing import RoutingPolicy
from tests.gateway.nodes.fake_node import Clock, FakeNode, fleet, info, keys, request


def take(stream: Stream) -> Burst:
    """The one burst of a stream of one lane."""
    (burst,) = stream.take()
    return burst


@pytest.mark.anyio
async def test_a_stream_gets_its_tokens_and_one_end() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stream = gateway.dispatch(request(1))
    (submit,) = node.read()
    assert (submit.request_id, submit.attempt, submit.engine) == ("r1", 1, 0)
    assert wire.unpack_ids(submit.prompt) == request(1).prompt
    node.step([0, 0], [5, 6], [wire.Started(0, 64, 0.25)])
    assert await stream.next() == [Burst(0, [5, 6], None)]
    assert (stream.node_id, stream.cached_tokens, stream.queue_s) == ("n1", 64, 0.25)
    node.step([0], [7], [wire.Finished(0, "length", wire.Usage(100, 64, 3))])
    (last,) = await stream.next()
    assert last.tokens == [7]
    assert last.end == wire.Finished(0, "length", wire.Usage(100, 64, 3))
    assert await stream.next() == [Burst(0, [], last.end)]  # the end again


@pytest.mark.anyio
async def test_waiting_with_a_limit_loses_no_token() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    with gateway.dispatch(request(1)) as stream:
        node.read()
        assert await stream.next_within(0.01) == []
        node.step([0], [1])
        assert await stream.next_within(0.0) == [Burst(0, [1], None)]
        asyncio.get_running_loop().call_soon(node.step, [0], [2])
        assert await stream.next_within(5.0) == [Burst(0, [2], None)]
        waiting = asyncio.create_task(stream.next_within(5.0))
        await asyncio.sleep(0)
        waiting.cancel()
        node.step([0], [3])
        await asyncio.wait([waiting])
        assert await stream.next_within(5.0) == [Burst(0, [3], None)]


def test_without_a_node_or_a_bundle_there_is_no_node() -> None:
    gateway = fleet()
    with pytest.raises(NoNode):
        gateway.dispatch(request(1))
    FakeNode(gateway, "n1", info(bundle_digest="ab" * 32)).join()
    assert gateway.models() == []
    assert gateway.nodes()[0].state == "joining"
    with pytest.raises(NoNode):
        gateway.dispatch(request(1))


def test_models_default_first_aliases_last() -> None:
    gateway = fleet(default_models=("c",))
    FakeNode(gateway, "n1", info(0, "a", aliases=("x", "c")), info(1, "b")).join()
    FakeNode(gateway, "n2", info(0, "c"), info(1, "a", aliases=("x",))).join()
    assert [(one.name, one.nodes, one.alias_of) for one in gateway.models()] == [
        ("c", 1, None),
        ("a", 2, None),
        ("b", 1, None),
        ("x", 2, "a"),
    ]
    served = gateway.model("x")
    assert served is not None
    assert served.info.model == "a"


def test_link_cut_before_the_first_token_moves_the_request() -> None:
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    stream = gateway.dispatch(request(1))
    first = stream.node_id
    nodes.pop(first).cut()
    assert stream.node_id != first
    assert stream.attempt == 2
    (other,) = nodes.values()
    (lane,) = other.lanes()
    assert other.request_by_lane[lane] == ("r1", 2)
    other.start(lane)
    assert take(stream).end is None


def test_link_cut_after_the_first_token_is_an_error() -> None:
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    stream = gateway.dispatch(request(1))
    node = nodes[stream.node_id]
    node.start(node.lanes()[0])
    node.cut()
    burst = take(stream)
    assert burst.tokens == [7]
    assert isinstance(burst.end, wire.Failed)
    assert (burst.end.code, stream.attempt) == ("node_lost", 1)


def test_one_bad_request_cannot_walk_over_the_whole_fleet() -> None:
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2", "n3", "n4")}
    stream = gateway.dispatch(request(1))
    for _ in range(3):
        nodes[stream.node_id].fail(nodes[stream.node_id].lanes()[0], "engine_lost")
    assert stream.attempt == 3
    assert len({one.node_id for one in stream.tries}) == 3
    end = take(stream).end
    assert isinstance(end, wire.Failed)
    assert end.code == "engine_lost"


@pytest.mark.parametrize(
    ("code", "moves"),
    [("node_draining", True), ("engine_full", True), ("tag_mismatch", False)],
)
def test_only_faults_of_the_place_are_retried(code: str, moves: bool) -> None:
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    stream = gateway.dispatch(request(1))
    node = nodes[stream.node_id]
    node.fail(node.lanes()[0], code)
    assert (stream.attempt == 2) is moves
    assert (not stream._flow.is_over) is moves


def test_an_abort_does_not_overtake_its_own_submit() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    first, second = gateway.dispatch(request(1)), gateway.dispatch(request(2))
    first.abort()
    assert [message.request_id for message in node.read()] == ["r2"]
    second.abort()
    second.abort()
    assert node.read() == [wire.Abort((1,))]
    assert take(first).end == wire.Finished(0, "abort", wire.Usage(100, 0, 0))


def test_abort_goes_in_front_of_waiting_submits() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stream = gateway.dispatch(request(1))
    node.read()
    for number in range(2, 6):
        gateway.dispatch(request(number))._orphaned = lambda flow: None
    stream.abort()
    assert [type(message).__name__ for message in node.read()] == ["Abort"] + ["Submit"] * 4


def test_a_lane_is_not_reused_before_the_nodes_terminal_event() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    gateway.dispatch(request(1)).abort()
    stream = gateway.dispatch(request(2))
    assert node.lanes() == [0]  # withdrawn unsent: the node never saw it
    node.start(0)
    stream.finish(0, 1)
    assert take(stream).end == wire.Finished(0, "stop", wire.Usage(100, 0, 1))
    assert node.read() == [wire.FinishLane(0, 1)]
    third = gateway.dispatch(request(3))
    assert node.lanes() == [0, 1]
    node.step([0], [99])  # late tokens of the ended lane
    node.end(0)
    fourth = gateway.dispatch(request(4))
    assert node.lanes() == [1, 0]
    node.step([0], [42])
    assert take(fourth).tokens == [42]
    assert third.take() == []


def test_the_first_token_is_woken_before_the_others() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    streams = [gateway.dispatch(request(number)) for number in range(4)]
    node.read()
    node.step([0, 1, 2])
    assert node.session is not None
    woken = node.session.on_step(wire.Step(0, 2, [0, 1, 2, 3], [1, 1, 1, 1]))
    assert [lane.number for lane in woken] == [3, 2, 0, 1]  # then rotated by the step's number
    woken = node.session.on_step(wire.Step(0, 3, [0, 1, 2, 3], [1, 1, 1, 1]))
    assert [lane.number for lane in woken] == [3, 0, 1, 2]
    assert len(streams) == 4


def test_a_reader_that_stops_is_aborted_and_memory_stays_bounded() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stream = gateway.dispatch(request(1))
    node.read()
    for _ in range(MAX_UNREAD_TOKENS // 64 + 2):
        node.step([0] * 64)
    burst = take(stream)
    assert isinstance(burst.end, wire.Failed)
    assert burst.end.code == "slow_reader"
    assert len(burst.tokens) <= MAX_UNREAD_TOKENS + 64
    assert node.read() == [wire.Abort((0,))]


def test_a_stream_that_its_owner_forgot_is_aborted() -> None:
    """A generator that never started is never closed; its load stayed booked for ever."""
    node = FakeNode(gateway := fleet(), "n1").join()
    gateway.dispatch(request(1))
    gc.collect()
    gateway.tick()
    node.read()
    assert node.session is not None
    assert node.session.in_flight == 0
    assert gateway.nodes()[0].engines[0].outstanding_tokens == 0


def test_load_is_zero_after_every_kind_of_end() -> None:
    """Counters that leaked made a restarted node look idle and take all traffic."""
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    streams = [gateway.dispatch(request(number)) for number in range(12)]
    for name, node in nodes.items():
        for count, lane in enumerate(node.lanes()):
            match count % 3:
                case 0:
                    node.end(lane)
                case 1:
                    node.fail(lane, "boom" if name == "n1" else "engine_lost")
                case 2:
                    node.start(lane)
    for stream in streams[::2]:
        stream.abort()
    nodes["n1"].cut()
    for stream in streams:
        stream.abort()
    for lane in nodes["n2"].lanes():
        nodes["n2"].end(lane, "abort")
    for view in gateway.nodes():
        assert view.in_flight == 0
        assert [engine.outstanding_tokens for engine in view.engines] == [0]
        assert [engine.backlog_tokens for engine in view.engines] == [0]


def test_a_report_does_not_count_our_own_work_twice() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stream = gateway.dispatch(request(1, tokens=1000))
    node.report(uncached_tokens=1000)
    assert gateway.nodes()[0].engines[0].backlog_tokens == 1000
    node.report(uncached_tokens=1500)  # another gateway's work beside it
    assert gateway.nodes()[0].engines[0].backlog_tokens == 1500
    node.start(node.lanes()[0])
    assert gateway.nodes()[0].engines[0].backlog_tokens == 500
    stream.abort()
    assert gateway.nodes()[0].engines[0].backlog_tokens == 500


def test_a_long_prompt_is_backlog_until_its_first_token() -> None:
    """Started comes after the first chunk. Dropped there, the rest looked like idleness, and like
    pages, until the next report: the next long prompt was sent behind it."""
    node = FakeNode(gateway := fleet(), "n1").join()
    stream = gateway.dispatch(request(1, tokens=4000))
    (lane,) = node.lanes()
    node.step([], rare=[wire.Started(lane, 0)])
    assert gateway.nodes()[0].engines[0].backlog_tokens == 4000
    node.report(uncached_tokens=3488)
    assert gateway.nodes()[0].engines[0].backlog_tokens == 4000
    assert gateway.nodes()[0].engines[0].resident_pages == 0
    node.step([lane])
    view = gateway.nodes()[0].engines[0]
    assert (view.outstanding_tokens, view.resident_pages) == (0, 4000 // 64)
    stream.abort()


def test_steps_tell_how_far_a_prompt_is() -> None:
    """Credited whole until its first token, a prompt of a minute steered others off a node that
    was free in a second."""
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    first = gateway.dispatch(request(1, tokens=8000))
    busy = nodes.pop(first.node_id)
    (idle,) = nodes.values()
    (lane,) = busy.lanes()
    second = gateway.dispatch(request(2, tokens=500, page_keys=keys(7)))
    assert second.node_id == idle.node_id
    busy.step([], computed=[(lane, 7900)])
    third = gateway.dispatch(request(3, tokens=500, page_keys=keys(8)))
    assert third.node_id == busy.node_id
    busy.report(uncached_tokens=8000)  # older than that step
    assert {view.engines[0].backlog_tokens for view in gateway.nodes()} == {500, 600}
    for stream in (first, second, third):
        stream.abort()
    assert {view.engines[0].backlog_tokens for view in gateway.nodes()} == {0}


def test_full_nodes_refuse_with_a_time() -> None:
    gateway = fleet(max_in_flight=2)
    node = FakeNode(gateway, "n1").join()
    streams = [gateway.dispatch(request(number, tokens=3000)) for number in range(2)]
    node.read()
    with pytest.raises(NoCapacity) as refused:
        gateway.dispatch(request(3))
    assert refused.value.retry_after_s == pytest.approx(6.0)  # 6000 tokens at 1000 tokens/s
    streams[0].abort()
    with pytest.raises(NoCapacity):
        gateway.dispatch(request(4))  # the node has not said that it stopped
    node.end(0, "abort")
    gateway.dispatch(request(5)).abort()


def test_a_node_whose_queue_is_full_is_not_chosen() -> None:
    gateway = fleet(outbox_bytes=1000)
    FakeNode(gateway, "n1").join()
    other = FakeNode(gateway, "n2").join()
    streams = [gateway.dispatch(request(number, tokens=1000)) for number in range(2)]
    assert {stream.node_id for stream in streams} == {"n1", "n2"}
    with pytest.raises(NoCapacity):
        gateway.dispatch(request(3))
    other.read()
    assert gateway.dispatch(request(4)).node_id == "n2"


def test_silent_node_is_suspect_then_lost() -> None:
    gateway = fleet(clock := Clock())
    node = FakeNode(gateway, "n1").join()
    node.report()
    stream = gateway.dispatch(request(1))
    node.start(node.lanes()[0])
    states = {}
    for tenth in range(1, 75):
        clock.now += 0.1
        gateway.tick()
        states[tenth / 10] = gateway.nodes()[0].state
    assert [states[at] for at in (4.9, 5.1, 6.9, 7.1)] == ["ready", "suspect", "suspect", "lost"]
    end = take(stream).end
    assert isinstance(end, wire.Failed)
    assert end.code == "node_lost"


def test_a_late_report_brings_a_suspect_back() -> None:
    gateway = fleet(clock := Clock())
    node = FakeNode(gateway, "n1").join()
    clock.now += 6.0
    gateway._ticked_at = clock.now
    gateway.tick()
    assert gateway.model("m") is None
    node.report()
    assert gateway.model("m") is not None


def test_a_stopped_gateway_does_not_lose_its_nodes() -> None:
    gateway = fleet(clock := Clock())
    FakeNode(gateway, "n1").join()
    gateway.tick()
    clock.now += 60.0  # the process was stopped; the frames wait in the socket
    gateway.tick()
    assert gateway.nodes()[0].state == "ready"


@pytest.mark.parametrize("who", ["operator", "node", "report"])
def test_draining_takes_nothing_new_and_finishes_what_runs(who: str) -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stream = gateway.dispatch(request(1))
    node.read()
    match who:
        case "operator":
            gateway.drain("n1", True)
            assert node.read() == [wire.Drain(True)]
        case "node":
            node.send(wire.Draining())
        case "report":
            node.report("draining")
    assert gateway.nodes()[0].state == "draining"
    with pytest.raises(NoNode):
        gateway.dispatch(request(2))
    node.start(0)
    assert take(stream).tokens == [7]
    gateway.drain("n1", False)
    node.report()
    assert gateway.nodes()[0].state == "ready"


def test_an_operators_drain_outlives_the_link() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    gateway.drain("n1", True)
    node.cut()
    node.epoch += 1
    node.join()
    assert wire.Drain(True) in node.received
    assert gateway.nodes()[0].state == "draining"
    with pytest.raises(UnknownNode, match="known are: n1"):
        gateway.drain("n9", True)


def test_an_engine_that_is_down_is_left_at_once() -> None:
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    stream = gateway.dispatch(request(1))
    first = nodes[stream.node_id]
    first.read()
    first.report(state="ready")
    first.send(
        wire.Report(1, 99, "ready", (wire.EngineReport(0, "down"),)),
    )
    assert stream.attempt == 2
    assert stream.node_id != first.node_id
    assert gateway.dispatch(request(2)).node_id != first.node_id


def test_a_newer_link_of_a_node_replaces_the_older() -> None:
    gateway = fleet()
    old = FakeNode(gateway, "n1", epoch=5).join()
    stream = gateway.dispatch(request(1))
    old.start(old.lanes()[0])
    new = FakeNode(gateway, "n1", epoch=6).join()
    assert isinstance(take(stream).end, wire.Failed)
    assert old.session is not None
    assert old.session.outbox.closing == (1001, "replaced by a newer link of the same node")
    fresh = gateway.dispatch(request(2))
    new.read()
    old.step([0], [666])  # from the old link: ignored
    old.send(wire.EnginesChanged(()))
    assert gateway.model("m") is not None
    new.step([0], [1])
    assert take(fresh).tokens == [1]
    refused = gateway.attach(old.hello())
    assert isinstance(refused, wire.Refused)
    assert refused.code == "stale_epoch"


@pytest.mark.parametrize(
    ("version", "lowest", "fits"),
    [(1, 1, True), (99, wire.WIRE_VERSION, True), (99, wire.WIRE_VERSION + 1, False)],
)
def test_wire_versions_are_negotiated(version: int, lowest: int, fits: bool) -> None:
    opened = fleet().attach(wire.Hello(version, lowest, "n1", 1, "mixed", (info(),)))
    assert isinstance(opened, Session) is fits
    assert fits or (isinstance(opened, wire.Refused) and opened.code == "wire_version")


def test_a_node_of_an_older_wire_is_welcomed_in_its_own_version() -> None:
    opened = fleet().attach(wire.Hello(1, 1, "n1", 1, "mixed", (info(),)))
    assert isinstance(opened, Session)
    frame = opened.outbox.pop()
    assert frame is not None
    welcome = wire.decode_from_gateway(frame)
    assert isinstance(welcome, wire.Welcome)
    assert welcome.version == 1


def test_text_is_asked_for_while_the_engine_still_loads() -> None:
    """Else a start is as long as both: the weights on the node, then the tokenizer here."""
    gateway, coming = fleet(), "ab" * 32
    opened = gateway.attach(
        wire.Hello(
            wire.WIRE_VERSION, 1, "n1", 1, "mixed", (), "", (coming, info().bundle_digest, "../x")
        )
    )
    assert isinstance(opened, Session)
    frame = opened.outbox.pop()
    assert frame is not None
    assert wire.decode_from_gateway(frame).wanted_bundles == (coming,)  # the other is here
    assert set(opened.assemblies) == {coming}


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 5.0),)},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
    ],
)
def test_an_older_node_is_not_asked_for_fields_that_it_would_skip(field: dict[str, Any]) -> None:
    gateway = fleet()
    FakeNode(gateway, "old", version=1).join()
    wanting = wire.Sampling(10, **field)
    for number in range(8):
        with gateway.dispatch(request(number, tokens=1)) as stream:
            assert stream.node_id == "old"
        with pytest.raises(OldNodes):
            gateway.dispatch(request(100 + number, sampling=wanting))
    FakeNode(gateway, "new").join()
    with gateway.dispatch(request(200, sampling=wanting)) as stream:
        assert stream.node_id == "new"
        assert stream.decision.rejected == (("old", "wire_version"),)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"node_id": "n1\r\nx-injected: 1"}, "bad_node_id"),
        ({"node_id": ""}, "bad_node_id"),
        ({"node_id": "n" * 65}, "bad_node_id"),
        ({"engines": (info(page_size=0),)}, "bad_engine"),
        ({"engines": (info(page_size=48),)}, "bad_engine"),
        ({"engines": (info(num_pages=0),)}, "bad_engine"),
        ({"engines": (info(-1),)}, "bad_engine"),
        ({"engines": (info(0, "a"), info(0, "b"))}, "bad_engine"),
        ({"engines": tuple(info(index) for index in range(65))}, "bad_engine"),
    ],
)
def test_a_node_that_could_harm_others_is_refused(changes: dict[str, Any], code: str) -> None:
    gateway = fleet()
    hello = msgspec.structs.replace(FakeNode(gateway, "n1").hello(), **changes)
    refused = gateway.attach(hello)
    assert isinstance(refused, wire.Refused)
    assert refused.code == code
    assert gateway.nodes() == []
    if "engines" in changes:
        node = FakeNode(gateway, "n1").join()
        node.send(wire.EnginesChanged(changes["engines"]))
        assert gateway.nodes()[0].skipped_frames == 1
        assert gateway.model("m") is not None


def test_unknown_and_broken_frames_are_counted_and_skipped() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    assert node.session is not None
    for frame in (b"", b"\xc1", b"\x91\xa7unknown", wire.encode(wire.Draining("x"))[:-1]):
        gateway.receive(node.session, frame)
    gateway.receive(node.session, "text")  # type: ignore[arg-type]
    node.send(wire.Step(0, 1, [0, 1], [5]))  # columns of different lengths
    node.send(node.hello())
    assert gateway.nodes()[0].skipped_frames == 7
    node.send(wire.Step(0, 1, [-1, 2**40], [5, -5], [wire.Finished(77, "stop", wire.Usage())]))
    assert gateway.nodes()[0].late_tokens == 3
    assert gateway.nodes()[0].state == "ready"


def test_a_stale_report_is_ignored() -> None:
    node = FakeNode(gateway := fleet(), "n1", epoch=3).join()
    node.report(uncached_tokens=5)
    node.send(wire.Report(2, 9, "ready", (wire.EngineReport(0, "down"),)))
    node.send(wire.Report(3, 1, "ready", (wire.EngineReport(0, "down"),)))
    assert gateway.model("m") is not None


def test_final_usages_are_acknowledged_once_settled() -> None:
    seen: list[wire.UsageRecord] = []
    gateway = fleet()
    gateway._on_usage_record = seen.append
    node = FakeNode(gateway, "n1").join()
    gateway.dispatch(request(1))._orphaned = lambda flow: None
    node.read()
    node.end(0)
    usage = wire.Usage(1, 0, 1)
    node.send(wire.UsageRecord("r1", 1, 0, "stop", usage))  # known: its stream was settled
    node.send(wire.UsageRecord("of my predecessor", 2, 0, "stop", usage))
    assert [record.request_id for record in seen] == ["of my predecessor"]
    gateway.tick()
    (ack,) = node.read()
    assert ack == wire.UsageAck((("r1", 1), ("r1", 1), ("of my predecessor", 2)), (0, 0, 0))


def test_a_session_returns_to_its_home_and_tenants_never_share_one() -> None:
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2", "n3")}
    served: dict[bytes, str] = {}
    for number, key in enumerate((b"tenant a + id", b"tenant b + id")):
        stream = gateway.dispatch(request(number, affinity_key=key))
        assert stream.affinity == "new"
        served[key] = stream.node_id
        stream.abort()
    for number, (key, node_id) in enumerate(served.items()):
        stream = gateway.dispatch(request(10 + number, affinity_key=key))
        assert (stream.node_id, stream.affinity) == (node_id, "hit")
        stream.abort()
    nodes[served[b"tenant a + id"]].cut()
    stream = gateway.dispatch(request(20, affinity_key=b"tenant a + id"))
    assert stream.affinity == "spill"
    new_home = stream.node_id
    stream.abort()
    stream = gateway.dispatch(request(21, affinity_key=b"tenant a + id"))
    assert (stream.node_id, stream.affinity) == (new_home, "hit")
    assert gateway.dispatch(request(22)).affinity == "none"


def test_resident_pages_draw_a_request_without_any_header() -> None:
    gateway = fleet()
    FakeNode(gateway, "n1").join()
    warm = FakeNode(gateway, "n2").join()
    FakeNode(gateway, "n3").join()
    prompt = request(1, tokens=64 * 40)
    stored = [wire.PageStored(key[:16]) for key in prompt.page_keys]
    warm.send(wire.PageEvents(0, 0, [wire.CacheCleared(), *stored], snapshot=True))
    for number in range(5):
        stream = gateway.dispatch(request(number, tokens=64 * 40))
        assert stream.node_id == "n2"
        assert stream.decision.chosen.hit_tokens == 64 * 39  # the last token is always computed
        stream.abort()
    warm.send(wire.PageEvents(0, 41, [wire.CacheCleared()]))
    stream = gateway.dispatch(request(9, tokens=64 * 40))
    assert stream.decision.chosen.hit_tokens == 0


def test_a_prompt_just_computed_counts_as_resident_before_its_events() -> None:
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    stream = gateway.dispatch(request(1, tokens=650))
    node = nodes[stream.node_id]
    node.start(node.lanes()[0])
    again = gateway.dispatch(request(2, tokens=650))
    assert again.node_id == stream.node_id
    assert again.decision.chosen.hit_tokens == 640


def test_a_gap_in_page_events_asks_for_the_whole_truth_once() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    node.send(wire.PageEvents(0, 7, [wire.CacheCleared()], snapshot=True))
    one, two, three, four = (wire.PageStored(key[:16]) for key in keys(1, 2, 3, 4))
    node.send(wire.PageEvents(0, 8, [one]))
    node.send(wire.PageEvents(0, 10, [three]))
    node.send(wire.PageEvents(0, 12, [four]))
    assert node.read() == [wire.Resync(0)]
    node.send(wire.PageEvents(0, 0, [wire.CacheCleared(), one, two, three, four], snapshot=True))
    node.send(wire.PageEvents(0, 13, [one]))
    assert node.read() == []
    assert gateway.nodes()[0].engines[0].resident_pages == 4


def test_round_robin_takes_nodes_in_turn_whatever_they_hold() -> None:
    gateway = fleet(policy=RoutingPolicy.ROUND_ROBIN)
    for name in ("n1", "n2", "n3"):
        FakeNode(gateway, name).join()
    served = []
    for number in range(6):
        with gateway.dispatch(request(number, affinity_key=b"k")) as stream:
            served.append((stream.node_id, stream.affinity))
    assert served == [
        ("n1", "new"),
        ("n2", "spill"),
        ("n3", "spill"),
        ("n1", "spill"),
        ("n2", "spill"),
        ("n3", "spill"),
    ]


def test_a_node_with_another_tokenizer_is_not_given_our_ids() -> None:
    other_digest = "cd" * 32
    gateway = fleet()
    gateway.bundles.put(other_digest, gateway.bundles.text(info().bundle_digest))  # type: ignore[arg-type]
    FakeNode(gateway, "n1").join()
    FakeNode(gateway, "n2", info(bundle_digest=other_digest)).join()
    served = gateway.model("m")
    assert served is not None
    assert served.nodes == 1
    for number in range(16):
        with gateway.dispatch(request(number, tokens=1)) as stream:
            assert stream.node_id == "n1"


def test_an_exact_answer_never_comes_from_a_fast_engine() -> None:
    """What is announced is what serves: exact while one such engine is here, whatever is full."""
    gateway = fleet(max_in_flight=1)
    FakeNode(gateway, "n1", info(compute="fast", identity="id+fast")).join()
    assert told(gateway) == ("fast", 1)
    with pytest.raises(NoNode):
        gateway.dispatch(request(1))  # announced as exact before that engine went
    with gateway.dispatch(request(2, compute="fast")) as stream:
        assert stream.info.compute == "fast"

    exact = FakeNode(gateway, "n2").join()
    FakeNode(gateway, "n3", info(compute="fast", identity="id+fast")).join()
    assert told(gateway) == ("exact", 1)
    with gateway.dispatch(request(3)) as stream:
        assert stream.node_id == "n2"
        with pytest.raises(NoCapacity):
            gateway.dispatch(request(4))
        exact.cut()  # before the first token: moved where it may be, and there is no such place
        end = take(stream).end
        assert isinstance(end, wire.Failed)
        assert end.code == "node_lost"
    assert told(gateway) == ("fast", 2)


def told(gateway: Fleet) -> tuple[str, int]:
    """How the model is served, as it is announced, and by how many nodes."""
    served = gateway.model("m")
    assert served is not None
    return served.info.compute, served.nodes


@pytest.mark.parametrize(("restarted", "pages"), [(False, 2), (True, 0)])
def test_a_node_keeps_its_pages_over_a_cut_but_not_over_a_restart(
    restarted: bool, pages: int
) -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stored = [wire.PageStored(key[:16]) for key in keys(1, 2)]
    node.send(wire.PageEvents(0, 0, [wire.CacheCleared(), *stored], snapshot=True))
    node.cut()
    node.epoch += restarted
    node.join()
    assert gateway.nodes()[0].engines[0].resident_pages == pages


def test_a_restarted_engine_starts_with_empty_books() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stored = [wire.PageStored(key[:16]) for key in keys(1, 2)]
    node.send(wire.PageEvents(0, 0, [wire.CacheCleared(), *stored], snapshot=True))
    node.send(wire.EnginesChanged(node.infos))
    assert gateway.nodes()[0].engines[0].resident_pages == 2
    node.send(wire.EnginesChanged((info(num_pages=77), info(1, "late"))))
    assert gateway.nodes()[0].engines[0].resident_pages == 0
    assert gateway.model("late") is not None


# --- tiers ----------------------------------------------------------------------------------------
