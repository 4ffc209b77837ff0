"""In which form a page travels between engines whose pages differ, or why it cannot."""

from __future__ import annotations

from engine.store.page_codec import PRECISION_BYTES, PageLayout
from engine.transfer.messages import PageForm
from engine.transfer.shards import whole

_GRID = ("num_layers", "num_kv_heads", "page_size", "head_dim")


def form_of(layout: PageLayout) -> PageForm:
    return PageForm(layout, layout.layout_id, whole(layout))


def misfit(ours: PageForm, theirs: PageForm) -> str | None:
    """Why pages of one cannot become pages of the other; None: they can. Only precisions may
    differ: store/quantise.py converts these."""
    layout = theirs.layout
    if layout.precision in PRECISION_BYTES and theirs.layout_id == layout.layout_id:
        same_grid = all(getattr(layout, name) == getattr(ours.layout, name) for name in _GRID)
        if same_grid and theirs.shard == ours.shard:
            return None
    return (
        f"pages: found {theirs.layout_id[:100]} {theirs.shard}, allowed any precision of "
        f"{ours.layout_id} {ours.shard}; pair engines of one model, version and division"
    )


def travels_as(sent: PageLayout, kept: PageLayout) -> PageLayout:
    """The smaller of the two, so that the sender converts where that makes fewer bytes."""
    return kept if kept.page_bytes < sent.page_bytes else sent
