"""All at once that may befall an engine with tiers: right tokens, and no page is ever lost."""

from __future__ import annotations

import random
import time
from array import array
from pathlib import Path

import pytest

from engine.store.fault_tier import Fault, FaultTier, seeded_faults
from engine.store.host import HostTier
from engine.store.slot_file import SlotFileTier
from engine.store.tier import Tier
from policies.contract import wire
from policies.contract.wire import Sampling, pack_ids
from tests.engine.arena_runner import alone
from tests.engine.tiered_bench import LAYOUT, PAGE_SIZE, TieredBench

FAULTS = {
    Fault.DROP: 0.05,
    Fault.DELAY: 0.1,
    Fault.CORRUPT: 0.05,
    Fault.HANG: 0.02,
    Fault.OVERRUN: 0.02,
    Fault.NOSPACE: 0.03,
    Fault.UNAVAILABLE: 0.03,
}
SALTS = [bytes([at]) * 32 for at in range(3)]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.schedule.shelf._REST_S", 0.0)
    patience = random.Random(0)  # one fetch is given up before, another behind one that overruns
    monkeypatch.setattr(
        "engine.schedule.fetches.fetch_deadline_s", lambda *_: patience.choice([0.005, 0.05])
    )
    monkeypatch.setattr("engine.store.tiered.WRITE_S", 0.03)
    monkeypatch.setattr("engine.purges.PURGE_S", 0.2)
    monkeypatch.setattr("engine.store.fault_tier.OVERRUN_S", 0.02)


class Wild:
    """Requests, aborts, purges, pins, drains, stray writes and sick logits, by one seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        num_pages = chance.choice([2, 3, 4, 6, 10, 24])
        host, disk = chance.choice([(1, 0), (0, 1), (1, 1), (2, 8), (5, 3), (12, 40)])
        tiers: list[Tier] = [HostTier(LAYOUT, host)] if host else []
        tiers += [SlotFileTier(folder, LAYOUT, disk)] if disk else []
        self.tiers = [FaultTier(tier, seeded_faults(seed, FAULTS)) for tier in tiers]
        self.bench = TieredBench(*self.tiers, num_pages=num_pages, patient=chance.random() < 0.7)
        self.longest = min(79, num_pages * PAGE_SIZE - 1)
        self.bases = [array("I", [at] * chance.randint(1, self.longest)) for at in range(4)]
        self.asked: dict[int, tuple[array[int], int, int]] = {}  # prompt, tokens, seed by lane
        self.acts = [self.ask] * 10 + [self.abort, self.bench.evict_all] * 2
        self.acts += [self.purge, self.pin, self.unpin, self.drain]
        self.failures: set[str] = set()  # that are provoked, every other time
        if seed % 2:
            self.acts += [self.stray, self.sicken]
            self.failures = {"page_integrity", "logits_not_finite"}

    def ask(self) -> None:
        chance = self.chance
        prompt = chance.choice(self.bases)[: chance.randint(1, self.longest)]
        prompt.extend(chance.randrange(3) for _ in range(chance.randint(0, 8)))
        prompt = prompt[: self.longest]
        count = chance.randint(1, min(10, self.longest + 1 - len(prompt)))
        first = len(self.asked)
        lanes = tuple(range(first, first + (2 if chance.random() < 0.1 else 1)))
        self.asked |= {lane: (prompt, count, lane - first) for lane in lanes}
        self.bench.submit(
            1,
            lanes,
            prompt=pack_ids(prompt),
            sampling=Sampling(count, temperature=0.0),
            salt=chance.choice(SALTS),
            retention_s=chance.choice([None, None, 0.01, 5.0]),
        )

    def abort(self) -> None:
        self.send(wire.Abort((self.chance.randint(len(self.asked) - 6, len(self.asked)),)))

    def purge(self) -> None:
        self.send(wire.Purge(2, f"purge{self.chance.random()}", self.chance.choice(SALTS)))

    def pin(self) -> None:
        chance = self.chance
        prompt, salt = pack_ids(chance.choice(self.bases)), chance.choice(SALTS)
        self.send(wire.Pin(2, f"p{chance.randrange(4)}", prompt, salt, chance.choice([0.02, 2]), 9))

    def unpin(self) -> None:
        self.send(wire.Unpin(2, f"p{self.chance.randrange(4)}"))

    def drain(self) -> None:
        self.send(wire.Drain(True))
        self.step(self.chance.randrange(4))
        self.send(wire.Drain(False))

    def stray(self) -> None:
        """Somebody writes over a page: its tag is another's."""
        page = self.chance.randrange(len(self.bench.runner.tags))
        if self.bench.scheduler.pool.generations[page]:
            self.bench.runner.tags[page] += 1000

    def sicken(self) -> None:
        self.bench.runner.sick = {self.chance.randint(1, 2 * len(self.asked) + 2)}

    def send(self, message: wire.AgentToEngine) -> None:
        self.bench.engine.handle(1, message)

    def step(self, times: int) -> None:
        for _ in range(times):
            self.bench.step()
            if not self.bench.engine.advanced:
                time.sleep(0.0003)

    def live(self, acts: int) -> None:
        for _ in range(acts):
            self.chance.choice(self.acts)()
            self.step(self.chance.randrange(6))
            if self.chance.random() < 0.2:
                self.bench.scheduler.invariants()

    def end(self) -> int:
        """All rests, no page is held, every token was right; returns how many answers are whole."""
        for tier in self.tiers:
            tier.release()
        for at in range(4):
            self.send(wire.Unpin(2, f"p{at}"))
        self.bench.settle(20.0)
        pool = self.bench.scheduler.pool
        assert pool.num_free + pool.num_cached == pool.num_pages
        assert self.bench.memory.lent == 0
        assert {code for _, _, code in self.bench.failures()} <= self.failures
        whole = 0
        for lane, (prompt, count, seed) in self.asked.items():
            tokens = self.bench.tokens.get((1, lane), [])
            assert tokens == alone(prompt, count, seed)[: len(tokens)]
            whole += len(tokens) == count
        self.bench.engine.close(within_s=0.5)
        return whole


def outlive(folder: Path, seed: int) -> None:
    wild = Wild(folder, seed)
    wild.live(100)
    assert wild.end() > len(wild.asked) / 2


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_right_and_no_page_is_lost_whatever_comes_together(
    tmp_path: Path, seed: int
) -> None:
    outlive(tmp_path, seed)


@pytest.mark.slow
def test_the_same_many_times(tmp_path: Path) -> None:
    for seed in range(4, 300):
        (folder := tmp_path / str(seed)).mkdir()
        outlive(folder, seed)
