"""What decode computed comes home for the next turn, where there is room that nobody needs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from engine.schedule.transfer_orders import (
    Accepted,
    Arrived,
    Export,
    HandedOver,
    Import,
    Offered,
    TransferFailed,
    TransferQuiet,
    Withdraw,
)
from policies.contract.wire import Transfer
from tests.engine.arena_runner import alone
from tests.engine.scheduler_bench import ROOT, ids
from tests.engine.split_bench import SplitBench
from tests.engine.split_leg import HOME, ID, PROMPT, Leg, transfer_holds


def returning(bench: Leg, keys: Sequence[bytes] = (), length: int = 5) -> list[bytes]:
    """A prompt was handed over, and its chain of so many pages is offered."""
    bench.leg("prefill")
    bench.told(Accepted(ID, 0))
    bench.step()
    bench.told(HandedOver(ID), TransferQuiet(ID))
    (export,) = [order for order in bench.orders() if isinstance(order, Export)]
    chain = [*(keys or export.keys), *(bytes([at]) * 32 for at in range(length - 2))]
    bench.told(Offered(HOME, tuple(chain)))
    return chain


def test_the_answer_comes_home_for_the_next_turn() -> None:
    bench = SplitBench()
    bench.submit(1, PROMPT, max_tokens=12, returns=True)
    bench.rest()
    moved = bench.network.moved
    history = PROMPT + array("I", alone(PROMPT, 12))
    bench.submit(2, history + ids(3, 7), max_tokens=2, returns=True)
    bench.rest()
    assert bench.prefill.cached(2) == bench.decode.cached(2) == 20  # the last token has no page
    assert bench.decode.tokens(2) == alone(history + ids(3, 7), 2)
    assert bench.network.moved - moved == 2, "one page new to each side, and the last of the prompt"


def test_nothing_comes_home_of_what_ended_before_its_first_token_or_was_purged() -> None:
    bench = SplitBench()
    bench.submit(1, PROMPT, returns=True)
    bench.decode.events += bench.decode.scheduler.abort(1, 0.0)
    bench.prefill.events += bench.prefill.scheduler.abort(1, 0.0)
    bench.submit(2, PROMPT, max_tokens=9, returns=True)
    while not bench.decode.tokens(2):
        bench.network.settle()
        bench.prefill.step()
        bench.decode.step()
    bench.decode.scheduler.purge(ROOT[:16])
    bench.rest()
    exports = [half.export for half in bench.network.halves.values() if half.side is bench.decode]
    assert exports == [None] * len(exports)


def test_only_what_is_lacking_is_taken_and_published() -> None:
    bench = Leg()
    chain = returning(bench)
    (order,) = bench.orders()
    assert isinstance(order, Import)
    assert (order.first, order.keys, order.num_tokens) == (2, tuple(chain), 20)
    bench.told(Offered(HOME, tuple(chain)))
    assert bench.orders() == []
    bench.told(Arrived(HOME, 2, 2), Arrived(HOME, 2, 2))
    assert bench.scheduler.cache.depth(chain) == 4
    assert bench.scheduler.cache.count_sources(chain[:4], 0.0) == {}
    bench.told(TransferFailed(HOME, "transfer_lost", "cut"), Arrived(HOME, 4, 1))
    assert bench.scheduler.cache.depth(chain) == 4
    bench.told(TransferQuiet(HOME))
    assert bench.scheduler.pool.num_held == 0
    assert bench.scheduler.pool.num_cached == 4


def test_a_chain_that_is_not_this_prompts_is_not_taken() -> None:
    bench = Leg()
    returning(bench, keys=[b"x" * 32, b"y" * 32])
    assert bench.kinds() == ["Withdraw"]


def test_what_comes_home_takes_no_page_that_somebody_needs() -> None:
    bench = Leg(num_pages=8, context_tokens=32)
    bench.submit(2, ids(8, 3), max_tokens=9)
    bench.step()
    chain = returning(bench, length=8)
    (order,) = bench.orders()
    assert isinstance(order, Import)
    assert order.keys == tuple(chain[:4]), "half of the pool at most"
    bench.told(Arrived(HOME, 2, 2), TransferQuiet(HOME))
    bench.drain()
    assert bench.tokens(2) == alone(ids(8, 3), 9)
    assert bench.scheduler.preemptions == 0


def test_no_room_no_return() -> None:
    bench = Leg(num_pages=8, context_tokens=32)
    bench.leg("prefill", ids(3))
    bench.told(Accepted(ID, 0))
    bench.step()
    bench.told(HandedOver(ID), TransferQuiet(ID))
    for sequence_id in (2, 3):
        bench.submit(sequence_id, ids(9, sequence_id), max_tokens=9)
    bench.step()
    bench.orders()
    bench.told(Offered(HOME, (b"a" * 32,)))
    assert bench.kinds() == ["Withdraw"]
    assert bench.scheduler.pool.num_held == 6


def test_a_purge_lets_go_of_what_would_come_home() -> None:
    bench = Leg()
    chain = returning(bench)
    bench.orders()
    bench.scheduler.purge(ROOT[:16])
    assert bench.kinds() == ["Withdraw"]
    bench.told(Arrived(HOME, 2, 3))
    assert bench.scheduler.cache.depth(chain) == 0
    assert transfer_holds(bench) == 5
    bench.told(TransferQuiet(HOME))
    assert bench.scheduler.pool.num_held == 0


def test_the_oldest_expectation_goes_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.schedule.returns._MOST_EXPECTED", 2)
    bench = Leg()
    for at in range(3):
        name = bytes([at]) * 15
        transfer = Transfer(b"t" + name, b"s" * 32, "peer:1", b"h" + name, b"r" * 32)
        bench.leg("prefill", sequence_id=at + 1, transfer=transfer)
    withdrawn = [order.transfer_id for order in bench.orders() if isinstance(order, Withdraw)]
    assert withdrawn == [b"h" + bytes(15)]
