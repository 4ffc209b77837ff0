"""An engine over real tiers and threads: warm equals cold from each, whatever the tiers do."""

from __future__ import annotations

import random
import time
from array import array
from itertools import repeat
from pathlib import Path

import pytest

from engine.store.fault_tier import Fault, FaultTier, seeded_faults
from engine.store.host import HostTier
from engine.store.shared_arena import SharedArenaTier
from engine.store.shared_host import SharedHostTier
from engine.store.slot_file import SlotFileTier
from engine.store.tier import Tier
from policies.contract import wire
from policies.contract.page_keys import owner_tag
from policies.contract.wire import Sampling, pack_ids
from tests.engine.arena_runner import VOCAB, alone
from tests.engine.tiered_bench import LAYOUT, TieredBench

PROMPT = array("I", [(7 * at) % VOCAB for at in range(30)])
OTHER = array("I", [(11 * at) % VOCAB for at in range(30)])


def ask(
    bench: TieredBench, lane: int, prompt: array[int] = PROMPT, **fields: object
) -> wire.Finished:
    """One answer, right to the token, with nothing under way behind it."""
    bench.submit(
        1, (lane,), prompt=pack_ids(prompt), sampling=Sampling(6, temperature=0.0), **fields
    )
    bench.settle()
    assert bench.tokens[1, lane] == alone(prompt, 6)
    (end,) = [
        rare
        for _, rare in bench.rare
        if isinstance(rare, wire.Finished | wire.Failed) and rare.lane == lane
    ]
    assert isinstance(end, wire.Finished)
    return end


def started(bench: TieredBench, lane: int) -> wire.Started:
    (found,) = [
        rare for _, rare in bench.rare if isinstance(rare, wire.Started) and rare.lane == lane
    ]
    return found


def test_a_prefix_comes_back_from_the_host_and_says_so() -> None:
    bench = TieredBench(HostTier(LAYOUT, 30))
    assert ask(bench, 1).usage.cached_tokens == 0
    bench.evict_all()
    usage = ask(bench, 2).usage
    assert (usage.cached_tokens, usage.host_tokens, usage.disk_tokens) == (28, 28, 0)
    assert (started(bench, 2).tier, started(bench, 2).host_tokens) == ("host", 28)
    usage = ask(bench, 3).usage
    assert (usage.cached_tokens, usage.host_tokens) == (28, 0), "it is on the device by now"
    assert (started(bench, 3).tier, started(bench, 3).host_tokens) == ("device", 0)
    bench.engine.close()


def test_a_disk_takes_what_is_used_twice_and_gives_it_to_the_next_engine(tmp_path: Path) -> None:
    bench = TieredBench(SlotFileTier(tmp_path, LAYOUT, 40))
    ask(bench, 1)
    ask(bench, 2)
    ask(bench, 3, OTHER)
    (report,) = bench.engine._tier_reports()
    assert report.pages_used == 7, "the prompt's pages were used twice, no others"
    bench.engine.close()
    again = TieredBench(SlotFileTier(tmp_path, LAYOUT, 40))
    usage = ask(again, 1).usage
    assert (usage.cached_tokens, usage.disk_tokens) == (28, 28)
    assert started(again, 1).tier == "disk"
    assert ask(again, 2, OTHER).usage.cached_tokens == 0
    again.engine.close()


def test_a_drain_puts_the_rest_on_disk(tmp_path: Path) -> None:
    bench = TieredBench(HostTier(LAYOUT, 30), SlotFileTier(tmp_path, LAYOUT, 40))
    ask(bench, 1)
    ask(bench, 2, OTHER)
    bench.engine.close(within_s=5.0)
    again = TieredBench(SlotFileTier(tmp_path, LAYOUT, 40))
    assert ask(again, 1).usage.disk_tokens == 28
    assert ask(again, 2, OTHER).usage.disk_tokens == 28
    again.engine.close()


def test_a_host_smaller_than_the_device_starves_nothing(tmp_path: Path) -> None:
    bench = TieredBench(HostTier(LAYOUT, 3), SlotFileTier(tmp_path, LAYOUT, 40))
    ask(bench, 1)
    ask(bench, 2)
    bench.evict_all()
    usage = ask(bench, 3).usage
    assert usage.host_tokens + usage.disk_tokens == usage.cached_tokens == 28
    assert usage.disk_tokens >= 16
    bench.engine.close()


def test_what_is_to_be_retained_outlives_what_came_later() -> None:
    bench = TieredBench(HostTier(LAYOUT, 1))
    ask(bench, 1, retention_s=1000.0)
    for lane in range(2, 6):  # each needs nine of the pool's 24 pages
        ask(bench, lane, array("I", [lane] * 30))
    assert ask(bench, 6).usage.cached_tokens == 28
    assert ask(bench, 7, array("I", [2] * 30)).usage.cached_tokens < 28
    bench.engine.close()


def test_no_tier_brings_back_pages_whose_logits_were_not_finite(tmp_path: Path) -> None:
    """Their checksums are right: the bytes were wrong before they were copied."""
    bench = TieredBench(HostTier(LAYOUT, 30), SlotFileTier(tmp_path, LAYOUT, 40))
    ask(bench, 1)
    ask(bench, 2)
    bench.evict_all()
    bench.runner.sick = {3, 4}
    for lane in (3, 4):  # two that share a fetch
        bench.submit(1, (lane,), prompt=pack_ids(PROMPT), sampling=Sampling(6, temperature=0.0))
    bench.settle()
    assert {code for _, _, code in bench.failures()} == {"logits_not_finite"}
    assert ask(bench, 5).usage.cached_tokens == 0
    bench.engine.close(within_s=5.0)
    again = TieredBench(SlotFileTier(tmp_path, LAYOUT, 40))
    assert ask(again, 1).usage.disk_tokens == 28, "what was computed anew is kept as before"
    again.engine.close()


def test_two_sequences_share_a_fetch() -> None:
    bench = TieredBench(HostTier(LAYOUT, 30))
    ask(bench, 1)
    bench.evict_all()
    for lane in (2, 3):
        bench.submit(1, (lane,), prompt=pack_ids(PROMPT), sampling=Sampling(6, temperature=0.0))
    bench.settle()
    assert bench.tokens[1, 2] == bench.tokens[1, 3] == alone(PROMPT, 6)
    (report,) = bench.engine._tier_reports()
    assert report.hit_pages == 7
    assert [started(bench, lane).tier for lane in (2, 3)] == ["host", "host"]
    bench.engine.close()


def test_a_tenant_that_floods_every_tier_leaves_another_its_quota(tmp_path: Path) -> None:
    bench = TieredBench(HostTier(LAYOUT, 16), SlotFileTier(tmp_path, LAYOUT, 16))
    quiet, loud = bytes([1]) * 32, bytes([2]) * 32
    shares = ((owner_tag(quiet), 0.5), (owner_tag(loud), 0.5))
    bench.engine.handle(0, wire.Quotas(2, shares))
    ask(bench, 1, salt=quiet)
    ask(bench, 2, salt=quiet)  # twice, so that the disk has it too
    for lane in range(3, 15):
        ask(bench, lane, array("I", [lane // 2] * 30), salt=loud)
    usage = ask(bench, 20, salt=quiet).usage
    assert (usage.cached_tokens, usage.host_tokens) == (28, 0), "not even from the device"
    load = bench.scheduler.load()
    assert load.charged_pages > 0
    assert load.quota_breaches == 0
    bench.evict_all()
    assert ask(bench, 21, salt=quiet).usage.host_tokens == 28
    host, disk = bench.engine._tier_reports()
    assert host.charged_pages > 0
    assert disk.charged_pages > 0
    assert bench.scheduler.tiers._shelves["disk"].index.num_owned(owner_tag(quiet)) >= 7
    bench.engine.handle(0, wire.Quotas(2, ()))
    for lane in range(30, 36):
        ask(bench, lane, array("I", [lane] * 30), salt=loud)
    bench.evict_all()
    assert ask(bench, 40, salt=quiet).usage.host_tokens == 0, "it has none any more"
    bench.engine.close()


def shared(folder: Path, capacity: int) -> SharedHostTier:
    return SharedHostTier(SharedArenaTier(folder, LAYOUT, capacity, folder=folder))


def test_engines_of_one_machine_find_each_others_pages(tmp_path: Path) -> None:
    one, two = (TieredBench(shared(tmp_path, 30)) for _ in range(2))
    ask(one, 1)
    assert ask(two, 1).usage.host_tokens == 28
    ask(two, 2, OTHER)
    assert ask(one, 2, OTHER).usage.host_tokens == 28
    one.engine.handle(1, wire.Purge(2, "p", bytes(32)))
    one.settle()
    two.evict_all()
    assert ask(two, 3).usage.cached_tokens == 0, "purged by one, gone for both"
    for bench in (one, two):
        bench.engine.close()
    assert not list(tmp_path.glob("kagari-????????????????????????????????"))


def test_a_full_shared_tier_lets_the_oldest_go_whoever_put_it(tmp_path: Path) -> None:
    one, two = (TieredBench(shared(tmp_path, 10)) for _ in range(2))
    ask(one, 1)
    ask(two, 1, OTHER)
    one.evict_all()
    two.evict_all()
    assert ask(two, 2, OTHER).usage.host_tokens == 28
    assert 0 <= ask(one, 2).usage.host_tokens < 28
    for bench in (one, two):
        bench.engine.close()


def test_what_another_engine_evicted_is_put_again_when_it_is_used(tmp_path: Path) -> None:
    tier = shared(tmp_path, 10)
    one, two = TieredBench(tier), TieredBench(shared(tmp_path, 10))
    ask(one, 1)
    put = {record.key for record in tier.records()}
    ask(two, 1, OTHER)
    ask(two, 2, array("I", [(13 * at) % VOCAB for at in range(30)]))
    assert not put & {record.key for record in tier.records()}
    assert ask(one, 2).usage.cached_tokens == 28, "from its own device"
    one.settle()
    one.evict_all()
    assert ask(one, 3).usage.host_tokens == 28
    for bench in (one, two):
        bench.engine.close()


def test_pages_get_whom_they_belong_to_and_a_purge_takes_them_from_everywhere(
    tmp_path: Path,
) -> None:
    bench = TieredBench(HostTier(LAYOUT, 30), SlotFileTier(tmp_path, LAYOUT, 40))
    salts = [bytes([at]) * 32 for at in range(2)]
    for lane in range(4):
        ask(bench, lane, salt=salts[lane % 2])
    slots = (tmp_path / "pages.slots").read_bytes()
    assert all(owner_tag(salt) in slots for salt in salts)
    bench.engine.handle(1, wire.Purge(2, "p1", salts[0]))
    bench.settle()
    until = time.monotonic() + 5.0
    while not bench.results:
        assert time.monotonic() < until
        bench.step()
    (result,) = bench.results
    assert isinstance(result, wire.PurgeResult)
    assert (result.purge_id, result.left) == ("p1", ())
    assert result.pages >= 3 * 7
    slots = (tmp_path / "pages.slots").read_bytes()
    assert owner_tag(salts[0]) not in slots
    assert owner_tag(salts[1]) in slots
    assert ask(bench, 8, salt=salts[0]).usage.cached_tokens == 0
    assert ask(bench, 9, salt=salts[1]).usage.cached_tokens == 28
    bench.engine.close()


def test_what_runs_while_its_tenant_is_purged_publishes_nothing_more() -> None:
    bench = TieredBench(HostTier(LAYOUT, 30))
    bench.submit(1, (1,), prompt=pack_ids(PROMPT), sampling=Sampling(20, temperature=0.0))
    for _ in range(3):
        bench.step()
    bench.engine.handle(1, wire.Purge(2, "p", bytes(32)))
    bench.settle()
    assert bench.tokens[1, 1] == alone(PROMPT, 20)
    assert len(bench.scheduler.cache) == 0
    assert bench.scheduler.tiers.owned(owner_tag(bytes(32))) == 0
    bench.engine.close()


def test_a_tier_that_hangs_is_named_by_the_purge_and_costs_only_its_own_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = FaultTier(HostTier(LAYOUT, 30), [None] * 9 + [Fault.OVERRUN] * 90)
    bench = TieredBench(host)
    ask(bench, 1)
    bench.evict_all()
    bench.submit(1, (2,), prompt=pack_ids(PROMPT), sampling=Sampling(6, temperature=0.0))
    until = time.monotonic() + 10.0
    while bench.engine.has_work:
        assert time.monotonic() < until
        bench.step()
    assert bench.tokens[1, 2] == alone(PROMPT, 6), "computed, once the fetch was overdue"
    quarantined = bench.scheduler.pool.num_held
    assert quarantined > 0, "the call may still write there"
    monkeypatch.setattr("engine.purges.PURGE_S", 0.05)
    monkeypatch.setattr(host, "purge", lambda owner, deadline: time.sleep(0.5))
    bench.engine.handle(1, wire.Purge(2, "p", bytes(32)))
    while not bench.results:
        assert time.monotonic() < until
        bench.step()
    (result,) = bench.results
    assert isinstance(result, wire.PurgeResult)
    assert result.left == ("host",)
    host.release()
    bench.settle()
    assert bench.memory.lent == 0
    bench.engine.close()


def test_others_go_on_while_a_fetch_hangs_and_an_abort_frees_nothing_that_it_writes() -> None:
    host = FaultTier(HostTier(LAYOUT, 30), [None] * 9 + [Fault.OVERRUN] * 90)
    bench = TieredBench(host)
    ask(bench, 1)
    bench.evict_all()
    for lane, prompt in ((2, PROMPT), (3, OTHER)):
        bench.submit(1, (lane,), prompt=pack_ids(prompt), sampling=Sampling(6, temperature=0.0))
    until = time.monotonic() + 10.0
    while len(bench.tokens.get((1, 3), ())) < 6:
        assert time.monotonic() < until
        bench.step()
    assert (1, 2) not in bench.tokens, "it waits for its fetch, alone"
    bench.engine.handle(1, wire.Abort((2,)))
    bench.step()
    assert not bench.engine.has_work
    assert bench.scheduler.pool.num_held >= 7
    host.release()
    bench.settle()
    bench.engine.close()


def test_a_tier_that_hangs_for_ever_keeps_two_fetches_pages_and_rests_until_it_returns() -> None:
    hangs: list[Fault] = []
    host = FaultTier(HostTier(LAYOUT, 600), (hangs[0] if hangs else None for _ in repeat(None)))
    bench = TieredBench(host, num_pages=200, context_tokens=800, patient=True)
    prompts = [array("I", [(at * step) % VOCAB for at in range(100)]) for step in (3, 7, 11, 13)]
    for lane, prompt in enumerate(prompts):
        ask(bench, lane, prompt)
    bench.evict_all()
    hangs.append(Fault.OVERRUN)
    most = 0
    for round_ in range(4):
        for at, prompt in enumerate(prompts):
            lane = 10 + 10 * round_ + at
            bench.submit(1, (lane,), prompt=pack_ids(prompt), sampling=Sampling(6, temperature=0.0))
        until = time.monotonic() + 20.0
        while bench.engine.has_work:
            assert time.monotonic() < until
            bench.step()
        for at, prompt in enumerate(prompts):
            assert bench.tokens[1, 10 + 10 * round_ + at] == alone(prompt, 6)
        most = max(most, bench.scheduler.pool.num_held)
        bench.evict_all()
    assert 0 < most <= 200 // 8
    (report,) = bench.engine._tier_reports()
    assert report.state == "broken"
    hangs.clear()
    host.release()
    bench.settle()
    assert bench.engine._tier_reports()[0].state == "ok"
    bench.evict_all()
    time.sleep(1.1)  # it rests a moment longer, see shelf._REST_S
    assert ask(bench, 99, prompts[0]).usage.host_tokens == 96
    bench.engine.close()


FAULTS = {
    Fault.DROP: 0.05,
    Fault.DELAY: 0.1,
    Fault.CORRUPT: 0.05,
    Fault.HANG: 0.01,
    Fault.NOSPACE: 0.03,
    Fault.UNAVAILABLE: 0.03,
}


def converse(bench: TieredBench, chance: random.Random, turns: int) -> None:
    """Turns of a few conversations, a few at a time; every answer must be right."""
    histories = [array("I", [at] * 6) for at in range(5)]
    lane = 0
    while lane < turns:
        asked: dict[int, tuple[int, array[int]]] = {}
        for at in chance.sample(range(5), chance.randint(1, 3)):
            lane += 1
            if len(histories[at]) > 60:
                histories[at] = array("I", [at] * 6)
            histories[at].extend(chance.randrange(VOCAB) for _ in range(chance.randint(1, 9)))
            asked[lane] = at, array("I", histories[at])
            bench.submit(
                1, (lane,), prompt=pack_ids(asked[lane][1]), sampling=Sampling(6, temperature=0.0)
            )
        until = time.monotonic() + 30.0
        while bench.engine.has_work:
            assert time.monotonic() < until, "a sequence starved"
            bench.step()
            if not bench.engine.advanced:
                time.sleep(0.0005)
        for lane_of, (at, prompt) in asked.items():
            assert bench.tokens[1, lane_of] == alone(prompt, 6)
            histories[at].extend(bench.tokens[1, lane_of])
        bench.scheduler.invariants()
        if chance.random() < 0.7:  # else tiers fall behind, as they are slower than this model
            bench.settle(30.0)
        if chance.random() < 0.3:
            bench.evict_all()


def survive(folder: Path, seed: int, turns: int) -> int:
    """How many faults befell pages, without a wrong token or a failed sequence."""
    tiers: list[Tier] = [HostTier(LAYOUT, 12), SlotFileTier(folder, LAYOUT, 40)]
    faulty = [FaultTier(tier, seeded_faults(seed, FAULTS)) for tier in tiers]
    bench = TieredBench(*faulty, patient=True)
    converse(bench, random.Random(seed), turns)
    for tier in faulty:
        tier.release()
    bench.settle(20.0)
    assert not bench.failures()
    assert bench.memory.lent == 0
    bench.engine.close()
    return sum(sum(tier.injected.values()) for tier in faulty)


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is given up soon, and asked again at once, so that more faults come to pass."""
    monkeypatch.setattr("engine.schedule.shelf._REST_S", 0.0)
    monkeypatch.setattr("engine.schedule.fetches.fetch_deadline_s", lambda *_: 0.03)
    monkeypatch.setattr("engine.store.tiered.WRITE_S", 0.03)


@pytest.mark.usefixtures("_hasty")
def test_tokens_are_right_whatever_befalls_the_tiers(tmp_path: Path) -> None:
    assert survive(tmp_path, seed=3, turns=60) > 50


@pytest.mark.slow
@pytest.mark.usefixtures("_hasty")
def test_ten_thousand_faults_give_no_wrong_token(tmp_path: Path) -> None:
    injected = seed = 0
    while injected < 10_000:
        seed += 1
        (folder := tmp_path / str(seed)).mkdir()
        injected += survive(folder, seed, turns=200)
