"""What waits at the gateway: turns, leaving, moving, deadlines of first tokens, bounds."""

from __future__ import annotations

import pytest

from gateway.nodes.fleet import Fleet, NoCapacity, NoNode, TooLate
from gateway.nodes.streams import Stream
from policies.contract import wire
from policies.pairing import SplitMode
from policies.queue import QueueBounds
from tests.gateway.nodes.fake_node import Clock, FakeNode, fleet, info, keys, request

# The fake engines' budget is 512 tokens, their rate 1,000 a second.


def submitted(node: FakeNode) -> list[str]:
    """The requests that it was sent since the last call."""
    return [one.request_id for one in node.read() if isinstance(one, wire.Submit)]


def answer(node: FakeNode, request_id: str) -> None:
    """The first token of a request, and its end."""
    node.read()
    (lane,) = [lane for lane, (name, _) in node.request_by_lane.items() if name == request_id]
    node.start(lane)
    node.end(lane)


def code(stream: Stream) -> str:
    (burst,) = stream.take()
    assert isinstance(burst.end, wire.Failed)
    return burst.end.code


def queued(gateway: Fleet) -> dict[str, tuple[int, int]]:
    """(requests, tokens) by node."""
    return {
        view.node_id: (view.engines[0].queued_requests, view.engines[0].queued_tokens)
        for view in gateway.nodes()
    }


def test_with_room_a_request_is_sent_in_the_same_call() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    streams = [gateway.dispatch(request(number, tokens=512)) for number in range(2)]
    assert submitted(node) == ["r0", "r1"]
    assert [stream.waited_s for stream in streams] == [0.0, 0.0]
    assert not gateway.queues


def test_an_engine_has_two_budgets_and_the_rest_waits_as_its_backlog() -> None:
    gateway = fleet(clock := Clock())
    node = FakeNode(gateway, "n1").join()
    streams = [gateway.dispatch(request(number, tokens=500)) for number in range(4)]
    assert submitted(node) == ["r0", "r1"]
    view = gateway.nodes()[0]
    assert (view.in_flight, view.engines[0].outstanding_tokens) == (2, 2000)
    assert queued(gateway) == {"n1": (2, 1000)}
    node.report(uncached_tokens=1000)  # what it has is ours: nobody else's work
    assert gateway.nodes()[0].engines[0].backlog_tokens == 2000
    clock.now += 0.5
    node.step([], computed=[(0, 476)])
    assert submitted(node) == ["r2"]  # 24 + 500 + 500
    answer(node, "r0")
    assert submitted(node) == []  # 1,000 are there, 500 do not fit
    answer(node, "r1")
    assert submitted(node) == ["r3"]
    assert streams[2].waited_s == 0.5
    for stream in streams:
        stream.abort()
    assert gateway.nodes()[0].engines[0].outstanding_tokens == 0


def test_one_of_another_tenant_is_sent_within_a_round_of_a_flood() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    flood = [
        gateway.dispatch(request(number, tokens=400, tenant="flood", page_keys=[]))
        for number in range(50)
    ]
    other = gateway.dispatch(request(99, tokens=400, tenant="other", page_keys=[]))
    order = submitted(node)
    assert order == ["r0", "r1"]
    for at in range(50):
        answer(node, order[at])
        order += submitted(node)
    assert order.index("r99") <= 4  # the two that were there, and a quantum of the flood
    assert [name for name in order if name != "r99"] == [f"r{number}" for number in range(50)]
    assert not gateway.queues
    for stream in (*flood, other):
        stream.abort()


def test_prompts_that_begin_alike_do_not_wait_for_the_first_one_each() -> None:
    """Placed at once, all of them count their whole prompt; computed is only the first's."""
    node = FakeNode(gateway := fleet(), "n1").join()
    same = keys(*range(31))
    streams = [
        gateway.dispatch(request(number, tokens=2000, page_keys=same)) for number in range(10)
    ]
    assert submitted(node) == ["r0"]
    answer(node, "r0")
    assert submitted(node) == [f"r{number}" for number in range(1, 10)]
    assert gateway.nodes()[0].engines[0].outstanding_tokens == 9 * 16
    for stream in streams:
        stream.abort()


def test_who_leaves_the_queue_costs_nothing_and_keeps_nobody_waiting() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    first = gateway.dispatch(request(1, tokens=900))
    leaving = gateway.dispatch(request(2, tokens=1000, n=2))
    behind = gateway.dispatch(request(3, tokens=1020, page_keys=[]))
    assert submitted(node) == ["r1"]
    leaving.abort()
    leaving.abort()
    assert [burst.end.reason for burst in leaving.take()] == ["abort", "abort"]  # type: ignore[union-attr]
    answer(node, "r1")
    assert submitted(node) == ["r3"]
    assert not any(isinstance(one, wire.Abort) for one in node.received)
    for stream in (first, behind):
        stream.abort()
    assert gateway.nodes()[0].engines[0].outstanding_tokens == 0


def test_a_stream_that_its_owner_forgot_leaves_the_queue() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    first = gateway.dispatch(request(1, tokens=1000))
    gateway.dispatch(request(2, tokens=1000))
    gateway.tick()
    assert submitted(node) == ["r1"]
    assert queued(gateway) == {"n1": (0, 0)}
    first.abort()


@pytest.mark.parametrize("how", ["cut", "drain", "draining", "down", "restarted", "suspect"])
def test_what_is_queued_moves_when_its_node_serves_no_more(how: str) -> None:
    gateway = fleet(clock := Clock())
    node = FakeNode(gateway, "n1").join()
    streams = [gateway.dispatch(request(number, tokens=900)) for number in range(3)]
    node.read()
    other = FakeNode(gateway, "n2").join()
    match how:
        case "cut":
            node.cut()
        case "drain":
            gateway.drain("n1", True)
        case "draining":
            node.send(wire.Draining())
        case "down":
            node.report(state="down")
        case "restarted":
            node.infos = (info(num_pages=50),)
            node.send(wire.EnginesChanged(node.infos))
        case "suspect":
            for _ in range(110):
                clock.now += 0.05
                other.report()
                gateway.tick()
    if how in ("cut", "down"):  # what had been sent moves too, as its second attempt
        assert (streams[0].node_id, streams[0].attempt) == ("n2", 2)
        answer(other, "r0")
    sent = {}
    for _ in range(2):
        for one in (node, other):
            if one is not node or how == "restarted":  # that engine is new, and as good
                names = [message for message in one.read() if isinstance(message, wire.Submit)]
                sent |= {message.request_id: message.attempt for message in names}
                for message in names:
                    answer(one, message.request_id)
    assert sent == {"r1": 1, "r2": 1}
    for stream in streams[1:]:
        assert (stream.attempt, len(stream.tries)) == (1, 1)  # it touched no node before
    for stream in streams:
        stream.abort()
    for view in gateway.nodes():
        assert view.engines[0].outstanding_tokens == 0


def test_without_another_node_the_queue_of_a_lost_one_fails() -> None:
    gateway = fleet()
    node = FakeNode(gateway, "n1").join()
    first, second = [gateway.dispatch(request(number, tokens=900)) for number in range(2)]
    node.read()
    node.cut()
    assert [code(first), code(second)] == ["node_lost", "node_lost"]
    assert queued(gateway) == {"n1": (0, 0)}


def test_the_only_node_is_told_to_drain_once_its_queue_was_sent() -> None:
    """It refuses what comes after that, and what was let in before has no other place to go."""
    gateway = fleet()
    node = FakeNode(gateway, "n1").join()
    streams = [gateway.dispatch(request(number, tokens=900)) for number in range(2)]
    gateway.drain("n1", True)
    with pytest.raises(NoNode):
        gateway.dispatch(request(9))
    assert submitted(node) == ["r0"]
    gateway.tick()
    node.report()
    assert node.read() == []
    answer(node, "r0")
    gateway.tick()  # its Submit is on its way: an urgent frame would overtake it
    assert [type(one) for one in node.read()] == [wire.UsageAck, wire.Submit]
    gateway.tick()
    gateway.tick()
    assert node.read() == [wire.Drain(True)]
    node.report(node_state="draining")
    answer(node, "r1")
    for stream in streams:
        assert [burst.end.reason for burst in stream.take()] == ["stop"]  # type: ignore[union-attr]
    gateway.tick()
    node.read()
    gateway.drain("n1", False)
    assert node.read() == [wire.Drain(False)]
    node.report()
    gateway.drain("n1", True)
    assert node.read() == [wire.Drain(True)]


def test_what_waits_for_a_drained_node_moves_once_there_is_another() -> None:
    gateway = fleet()
    node = FakeNode(gateway, "n1").join()
    streams = [gateway.dispatch(request(number, tokens=900)) for number in range(2)]
    gateway.drain("n1", True)
    node.read()
    other = FakeNode(gateway, "n2").join()
    node.report()
    assert submitted(other) == ["r1"]
    assert streams[1].attempt == 1
    gateway.tick()
    assert node.read() == [wire.Drain(True)]
    for stream in streams:
        stream.abort()


def test_the_queue_of_the_only_node_fails_when_that_takes_nothing_more() -> None:
    gateway = fleet()
    node = FakeNode(gateway, "n1").join()
    streams = [gateway.dispatch(request(number, tokens=900)) for number in range(2)]
    node.send(wire.Draining())
    assert code(streams[1]) == "node_draining"
    answer(node, "r0")
    assert [burst.end.reason for burst in streams[0].take()] == ["stop"]  # type: ignore[union-attr]


def test_a_suspect_node_keeps_its_queue_while_there_is_no_other() -> None:
    gateway = fleet(clock := Clock())
    node = FakeNode(gateway, "n1").join()
    streams = [gateway.dispatch(request(number, tokens=900)) for number in range(2)]
    node.read()
    for _ in range(104):
        clock.now += 0.05
        gateway.tick()
    answer(node, "r0")
    assert gateway.nodes()[0].state == "suspect"
    assert submitted(node) == []  # nothing new is sent there
    node.report()
    assert submitted(node) == ["r1"]
    for stream in streams:
        stream.abort()


def test_a_full_out_queue_holds_back_what_waits() -> None:
    gateway = fleet(outbox_bytes=5000)
    node = FakeNode(gateway, "n1").join()
    streams = [gateway.dispatch(request(number, tokens=900, page_keys=[])) for number in range(2)]
    lane = node.lanes()[0]
    assert node.session is not None
    node.session.outbox.send_urgent(bytes(5001))
    node.start(lane)
    assert queued(gateway) == {"n1": (1, 900)}
    node.session.outbox.pop()
    gateway.tick()
    assert submitted(node) == ["r1"]
    for stream in streams:
        stream.abort()


def test_the_deadline_of_a_request_holds_in_the_queue() -> None:
    gateway = fleet(clock := Clock())
    node = FakeNode(gateway, "n1").join()
    node.report()
    first = gateway.dispatch(request(1, tokens=900))
    second = gateway.dispatch(request(2, tokens=900, deadline_s=2.0))
    third = gateway.dispatch(request(3, tokens=900, deadline_s=4.0))
    clock.now += 2.0
    gateway.tick()
    assert code(second) == "deadline_exceeded"
    assert gateway.queues.sheds == {"deadline": 1}
    answer(node, "r1")
    (submit,) = [one for one in node.read() if isinstance(one, wire.Submit)]
    assert (submit.request_id, submit.deadline_s) == ("r3", 2.0)
    for stream in (first, third):
        stream.abort()


def test_other_gateways_work_takes_room_until_it_must_be_done() -> None:
    gateway = fleet(clock := Clock())
    node = FakeNode(gateway, "n1").join()
    node.report(uncached_tokens=1500)
    stream = gateway.dispatch(request(1, tokens=500))
    assert submitted(node) == []
    clock.now += 0.9
    gateway.tick()
    assert submitted(node) == []
    clock.now += 0.1
    gateway.tick()
    assert submitted(node) == ["r1"]  # no word since, but 1,000 of those are computed
    stream.abort()


def test_a_queue_that_is_full_sends_requests_elsewhere_and_then_away() -> None:
    gateway = fleet(queue=QueueBounds(requests=2))
    FakeNode(gateway, "n1").join()
    streams = [gateway.dispatch(request(number, tokens=1024)) for number in range(3)]
    FakeNode(gateway, "n2").join()
    streams += [gateway.dispatch(request(number, tokens=1024)) for number in range(3, 6)]
    assert queued(gateway) == {"n1": (2, 2048), "n2": (2, 2048)}
    with pytest.raises(NoCapacity) as refused:
        gateway.dispatch(request(9))
    assert set(refused.value.rejected) == {("n1", "queue"), ("n2", "queue")}
    assert refused.value.retry_after_s == pytest.approx(3.072)  # 3 × 1,024 at 1,000 a second
    assert gateway.queues.sheds == {"full": 1}
    for stream in streams:
        stream.abort()


# --- the deadline of a first token ---------------------------------------------------------------


def test_a_home_that_would_be_late_is_left_for_a_node_in_time() -> None:
    gateway = fleet()
    home = FakeNode(gateway, "n1").join()
    prompt = {"affinity_key": b"a", "tokens": 1920, "page_keys": keys(*range(30))}
    first = gateway.dispatch(request(1, **prompt))
    answer(home, "r1")
    FakeNode(gateway, "n2").join()
    busy = gateway.dispatch(request(2, tokens=2500, page_keys=keys(*range(20))))
    assert busy.node_id == "n1"  # half of it is there
    patient = gateway.dispatch(request(3, **prompt))
    assert (patient.node_id, patient.affinity) == ("n1", "hit")
    hasty = gateway.dispatch(request(4, **prompt, ttft_deadline_s=1.4))
    assert hasty.affinity == "hit"
    with pytest.raises(TooLate):
        gateway.dispatch(request(5, **prompt, ttft_deadline_s=0.9))
    other = gateway.dispatch(request(6, tokens=1000, ttft_deadline_s=1.0, affinity_key=b"a"))
    assert (other.node_id, other.affinity) == ("n2", "spill")
    for stream in (first, busy, patient, hasty, other):
        stream.abort()


def test_where_all_would_be_late_it_is_refused_at_once_with_a_time() -> None:
    gateway = fleet()
    nodes = [FakeNode(gateway, name).join() for name in ("n1", "n2")]
    streams = [gateway.dispatch(request(number, tokens=3000)) for number in range(3)]
    with pytest.raises(TooLate, match="3") as refused:
        gateway.dispatch(request(8, tokens=500, page_keys=[], ttft_deadline_s=2.0))
    assert refused.value.first_token_s == pytest.approx(3.5)
    assert refused.value.retry_after_s == pytest.approx(1.5)
    assert set(refused.value.rejected) == {("n1", "late"), ("n2", "late")}
    assert gateway.queues.sheds == {"ttft": 1}
    streams.append(gateway.dispatch(request(9, tokens=500, page_keys=[], ttft_deadline_s=4.0)))
    sent = [name for node in nodes for name in submitted(node)]
    assert sorted(sent) == ["r0", "r1", "r9"]  # one budget beside a large one
    for stream in streams:
        stream.abort()


def test_who_takes_too_long_by_itself_is_told_to_stay_away() -> None:
    FakeNode(gateway := fleet(), "n1").join()
    with pytest.raises(TooLate) as refused:
        gateway.dispatch(request(1, tokens=3000, page_keys=[], ttft_deadline_s=2.0))
    assert (refused.value.first_token_s, refused.value.retry_after_s) == (3.0, 30.0)


def test_who_waits_is_moved_when_it_would_be_late_here() -> None:
    gateway = fleet(clock := Clock())
    node = FakeNode(gateway, "n1").join()
    node.report()
    first = gateway.dispatch(request(1, tokens=1000, page_keys=[]))
    hasty = gateway.dispatch(request(2, tokens=500, page_keys=[], ttft_deadline_s=1.6))
    other = FakeNode(gateway, "n2").join()
    gateway.tick()
    assert hasty.node_id == "n1"
    clock.now += 0.5  # the engine has said nothing, so 1,000 are still before it
    gateway.tick()
    assert (hasty.node_id, hasty.attempt, hasty.waited_s) == ("n2", 1, 0.5)
    assert submitted(other) == ["r2"]
    assert not gateway.queues.sheds
    for stream in (first, hasty):
        stream.abort()


def test_who_waits_is_refused_as_soon_as_it_must_be_late() -> None:
    gateway = fleet(clock := Clock())
    node = FakeNode(gateway, "n1").join()
    node.report()
    first = gateway.dispatch(request(1, tokens=1000, page_keys=[]))
    hasty = gateway.dispatch(request(2, tokens=500, page_keys=[], ttft_deadline_s=1.6))
    patient = gateway.dispatch(request(3, tokens=500, page_keys=[]))
    clock.now += 0.5
    node.step([], computed=[(node.lanes()[0], 500)])
    assert submitted(node) == ["r2"]
    clock.now += 3.0
    node.report()
    gateway.tick()
    assert hasty.take() == []  # what was sent is let alone
    late = gateway.dispatch(request(4, tokens=500, page_keys=[], ttft_deadline_s=2.1))
    clock.now += 0.2
    gateway.tick()
    assert code(late) == "ttft_missed"
    assert late.retry_after_s == 0.5  # 2,000 tokens at 1,000 a second: it would be in time
    assert gateway.queues.sheds == {"ttft_queued": 1}
    for stream in (first, hasty, patient):
        stream.abort()
    assert gateway.nodes()[0].engines[0].outstanding_tokens == 0


def test_a_tenants_turn_counts_for_what_is_in_time() -> None:
    """Behind another's flood of 20 s a first token comes soon all the same."""
    gateway = fleet()
    node = FakeNode(gateway, "n1").join()
    flood = [
        gateway.dispatch(request(number, tokens=400, tenant="flood", page_keys=[]))
        for number in range(50)
    ]
    with pytest.raises(TooLate):
        gateway.dispatch(request(98, tokens=400, tenant="flood", page_keys=[], ttft_deadline_s=3.0))
    other = gateway.dispatch(
        request(99, tokens=400, tenant="other", page_keys=[], ttft_deadline_s=3.0)
    )
    decision = gateway.decided("r99")[0][1].decision
    assert decision.chosen.first_token_s == pytest.approx(2.112)  # 800 there, 912 in turn, 400
    assert decision.chosen.queue_s == pytest.approx(1.088)  # until 624 of those are left
    assert submitted(node) == ["r0", "r1"]
    for stream in (*flood, other):
        stream.abort()


def test_a_shed_request_was_never_sent_and_has_no_home() -> None:
    gateway = fleet()
    node = FakeNode(gateway, "n1").join()
    first = gateway.dispatch(request(1, tokens=3000))
    with pytest.raises(TooLate):
        gateway.dispatch(request(2, affinity_key=b"a", ttft_deadline_s=0.5))
    assert submitted(node) == ["r1"]
    assert gateway.session_keys() == []
    first.abort()


# --- prefill and decode apart --------------------------------------------------------------------


def pair_of(clock: Clock, *names: str, mode: SplitMode = SplitMode.ALWAYS) -> dict[str, FakeNode]:
    gateway = fleet(clock, split=mode)
    roles: dict[str, wire.Role] = {"p": "prefill", "d": "decode"}
    return {
        name: FakeNode(gateway, name, info(peer=f"{name}:7"), role=roles[name[0]]).join()
        for name in names
    }


def test_both_halves_of_a_split_wait_for_the_engine_that_computes() -> None:
    nodes = pair_of(Clock(), "p1", "d1")
    prefill, decode = nodes["p1"], nodes["d1"]
    gateway = prefill.fleet
    first, second = [
        gateway.dispatch(request(number, tokens=900, page_keys=[])) for number in (1, 2)
    ]
    assert (submitted(prefill), submitted(decode)) == (["r1"], ["r1"])
    assert queued(gateway) == {"p1": (1, 900), "d1": (0, 0)}
    assert (second.node_id, second.prefill_node, second.attempt) == ("d1", "p1", 1)
    prefill.end(prefill.lanes()[0], "length")
    assert (submitted(prefill), submitted(decode)) == (["r2"], ["r2"])
    decode.start(decode.lanes()[0])
    for stream in (first, second):
        stream.abort()
    assert [view.engines[0].outstanding_tokens for view in gateway.nodes()] == [0, 0]


def test_a_split_that_waits_leaves_both_nodes_as_they_were() -> None:
    nodes = pair_of(Clock(), "p1", "d1")
    gateway = nodes["p1"].fleet
    streams = [gateway.dispatch(request(number, tokens=900, page_keys=[])) for number in (1, 2)]
    streams[1].abort()
    for node in nodes.values():
        assert submitted(node) == ["r1"]
    streams[0].abort()
    for node in gateway._node_by_id.values():
        assert (node.num_queued, node.engine_by_index[0].seated_tokens) == (0, 0)
    assert dict(gateway.pairs.outcomes) == {"left": 2}


def test_a_split_that_waits_is_paired_anew_when_decode_is_lost() -> None:
    nodes = pair_of(Clock(), "p1", "d1")
    gateway = nodes["p1"].fleet
    streams = [gateway.dispatch(request(number, tokens=900, page_keys=[])) for number in (1, 2)]
    nodes |= {"d2": FakeNode(gateway, "d2", info(peer="d2:7"), role="decode").join()}
    streams[0].abort()
    nodes["p1"].read()
    streams[1].abort()
    waiting = [gateway.dispatch(request(number, tokens=900, page_keys=[])) for number in (3, 4)]
    lost = waiting[1].node_id
    nodes[lost].cut()
    stays = "d2" if lost == "d1" else "d1"
    assert (waiting[1].node_id, waiting[1].attempt) == (stays, 1)
    assert waiting[1].prefill_node == "p1"
    for stream in waiting:
        stream.abort()
    assert {view.engines[0].outstanding_tokens for view in gateway.nodes()} == {0}


def test_a_split_with_a_deadline_takes_whoever_is_in_time() -> None:
    nodes = pair_of(Clock(), "p1", "d1")
    gateway = nodes["p1"].fleet
    busy = gateway.dispatch(request(1, tokens=3000, page_keys=[]))
    whole = gateway.dispatch(request(2, tokens=900, page_keys=[], ttft_deadline_s=2.0))
    assert (whole.path, whole.node_id) == ("bypass", "d1")  # p1 has 3 s to do
    with pytest.raises(TooLate):
        gateway.dispatch(request(3, tokens=900, page_keys=[], ttft_deadline_s=1.5))
    for stream in (busy, whole):
        stream.abort()


def test_a_pair_that_was_not_worth_it_is_when_it_alone_is_in_time() -> None:
    nodes = pair_of(Clock(), "p1", "d1", mode=SplitMode.AUTO)
    gateway = nodes["p1"].fleet
    busy = gateway.dispatch(request(1, tokens=1000, page_keys=[]))
    assert busy.path == "bypass"
    split = gateway.dispatch(request(2, tokens=900, page_keys=[], ttft_deadline_s=1.5))
    assert (split.path, split.prefill_node) == ("split", "p1")
    for stream in (busy, split):
        stream.abort()
