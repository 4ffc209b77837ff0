"""What slower tiers of nodes are worth to routing, and how a hit is told by tier."""

from __future__ import annotations

import msgspec
import pytest

from policies.contract import wire
from tests.gateway.nodes.fake_node import FakeNode, fleet, info, keys, request


def tiered(node: FakeNode, *tiers: wire.TierReport) -> None:
    node.report(tiers=tiers)


def stored(node: FakeNode, first: int, tier: wire.Tier, *depths: int) -> None:
    """Of request(…)'s chain the pages at these depths (1: the first) are in the tier."""
    held = [wire.PageStored(keys(depth - 1)[0][:16], tier) for depth in depths]
    node.send(wire.PageEvents(0, first, list(held)))


def test_a_prefix_on_disk_is_worth_its_prefill_less_its_fetch() -> None:
    pages = {"page_bytes": 1_000_000}
    cold = FakeNode(gateway := fleet(), "cold", info(**pages)).join()
    warm = FakeNode(gateway, "warm", info(**pages)).join()
    stored(warm, 0, "device", 1)
    stored(warm, 1, "disk", 8)  # every eighth page is told
    tiered(cold)
    tiered(warm, wire.TierReport("disk", 100, 8, fetch_bytes_per_s=1e8))
    with gateway.dispatch(request(1, 600)) as stream:
        chosen = stream.decision.chosen
        assert (stream.node_id, chosen.hit_tokens) == ("warm", 8 * 64)
        assert chosen.fetch_s == pytest.approx(7 * 0.01)
    # So slow that computing is quicker: only what is on the device counts.
    tiered(warm, wire.TierReport("disk", 100, 8, fetch_bytes_per_s=1e7))
    with gateway.dispatch(request(2, 600)) as stream:
        by_node = {one.candidate.node_id: one for one in stream.decision.scored}
        assert (by_node["warm"].hit_tokens, by_node["warm"].fetch_s) == (64, 0.0)
    # Nothing is asked of a broken tier; without a rate of its own the parameters' counts.
    tiered(warm, wire.TierReport("disk", 100, 8, state="broken", fetch_bytes_per_s=1e8))
    with gateway.dispatch(request(3, 600)) as stream:
        assert {one.hit_tokens for one in stream.decision.scored} == {0, 64}
    tiered(warm, wire.TierReport("disk", 100, 8))
    with gateway.dispatch(request(4, 600)) as stream:
        rate = gateway.config.parameters.disk_bytes_per_s
        assert stream.decision.chosen.fetch_s == pytest.approx(7 * 1e6 / rate)


def test_a_page_of_the_cluster_store_is_near_every_node_with_pages_of_its_kind() -> None:
    store = wire.TierReport("cluster", 0, 8, fetch_bytes_per_s=1e9)
    same = {"page_bytes": 1000, "layout_id": "one"}
    nodes = {
        "writer": FakeNode(gateway := fleet(), "writer", info(page_kind="a", **same)).join(),
        "reader": FakeNode(gateway, "reader", info(page_kind="a", **same)).join(),
        "other_cpu": FakeNode(gateway, "other_cpu", info(page_kind="b", **same)).join(),
        "alone": FakeNode(gateway, "alone", info(page_kind="a", **same)).join(),
    }
    stored(nodes["writer"], 0, "cluster", *range(1, 9))
    for name, node in nodes.items():
        tiered(node, *(() if name == "alone" else (store,)))
    with gateway.dispatch(request(1, 600)) as stream:
        hits = {one.candidate.node_id: one.hit_tokens for one in stream.decision.scored}
    assert hits == {"writer": 512, "reader": 512, "other_cpu": 0, "alone": 0}


def test_a_page_in_memory_that_engines_share_is_near_each_of_them_and_no_other() -> None:
    memory = wire.TierReport("host", 100, 8, fetch_bytes_per_s=1e9)
    here = {"page_bytes": 1000, "host_arena": "a"}
    nodes = {
        "writer": FakeNode(gateway := fleet(), "writer", info(**here)).join(),
        "reader": FakeNode(gateway, "reader", info(**here)).join(),
        "elsewhere": FakeNode(gateway, "elsewhere", info(page_bytes=1000, host_arena="b")).join(),
        "own": FakeNode(gateway, "own", info(page_bytes=1000)).join(),
    }
    for node in nodes.values():
        tiered(node, memory)
    stored(nodes["writer"], 0, "host", *range(1, 9))
    stored(nodes["own"], 0, "host", 1, 2)
    with gateway.dispatch(request(1, 600)) as stream:
        hits = {one.candidate.node_id: one.hit_tokens for one in stream.decision.scored}
    assert hits == {"writer": 512, "reader": 512, "elsewhere": 0, "own": 128}


def test_a_hit_is_told_by_tier_as_its_start_or_surer_its_end_says() -> None:
    node = FakeNode(gateway := fleet(), "n1").join()

    def tiers(started: wire.Started, usage: wire.Usage) -> tuple[dict[str, int], dict[str, int]]:
        with gateway.dispatch(request(node.step_number, 600)) as stream:
            (lane,) = node.lanes()
            node.step([lane], rare=[msgspec.structs.replace(started, lane=lane)])
            first = dict(stream.cached_by_tier)
            node.request_by_lane.pop(lane)
            node.step([], rare=[wire.Finished(lane, "stop", usage)])
            return first, dict(stream.cached_by_tier)

    whole = wire.Usage(600, 512, 1, host_tokens=128, disk_tokens=64)
    split = {"device": 320, "host": 128, "disk": 64}
    assert tiers(wire.Started(0, 512), wire.Usage(600, 512, 1)) == ({"device": 512},) * 2
    assert tiers(wire.Started(0, 512, 0.0, "disk", 128, 64), whole) == (split, split)
    assert tiers(wire.Started(0, 512, 0.0, "disk"), whole) == ({"disk": 512}, split)
    assert tiers(wire.Started(0, 512, 0.0, "disk", 600), wire.Usage(600, 512, 1)) == (
        ({"disk": 512},) * 2  # more than was cached: the split is not believed
    )
    assert tiers(wire.Started(0, 0), wire.Usage(600, 0, 1)) == ({}, {})
