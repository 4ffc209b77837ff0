"""What a waiting prompt waits for: pages that are nearer than its peer, or come for another."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import TierConfig
from engine.schedule.imports import GETS_ON_S
from engine.schedule.orders import Fetch
from engine.schedule.sequence import NewSequence
from engine.schedule.transfer_orders import (
    Arrived,
    Handover,
    Import,
    Received,
    TransferFailed,
    TransferQuiet,
)
from engine.store.tier import Status
from policies.contract.wire import Sampling
from tests.engine.arena_runner import alone
from tests.engine.order_bench import OrderBench
from tests.engine.scheduler_bench import PAGE_SIZE, ROOT, ids
from tests.engine.split_bench import SplitBench
from tests.engine.split_leg import ID, OTHER, PROMPT, TRANSFER, Leg, imported


def two_of_one_prefix() -> tuple[Leg, Import]:
    """The second waits: the first page of two has come for the first one."""
    bench = Leg()
    bench.leg("decode")
    bench.leg("decode", sequence_id=2, transfer=OTHER)
    order = imported(bench)
    assert order.transfer_id == ID, "and no other"
    bench.write(order)
    bench.told(Arrived(ID, 0, 1))
    bench.now += GETS_ON_S - 0.1
    bench.step()
    assert bench.orders() == []
    return bench, order


class TieredLeg(Leg):
    """The two full pages of PROMPT are in the host tier, and nothing is on the device."""

    def __init__(self) -> None:
        host = TierConfig(name="host", capacity_pages=30, bytes_per_s=1e6, latency_s=1e-3)
        super().__init__(tiers=(host,), page_bytes=1000)  # type: ignore[arg-type]
        self.tier = OrderBench(self.scheduler.tiers, self.runner, {"host": 30})
        new = NewSequence(9, PROMPT, ROOT, Sampling(max_tokens=1), owner=ROOT[:16])
        self.scheduler.submit(new, self.now)
        self.runner.begin(9, PROMPT)
        self.drain()
        self.tier.settle(self.now)
        while self.scheduler.cache.evict(self.now):
            pass

    def fetches(self) -> list[Fetch]:
        return [order for order in self.tier.ready() if isinstance(order, Fetch)]


def test_of_two_imports_of_one_prefix_the_second_waits_for_what_comes_for_the_first() -> None:
    bench, _ = two_of_one_prefix()
    bench.told(Arrived(ID, 1, 2))
    second = imported(bench)
    assert (second.transfer_id, second.first, len(second.page_ids)) == (b"u" * 16, 2, 1)


@pytest.mark.parametrize("how", ["fails", "is left", "stands still"])
def test_the_second_goes_on_by_itself_from_what_has_come(how: str) -> None:
    bench, _ = two_of_one_prefix()
    match how:
        case "fails":
            bench.told(TransferFailed(ID, "transfer_lost", "cut"))
        case "is left":
            bench.events += bench.scheduler.abort(1, bench.now)
        case "stands still":
            bench.now += 0.2
    second = imported(bench)
    assert (second.transfer_id, second.first, len(second.page_ids)) == (b"u" * 16, 1, 2)
    bench.told(TransferQuiet(ID), TransferQuiet(b"u" * 16))
    assert bench.scheduler.pool.num_held == 0


def test_who_stands_still_is_no_longer_waited_for_but_who_goes_on_is() -> None:
    bench, _ = two_of_one_prefix()
    bench.now += 0.2
    imported(bench)
    third = msgspec.structs.replace(TRANSFER, transfer_id=b"w" * 16, return_id=b"x" * 16)
    bench.leg("decode", sequence_id=3, transfer=third)
    bench.step()
    assert "Import" not in bench.kinds()
    bench.told(TransferFailed(b"u" * 16, "transfer_lost", "cut"))
    assert imported(bench).transfer_id == b"w" * 16


def test_many_prompts_of_one_prefix_move_it_once() -> None:
    bench = SplitBench()
    prefix = ids(4 * PAGE_SIZE)
    prompts = [prefix + ids(5, 20 + at) for at in range(4)]
    for at, prompt in enumerate(prompts, 1):
        bench.submit(at, prompt)
    bench.rest()
    for at, prompt in enumerate(prompts, 1):
        assert bench.decode.tokens(at) == alone(prompt, 4)
    assert bench.network.moved == 4 + 4 * 2


@pytest.mark.parametrize("status", [Status.OK, Status.MISS, Status.TIMEOUT])
def test_slower_tiers_are_asked_first_and_decode_says_then_what_it_lacks(status: Status) -> None:
    bench = TieredLeg()
    bench.leg("decode")
    (fetch,) = bench.fetches()
    assert len(fetch.keys) == 2
    bench.step()
    assert bench.kinds() == ["Expect"], "the peer may connect meanwhile"
    bench.tier.carry_out(fetch, bench.now, lambda _, at: status if at else Status.OK)
    imports: list[Import] = []
    for _ in range(4):
        bench.step()
        imports += [order for order in bench.orders() if isinstance(order, Import)]
        for again in bench.fetches():  # what may still be there is asked for again
            bench.tier.carry_out(again, bench.now, lambda *_: status)
    (order,) = imports
    assert (order.first, len(order.page_ids)) == ((2, 1) if status is Status.OK else (1, 2))
    bench.tier.settle(bench.now)
    bench.write(order)
    bench.told(Arrived(ID, order.first, len(order.page_ids)))
    bench.told(Received(ID, Handover(alone(PROMPT, 1)[0])), TransferQuiet(ID))
    bench.drain()
    assert bench.tokens(1) == alone(PROMPT, 4)
    bench.tier.settle(bench.now)
    assert bench.scheduler.pool.num_held == 0


def test_a_tier_that_does_not_answer_is_waited_for_no_longer_than_its_deadline() -> None:
    bench = TieredLeg()
    bench.leg("decode")
    (fetch,) = bench.fetches()
    bench.now = fetch.deadline + 0.9
    bench.step()
    assert bench.kinds() == ["Expect"]
    bench.now = fetch.deadline + 1.1
    assert imported(bench).first == 0
    bench.tier.carry_out(fetch, bench.now)
    bench.told(TransferFailed(ID, "transfer_lost", "cut"), TransferQuiet(ID))
    assert bench.scheduler.pool.num_held == 0


def test_what_a_peer_brings_quicker_is_not_fetched() -> None:
    bench = TieredLeg()
    bench.leg("decode", ids(8, 9), sequence_id=2, transfer=OTHER)
    imported(bench)
    bench.told(Arrived(b"u" * 16, 0, 1, num_bytes=1000, seconds=1e-4))  # a fetch takes 1e-3
    bench.leg("decode")
    assert bench.fetches() == []
    assert imported(bench).first == 0
