"""Warm equals cold, token for token, from every tier for every family: real models, real tiers."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from engine.execute.runner import ModelRunner
from engine.store.host import HostTier
from engine.store.mooncake import MooncakeTier
from engine.store.page_codec import PageLayout
from engine.store.shared_arena import SharedArenaTier
from engine.store.shared_host import SharedHostTier
from engine.store.slot_file import SlotFileTier
from engine.store.tier import Tier
from policies.contract import wire
from policies.contract.wire import Sampling
from tests.engine.execute.conftest import RunnerMaker
from tests.engine.store.mooncake_cluster import lasting_cluster
from tests.engine.tiered_bench import TieredBench

PAGES, PAGE_SIZE = 4, 16


def cluster(folder: Path, layout: PageLayout) -> Tier:
    store, _, client = lasting_cluster()
    client.remove_by_regex(".*", True)
    tier = MooncakeTier(store.url, layout, "kind")
    assert tier.wait_joined(time.monotonic() + 30)
    return tier


TIERS: dict[str, Callable[[Path, PageLayout], Tier]] = {
    "host": lambda folder, layout: HostTier(layout, 40),
    "shared host": lambda folder, layout: SharedHostTier(
        SharedArenaTier(folder, layout, 40, folder=folder)
    ),
    "disk": lambda folder, layout: SlotFileTier(folder, layout, 40),
    "cluster": cluster,
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def model(
    request: pytest.FixtureRequest, tiny_gguf: Callable[[str], Path], make_runner: RunnerMaker
) -> Iterator[ModelRunner]:
    return make_runner(tiny_gguf(request.param), precision="native", num_pages=20)


class Asked:
    """Questions to one engine, one after the other."""

    def __init__(self, tier: Tier, model: ModelRunner) -> None:
        self.bench = TieredBench(tier, context_tokens=200, model=model)
        self.lane = 0

    def ask(self, seed: int) -> tuple[list[int], wire.Usage]:
        """The tokens after a prompt of PAGES pages and a bit."""
        ids = [(seed + 7 * at * at) % 150 for at in range(PAGES * PAGE_SIZE + 5)]
        self.lane += 1
        self.bench.submit(
            1,
            (self.lane,),
            prompt=wire.pack_ids(array("I", ids)),
            sampling=Sampling(12, temperature=0.0),
        )
        self.bench.settle()
        _, end = self.bench.rare[-1]
        assert isinstance(end, wire.Finished)
        return self.bench.tokens[1, self.lane], end.usage


@pytest.mark.parametrize("name", TIERS)
def test_warm_equals_cold(name: str, model: ModelRunner, tmp_path: Path) -> None:
    network = lasting_cluster()[0].network.inside() if name == "cluster" else nullcontext()
    with network:  # threads that are begun here are in it
        asked = Asked(TIERS[name](tmp_path, model.arena.layout), model)
    fetched = seed = 0
    until = time.monotonic() + 30.0
    while fetched < PAGES * PAGE_SIZE:  # on a busy machine a fetch may be late: then it is computed
        assert time.monotonic() < until, f"nothing ever came from the {name} tier"
        seed += 1
        cold, usage = asked.ask(seed)
        assert usage.cached_tokens == 0
        assert len(set(cold)) > 2, "a model that repeats itself would hide a wrong page"
        again, usage = asked.ask(seed)  # twice, for the disk's sake
        assert (again, usage.cached_tokens) == (cold, PAGES * PAGE_SIZE)
        asked.bench.evict_all()
        model.arena.pages.fill_(0)
        warm, usage = asked.ask(seed)
        assert warm == cold
        fetched = getattr(usage, f"{name.split()[-1]}_tokens")
    asked.bench.engine.close()
