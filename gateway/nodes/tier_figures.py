"""What nodes report of their pages, tier by tier, as figures of the table of metrics."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.nodes.views import NodeView
from gateway.telemetry import Metrics
from policies.contract.wire import EngineReport

GAUGES = (
    "kagari_tier_pages_used",
    "kagari_tier_pages_capacity",
    "kagari_tier_working",
    "kagari_tier_fetch_bytes_per_second",
    "kagari_pages_pinned",
)
COUNTS = {  # metric → field of a tier's report, counted since the engine's start
    "kagari_tier_hit_pages": "hit_pages",
    "kagari_tier_miss_pages": "miss_pages",
    "kagari_tier_stored_pages": "stored_pages",
    "kagari_tier_evicted_pages": "evicted_pages",
    "kagari_tier_dropped_pages": "dropped_pages",
    "kagari_tier_corrupt_pages": "corrupt_pages",
    "kagari_tier_timeouts": "timeouts",
    "kagari_tier_charged_pages": "charged_pages",
}


def tell_tiers(board: Metrics, nodes: Iterable[NodeView]) -> None:
    """Call at each scrape: gauges are of linked nodes alone, counters go on from the last call."""
    for name in GAUGES:
        board.clear(name)
    for node in nodes:
        if node.link_age_s is None:
            continue
        for engine in node.engines:
            if engine.report is not None:
                _tell(board, engine.report, node=node.node_id, model=engine.info.model)


def _tell(board: Metrics, report: EngineReport, *, node: str, model: str) -> None:
    on_device = {"node": node, "model": model, "tier": "device"}
    board.set("kagari_tier_pages_used", report.pages_held + report.pages_cached, **on_device)
    board.set("kagari_tier_pages_capacity", report.pages_total, **on_device)
    board.set("kagari_pages_pinned", report.pages_pinned, node=node, model=model)
    board.reach("kagari_tier_charged_pages", report.charged_pages, **on_device)
    board.reach("kagari_quota_breaches", report.quota_breaches, node=node, model=model)
    board.reach("kagari_integrity_faults", report.integrity_faults, node=node, model=model)
    for tier in report.tiers:
        labels = {"node": node, "model": model, "tier": tier.tier}
        board.set("kagari_tier_pages_used", tier.pages_used, **labels)
        board.set("kagari_tier_pages_capacity", tier.pages_total, **labels)
        board.set("kagari_tier_working", tier.state == "ok", **labels)
        board.set("kagari_tier_fetch_bytes_per_second", tier.fetch_bytes_per_s, **labels)
        for name, field in COUNTS.items():
            board.reach(name, getattr(tier, field), **labels)
