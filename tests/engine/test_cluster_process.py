"""Two engines as processes on a real Mooncake Store: what one computed the other does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.tiers.one_engine import OneEngine
from tests.engine.store.mooncake_cluster import Cluster, network
from tests.engine.test_tiers_process import PAGES, model_spec, prompt

FLAGS = ("--kv-device-tokens", "1024", "--cluster-store")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    cluster = Cluster(network(), tmp_path, port=21071)
    cluster.master()
    yield cluster.url.replace("segment_mb=0", "segment_mb=128")
    cluster.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_prefix_computed_by_one_engine_is_fetched_by_another(url: str, name: str) -> None:
    spec = model_spec(name)
    with (
        network().inside(),
        OneEngine(spec, *FLAGS, url) as one,
        OneEngine(spec, *FLAGS, url) as two,
    ):
        cold = one.ask(prompt(1))
        until = time.monotonic() + 30.0
        while one.tiers(lambda tiers: True)["cluster"].stored_pages < PAGES:
            assert time.monotonic() < until, "it never joined the store"
            assert one.ask(prompt(1)).tokens == cold.tokens
        assert two.ask(prompt(1)).tokens == cold.tokens, "joined or not"
        while not two.tiers(lambda tiers: True)["cluster"].stored_pages:
            assert time.monotonic() < until, "it never joined the store"
            two.ask(prompt(2))
        seeds = iter(range(4, 8))
        warm = None
        while warm is None or warm.started.tier != "cluster":  # a fetch may be late
            stored = one.tiers(lambda tiers: True)["cluster"].stored_pages
            fresh = one.ask(prompt(seed := next(seeds)))
            wanted = stored + PAGES
            one.tiers(lambda tiers: tiers["cluster"].stored_pages >= wanted)  # noqa: B023
            warm = two.ask(prompt(seed))
            assert warm.tokens == fresh.tokens
        assert warm.usage.cluster_tokens == PAGES * 64
        one.kill()
        alone = two.ask(prompt(9))
        assert len(alone.tokens) == 8, "serves on without the owner of the pages"
        assert two.ask(prompt(seed)).tokens == fresh.tokens
