"""Tiers as flags ask for them: one folder on disk a kind of page, and none that nobody uses."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig, ModelSpec
from engine.store.opening import OpenTiers, open_tiers
from engine.store.page_codec import PageLayout
from engine.store.slot_file import FILE_NAME
from engine.store.tier import PageRecord, Status
from tests.engine.arena_runner import ArenaRunner
from tests.engine.tiered_bench import LAYOUT, PAGE_SIZE, ArenaBytes

SPEC = ModelSpec(name="m", identity="m@0", path="m", format="gguf")
RECORD = PageRecord(bytes(32), bytes(32), 0, bytes(16), 1)


def opened(folder: Path, layout: PageLayout = LAYOUT, *, kind: str = "k") -> OpenTiers:
    config = EngineConfig(spec=SPEC, engine_index=0, kv_disk_mb=1, kv_disk_dir=str(folder))
    memory = ArenaBytes(ArenaRunner(2, PAGE_SIZE))
    return open_tiers(config, layout, memory, kind=kind, progress=lambda *_: None)


def test_an_engine_of_another_kind_of_pages_removes_what_no_one_would_purge(
    tmp_path: Path,
) -> None:
    for layout, kind in ((LAYOUT, "k"), (replace(LAYOUT, precision="bf16"), "l"), (LAYOUT, "m")):
        tiers = opened(tmp_path, layout, kind=kind)
        assert tiers.found == {"disk": []}
        put(tiers, layout)
        tiers.store.close(5.0)
        (file,) = tmp_path.rglob(FILE_NAME)
        assert file.stat().st_size <= 1 << 20
    again = opened(tmp_path, kind="m")
    assert again.found == {"disk": [RECORD]}
    again.store.close(5.0)


def test_pages_that_a_process_uses_stay_and_are_told_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = opened(tmp_path)
    other = opened(tmp_path, kind="l")
    assert len(list(tmp_path.rglob(FILE_NAME))) == 2
    assert "pages of another kind stay there" in capfd.readouterr().err
    for tiers in (one, other):
        tiers.store.close(5.0)


def put(tiers: OpenTiers, layout: PageLayout) -> None:
    (lane,) = tiers.store._lanes.values()
    payload = memoryview(bytes(layout.page_bytes))
    assert lane.guard.put([RECORD], [payload], time.monotonic() + 5.0) == [Status.OK]
