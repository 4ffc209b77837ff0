"""Figures of tiers at /metrics: gauges of what is linked, counters that never fall."""

from __future__ import annotations

from gateway.nodes.tier_figures import tell_tiers
from gateway.telemetry import Metrics
from policies.contract import wire
from tests.gateway.nodes.fake_node import FakeNode, fleet


def figures(board: Metrics) -> dict[str, float]:
    return {
        f"{sample.name} {sample.labels.get('node')} {sample.labels.get('tier')}": sample.value
        for family in board.registry.collect()
        for sample in family.samples
        if sample.labels.get("node") and not sample.name.endswith("_created")
    }


def test_reports_become_figures_by_node_and_tier() -> None:
    board, gateway = Metrics(), fleet()
    node = FakeNode(gateway, "n1").join()
    disk = wire.TierReport("disk", 100, 9, "broken", 5, 4, 3, 2, 1, 7, 6, 1e9, 8)
    node.report(
        tiers=(disk,), pages_total=50, pages_held=3, pages_cached=4,
        pages_pinned=2, integrity_faults=1, charged_pages=4, quota_breaches=3,
    )  # fmt: skip
    for _ in range(2):  # a second scrape counts nothing twice
        tell_tiers(board, gateway.nodes())
        assert figures(board) == {
            "kagari_tier_pages_used n1 device": 7,
            "kagari_tier_pages_capacity n1 device": 50,
            "kagari_tier_pages_used n1 disk": 9,
            "kagari_tier_pages_capacity n1 disk": 100,
            "kagari_tier_working n1 disk": 0,
            "kagari_tier_fetch_bytes_per_second n1 disk": 1e9,
            "kagari_tier_hit_pages_total n1 disk": 5,
            "kagari_tier_miss_pages_total n1 disk": 4,
            "kagari_tier_stored_pages_total n1 disk": 3,
            "kagari_tier_evicted_pages_total n1 disk": 2,
            "kagari_tier_dropped_pages_total n1 disk": 1,
            "kagari_tier_corrupt_pages_total n1 disk": 7,
            "kagari_tier_timeouts_total n1 disk": 6,
            "kagari_tier_charged_pages_total n1 device": 4,
            "kagari_tier_charged_pages_total n1 disk": 8,
            "kagari_quota_breaches_total n1 None": 3,
            "kagari_pages_pinned n1 None": 2,
            "kagari_integrity_faults_total n1 None": 1,
        }


def test_counters_go_on_when_an_engine_begins_anew_and_gauges_go_with_the_link() -> None:
    board, gateway = Metrics(), fleet()
    node = FakeNode(gateway, "n1").join()
    for hits in (10, 12, 3, 5):
        node.report(tiers=(wire.TierReport("host", 10, 1, hit_pages=hits),))
        tell_tiers(board, gateway.nodes())
    assert figures(board)["kagari_tier_hit_pages_total n1 host"] == 12 + 5
    node.cut()
    tell_tiers(board, gateway.nodes())
    assert not any(name.startswith("kagari_tier_pages") for name in figures(board))
    assert figures(board)["kagari_tier_hit_pages_total n1 host"] == 17
