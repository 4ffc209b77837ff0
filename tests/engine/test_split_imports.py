"""A prompt that a peer computes: its room, what arrives of it, and where it goes on from."""

from __future__ import annotations

import msgspec
import pytest

from engine.schedule.events import SequenceFailed, SequenceStarted
from engine.schedule.pages import HoldKind
from engine.schedule.transfer_orders import (
    Arrived,
    Handover,
    Import,
    Received,
    TransferFailed,
    TransferQuiet,
)
from policies.contract.wire import TokenLogprob
from tests.engine.arena_runner import alone
from tests.engine.scheduler_bench import ids
from tests.engine.split_leg import ID, PROMPT, TRANSFER, Leg, imported, transfer_holds


def test_pages_are_found_as_they_arrive_and_the_sequence_runs_from_the_token_that_came() -> None:
    bench = Leg()
    bench.leg("decode")
    order = imported(bench)
    assert (order.first, len(order.page_ids), order.num_tokens) == (0, 3, 10)
    assert transfer_holds(bench) == 3
    bench.write(order)
    assert bench.step() is None
    bench.told(Arrived(ID, 0, 1))
    assert len(bench.scheduler.cache) == 1
    bench.told(Arrived(ID, 0, 1), Arrived(ID, 1, 2))
    assert len(bench.scheduler.cache) == 2, "the last page is not whole"
    token = alone(PROMPT, 1)[0]
    bench.told(Received(ID, Handover(token, 8, 4, queue_s=0.5)))
    started = bench.events[0]
    assert started == SequenceStarted(1, 8, 0.5, "host", (4, 0, 0))
    assert bench.tokens(1) == [token]
    bench.told(TransferQuiet(ID))
    assert transfer_holds(bench) == 0
    bench.drain()
    assert bench.tokens(1) == alone(PROMPT, 4)
    usage = bench.end(1).usage
    assert (usage.cached_tokens, usage.host_tokens, usage.completion_tokens) == (8, 4, 4)


def test_what_the_cache_has_is_not_asked_for() -> None:
    bench = Leg()
    bench.submit(9, PROMPT, max_tokens=1)
    bench.drain()
    bench.leg("decode")
    order = imported(bench)
    assert (order.first, len(order.page_ids)) == (2, 1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"token": 50}, "token"),
        ({"token": -1}, "token"),
        ({"cached_tokens": 10}, "cached_tokens"),
        ({"cached_tokens": 4, "host_tokens": 3, "disk_tokens": 2}, "cached_tokens"),
        ({"host_tokens": -1}, "cached_tokens"),
        ({"queue_s": float("nan")}, "queue_s"),
        ({"logprob": TokenLogprob(-1.0, 1)}, "logprob"),
        (None, "handover"),
    ],
)
def test_a_handover_that_cannot_be_is_corrupt(change: dict | None, word: str) -> None:
    bench = Leg(vocab_size=50)
    bench.leg("decode")
    order = imported(bench)
    bench.write(order)
    bench.told(Arrived(ID, 0, 3))
    handover = change and msgspec.structs.replace(Handover(1), **change)
    bench.told(Received(ID, handover))
    end = bench.end(1)
    assert isinstance(end, SequenceFailed)
    assert end.code == "transfer_corrupt"
    assert word in end.message
    assert bench.kinds() == ["Withdraw"]
    assert bench.tokens(1) == []
    bench.told(TransferQuiet(ID))
    assert bench.scheduler.pool.num_held == 0


def test_a_handover_before_all_pages_is_corrupt() -> None:
    bench = Leg()
    bench.leg("decode")
    bench.write(imported(bench))
    bench.told(Arrived(ID, 0, 2), Received(ID, Handover(1)))
    end = bench.end(1)
    assert isinstance(end, SequenceFailed)
    assert "found 2, allowed all 3" in end.message


def test_a_late_page_is_not_published_and_its_place_is_held_until_it_cannot_come() -> None:
    bench = Leg()
    bench.leg("decode")
    order = imported(bench)
    bench.told(Arrived(ID, 0, 1))
    bench.events += bench.scheduler.abort(1, bench.now)
    assert bench.kinds() == ["Withdraw"]
    assert bench.scheduler.pool.num_held == 3
    bench.told(Arrived(ID, 1, 2), Received(ID, Handover(1)), TransferFailed(ID, "aborted", ""))
    assert len(bench.scheduler.cache) == 1
    for page in order.page_ids:
        assert bench.scheduler.pool.holds(page, HoldKind.TRANSFER)
    bench.told(TransferQuiet(ID), TransferQuiet(ID))
    assert bench.scheduler.pool.num_held == 0
    assert bench.scheduler.pool.num_cached == 1


@pytest.mark.parametrize("code", ["page_integrity", "logits_not_finite"])
def test_pages_that_prefill_came_to_doubt_are_forgotten(code: str) -> None:
    bench = Leg()
    bench.leg("decode")
    bench.write(imported(bench))
    bench.told(Arrived(ID, 0, 2))
    bench.told(TransferFailed(ID, code, "in doubt"), TransferQuiet(ID))
    assert len(bench.scheduler.cache) == 0


def test_an_import_gets_room_for_all_of_its_prompt_or_none_in_its_turn() -> None:
    bench = Leg(num_pages=6, context_tokens=24)
    bench.submit(1, ids(14, 3), max_tokens=9)
    bench.step()
    other = msgspec.structs.replace(TRANSFER, transfer_id=b"u" * 16, return_id=b"v" * 16)
    bench.leg("decode", ids(12, 4), sequence_id=2)
    bench.leg("decode", ids(4, 5), sequence_id=3, transfer=other)
    bench.step()
    assert not any(isinstance(order, Import) for order in bench.orders())
    assert bench.scheduler.pool.num_held == 4, "nothing is held by who waits"
    while bench.step() is not None:
        pass
    imports = [order.transfer_id for order in bench.orders() if isinstance(order, Import)]
    assert imports == [ID, b"u" * 16], "in the order in which they came"


def test_imports_have_places_among_what_runs() -> None:
    bench = Leg(max_running=1)
    bench.leg("decode")
    imported(bench)
    bench.submit(2, ids(5, 2))
    assert bench.step() is None
    bench.told(TransferFailed(ID, "transfer_lost", "gone"))
    bench.drain()
    assert bench.tokens(2) == alone(ids(5, 2), 4)


def test_who_has_taken_over_is_preempted_like_any_other() -> None:
    bench = Leg(num_pages=4, context_tokens=16)
    bench.leg("decode", max_tokens=6)
    bench.write(imported(bench))
    bench.told(Arrived(ID, 0, 3), Received(ID, Handover(alone(PROMPT, 1)[0])), TransferQuiet(ID))
    bench.step()
    bench.scheduler._preempt(bench.scheduler._running[1], set())
    bench.drain()
    assert bench.tokens(1) == alone(PROMPT, 6)
