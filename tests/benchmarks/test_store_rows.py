"""The store's benchmark measures both tiers at every size, and fails where a page is not served."""

from pathlib import Path

import pytest

from benchmarks.store import CALLERS, LAYOUTS, Pages, acts_of, measure
from engine.store.host import HostTier


def test_every_row_is_beside_a_peer(tmp_path: Path) -> None:
    rows = list(measure(tmp_path, rounds=1, total_bytes=8 << 20, slots=20))
    acts = [
        f"{tier}_{size}_{verb}_x{callers}"
        for size in LAYOUTS
        for tier in ("host", "disk")
        for callers in CALLERS
        for verb in ("put", "get")
    ]
    assert {row.name for row in rows} == {*acts, *(f"checksum_{s}" for s in LAYOUTS), "disk_scan"}
    assert all(row.ours > 0 and row.best for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_is_not_served_is_no_figure() -> None:
    pages = Pages(LAYOUTS["256k"], 2)
    put, get = acts_of(HostTier(pages.layout, 1), pages)
    put(0)
    get(0)
    with pytest.raises(RuntimeError, match="NOSPACE"):
        put(1)
    with pytest.raises(RuntimeError, match="MISS"):
        get(1)
