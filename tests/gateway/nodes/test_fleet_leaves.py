"""Thousands of requests whose clients leave and whose nodes fail: every counter returns to zero."""

from __future__ import annotations

from random import Random

import pytest

from gateway.nodes.placement import NoCapacity, NoNode
from gateway.nodes.streams import Stream
from tests.gateway.nodes.fake_node import Clock, FakeNode, fleet, keys, request

NODES = ("n1", "n2", "n3", "n4")


def work(node: FakeNode, random: Random) -> None:
    """Something happens to one of a node's streams, or to the node."""
    lanes = node.lanes()
    if not lanes:
        return
    lane = random.choice(lanes)
    match random.randrange(12):
        case 0 | 1:
            node.step([], computed=[(lane, random.randrange(2000))])
        case 2 | 3 | 4:
            node.start(lane)
        case 5 | 6 | 7:
            node.end(lane)
        case 8:
            node.fail(lane, random.choice(["engine_lost", "engine_full", "boom"]))
        case 9:
            node.report(uncached_tokens=random.randrange(5000), step=node.step_number)
        case 10:
            node.report(state=random.choice(["ready", "down"]))
        case 11:
            node.epoch += random.randrange(2)
            if random.random() < 0.5:
                node.cut()
            node.join()


def run(requests: int) -> None:
    random = Random(1)
    clock = Clock()
    gateway = fleet(clock, max_in_flight=16)
    nodes = [FakeNode(gateway, name).join() for name in NODES]
    streams: list[Stream] = []
    for number in range(requests):
        clock.now += random.random() * 0.02
        try:
            tokens = random.choice([10, 100, 1000, 6000])
            streams.append(
                gateway.dispatch(
                    request(
                        number,
                        tokens=tokens,
                        page_keys=keys(*range(number % 9, number % 9 + tokens // 64)),
                        affinity_key=random.choice([None, b"a", b"b"]),
                        n=random.choice([1, 1, 1, 3]),
                    )
                )
            )
        except (NoCapacity, NoNode):
            pass
        for node in nodes:
            work(node, random)
        if streams and random.random() < 0.5:
            streams.pop(random.randrange(len(streams))).abort()
        gateway.tick()
    for stream in streams:
        stream.abort()
    for node in nodes:
        for lane in node.lanes():
            node.end(lane, "abort")
        node.report(step=node.step_number + 1)
        assert node.session is not None
        assert not node.session.live
        assert not node.session.ending
        assert len(set(node.session._free)) == node.session._num_lanes
        assert node.session.outbox.size_bytes == 0
    for view in gateway.nodes():
        assert view.in_flight == 0
        assert [engine.backlog_tokens for engine in view.engines] == [0]


def test_counters_return_to_zero() -> None:
    run(400)


@pytest.mark.slow
def test_counters_return_to_zero_after_ten_thousand() -> None:
    run(10_000)
