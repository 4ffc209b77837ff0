"""The fleet with requests of several lanes: one Submit, whole moves, ends one by one."""

from __future__ import annotations

import asyncio

import pytest

from gateway.nodes.placement import NoCapacity
from gateway.nodes.streams import Burst, Waiter
from policies.contract import wire
from tests.gateway.nodes.fake_node import FakeNode, fleet, request


def test_lanes_of_one_request_go_out_in_one_submit_and_end_one_by_one() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stream = gateway.dispatch(request(1, n=3))
    (submit,) = node.read()
    assert submit.lanes == (0, 1, 2)
    node.step([0, 2, 0], [5, 6, 7], [wire.Started(0, 64), wire.Started(2, 99)])
    assert stream.take() == [Burst(0, [5, 7], None), Burst(2, [6], None)]
    assert stream.cached_tokens == 64  # of the lane that computes the prompt
    node.end(0)
    stream.finish(2, 1)
    assert node.read() == [wire.FinishLane(2, 1)]
    assert [(burst.index, burst.tokens) for burst in stream.take()] == [(0, [])]
    assert stream.take() == []  # lane 1 goes on
    other = gateway.dispatch(request(2))
    assert node.lanes() == [1, 2, 0]  # lane 2 is free only after the node's own end
    node.step([1, 2], [8, 9])
    node.end(1)
    assert [(burst.index, burst.tokens) for burst in stream.take()] == [(1, [8])]
    assert stream.produced == 4
    other.abort()


def test_a_request_that_lost_its_node_moves_whole_or_fails_whole() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    early, late = gateway.dispatch(request(1, n=2)), gateway.dispatch(request(2, n=2))
    node.read()
    other = FakeNode(gateway, "n2").join()
    node.step([3])  # one token, of the second lane of the second request
    node.cut()
    assert (early.attempt, late.attempt) == (2, 1)
    assert other.lanes() == [0, 1]
    assert early.take() == []
    assert [(burst.tokens, type(burst.end)) for burst in late.take()] == [
        ([], wire.Failed),
        ([7], wire.Failed),
    ]


@pytest.mark.parametrize("code", ["node_draining", "tag_mismatch"])
def test_one_lane_that_fails_takes_the_others_along(code: str) -> None:
    """Retried elsewhere only while nothing of any lane came, an end included."""
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    stream = gateway.dispatch(request(1, n=3))
    node = nodes[stream.node_id]
    first, second, third = node.lanes()
    node.end(first)
    node.fail(second, code)
    assert node.read() == [wire.Abort((third,))]
    assert stream.attempt == 1
    assert [type(burst.end) for burst in stream.take()] == [wire.Finished, wire.Failed, wire.Failed]
    node.end(third, "abort")
    assert gateway.nodes()[0].in_flight == gateway.nodes()[1].in_flight == 0


def test_refused_by_one_node_all_lanes_move_to_another() -> None:
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    stream = gateway.dispatch(request(1, n=2))
    node = nodes.pop(stream.node_id)
    lanes = node.lanes()
    node.request_by_lane.clear()
    node.step([], rare=[wire.Failed(lane, "node_draining", "no") for lane in lanes])
    assert stream.attempt == 2
    assert node.session is not None
    assert node.session.in_flight == 0
    (other,) = nodes.values()
    assert sorted(other.lanes()) == [0, 1]


def test_an_unsent_submit_is_withdrawn_with_all_its_lanes() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    gateway.dispatch(request(1, n=4)).abort()
    assert node.read() == []
    assert node.session is not None
    assert sorted(node.session._free) == [0, 1, 2, 3]


def test_an_abort_never_takes_back_anothers_submit_by_a_reused_number() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    first = gateway.dispatch(request(1, n=2))
    node.read()
    node.end(0)
    second = gateway.dispatch(request(2))  # unsent, on the number that was freed
    first.abort()
    messages = node.read()
    assert [type(message) for message in messages] == [wire.Abort, wire.Submit]
    assert messages[0] == wire.Abort((1,))
    second.abort()


def test_each_lane_is_acknowledged_by_its_number() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stream = gateway.dispatch(request(1, n=2))
    node.read()
    node.end(1)
    gateway.tick()
    assert node.read() == [wire.UsageAck((("r1", 1),), (1,))]
    stream.abort()
    node.read()
    node.end(0, "abort")
    gateway.tick()
    assert node.read() == [wire.UsageAck((("r1", 1),), (0,))]


def test_log_probabilities_stay_beside_their_tokens() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    stream = gateway.dispatch(request(1, n=2))
    node.read()
    told = [wire.TokenLogprob(-float(number), 1) for number in range(5)]
    node.step([], rare=[wire.PromptLogprobs(0, 1, tuple(told[:2]))])
    node.step([], rare=[wire.PromptLogprobs(0, 3, tuple(told[2:]))])
    node.step([], rare=[wire.PromptLogprobs(0, 1, tuple(told[:2]))])  # told again: ignored
    node.step([0, 1, 0], [5, 6, 7], [wire.Logprobs(0, (told[0], told[1]))])
    node.step([0], [8], [wire.Logprobs(0, (told[2],)), wire.Logprobs(9, (told[2],))])
    assert stream.take() == [Burst(0, [5, 7, 8], None, told[:3]), Burst(1, [6], None)]
    assert stream.prompt_logprobs == told
    stream.abort()


def test_what_a_lost_node_told_of_the_prompt_is_forgotten() -> None:
    gateway = fleet()
    nodes = {name: FakeNode(gateway, name).join() for name in ("n1", "n2")}
    stream = gateway.dispatch(request(1))
    node = nodes[stream.node_id]
    node.read()
    node.step([], rare=[wire.PromptLogprobs(0, 1, (wire.TokenLogprob(-1.0, 1),))])
    node.cut()
    assert stream.attempt == 2
    assert stream.prompt_logprobs == []
    stream.abort()


def test_many_lanes_fit_an_idle_node_and_wait_for_a_busy_one() -> None:
    FakeNode(gateway := fleet(max_in_flight=4), "n1").join()
    large = gateway.dispatch(request(1, n=6))  # a bound never shuts a request out
    with pytest.raises(NoCapacity):
        gateway.dispatch(request(2, n=1))
    large.abort()
    gateway.dispatch(request(3, n=2))
    with pytest.raises(NoCapacity):
        gateway.dispatch(request(4, n=3))
    gateway.dispatch(request(5, n=2))


def test_one_waiter_serves_several_streams() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()
    waiter = Waiter()

    async def read() -> None:
        streams = [gateway.dispatch(request(number), waiter) for number in range(2)]
        node.read()
        asyncio.get_running_loop().call_soon(node.step, [1], [7])
        await waiter.wait(5.0)
        assert [stream.take() for stream in streams] == [[], [Burst(0, [7], None)]]
        for stream in streams:
            stream.abort()

    asyncio.run(read())
