"""A prompt that is computed for a peer: what goes out when, and who holds which pages."""

from __future__ import annotations

import pytest

from engine.schedule.events import SequenceFailed, SequenceFinished
from engine.schedule.transfer_orders import (
    Accepted,
    Acked,
    Expect,
    Export,
    HandedOver,
    HandOver,
    Send,
    TransferQuiet,
)
from tests.engine.arena_runner import alone
from tests.engine.scheduler_bench import PAGE_SIZE, ids
from tests.engine.split_leg import HOME, ID, PROMPT, Leg, transfer_holds


def test_pages_go_out_as_they_seal_and_the_first_token_behind_them() -> None:
    bench = Leg(step_tokens=PAGE_SIZE, max_running=4)
    bench.leg("prefill", logprobs=1)
    export, expect = bench.orders()
    assert isinstance(export, Export)
    assert (export.transfer_id, export.peer, export.num_tokens) == (ID, "peer:1", 10)
    assert len(export.keys) == 2
    assert isinstance(expect, Expect)
    assert expect.transfer_id == HOME
    bench.step()
    assert bench.orders() == [], "nothing is sent before the peer says what it lacks"
    bench.told(Accepted(ID, 0))
    (first,) = bench.orders()
    assert isinstance(first, Send)
    assert first.first == 0
    bench.step()
    (second,) = bench.orders()
    assert isinstance(second, Send)
    assert second.first == 1
    bench.step()
    (last,) = bench.orders()
    assert isinstance(last, HandOver)
    assert len(last.page_ids) == 1
    assert last.handover is not None
    assert last.handover.token == alone(PROMPT, 1)[0]
    assert last.handover.logprob is not None
    assert bench.step() is None, "it computes nothing more"
    bench.told(Acked(ID, 0, 2), HandedOver(ID))
    end = bench.end(1)
    assert isinstance(end, SequenceFinished)
    assert (end.reason, end.usage.completion_tokens) == ("length", 0)
    assert transfer_holds(bench) == 3, "held until nobody reads them"
    bench.told(TransferQuiet(ID))
    assert bench.scheduler.pool.num_held == 0
    assert bench.tokens(1) == []
    assert bench.orders() == []


def test_a_cached_prefix_is_sent_before_anything_is_computed_and_only_what_is_lacking() -> None:
    bench = Leg()
    bench.submit(9, PROMPT, max_tokens=1)
    bench.drain()
    bench.leg("prefill")
    bench.told(Accepted(ID, 1))
    bench.orders()
    plan = bench.scheduler.plan(bench.now)
    assert plan is not None
    (sent,) = bench.orders()
    assert isinstance(sent, Send)
    assert (sent.first, len(sent.page_ids)) == (1, 1)
    bench.events += bench.scheduler.apply(bench.runner.execute(plan), bench.now)
    (last,) = bench.orders()
    assert isinstance(last, HandOver)
    assert last.handover is not None
    assert last.handover.cached_tokens == 8
    bench.told(HandedOver(ID), TransferQuiet(ID))
    assert bench.scheduler.pool.num_held == 0


def test_a_prompt_of_whole_pages_has_no_page_behind_them() -> None:
    bench = Leg()
    bench.leg("prefill", ids(8))
    bench.told(Accepted(ID, 1))
    bench.step()
    sent, last = bench.orders()[2:]
    assert isinstance(sent, Send)
    assert (sent.first, len(sent.page_ids)) == (1, 1)
    assert isinstance(last, HandOver)
    assert last.page_ids == ()


@pytest.mark.parametrize("how", ["abort", "deadline", "broken", "integrity"])
@pytest.mark.parametrize("accepted", [False, True])
def test_a_leg_that_ends_early_withdraws_and_holds_until_it_is_quiet(
    how: str, accepted: bool
) -> None:
    bench = Leg(step_tokens=PAGE_SIZE, max_running=4)
    bench.leg("prefill")
    bench.step()
    if accepted:
        bench.told(Accepted(ID, 0))
    bench.step()
    bench.orders()
    match how:
        case "abort":
            bench.events += bench.scheduler.abort(1, bench.now)
        case "deadline":
            bench.events += bench.scheduler.expire(float("inf"))
        case "broken":
            bench.events += bench.scheduler.fail_all("engine_error", "broken")
        case "integrity":
            bench.runner.tags[0] += 1
            bench.step()
    code = {"deadline": "deadline_exceeded", "broken": "engine_error"}.get(how, "aborted")
    if how == "integrity":
        code = "page_integrity"
    withdrawn = bench.orders()
    assert [(order.transfer_id, order.code) for order in withdrawn] == [  # type: ignore[union-attr]
        (ID, code),
        (HOME, "aborted"),
    ]
    assert transfer_holds(bench) == 2 * accepted
    bench.told(TransferQuiet(ID), TransferQuiet(HOME))
    assert bench.scheduler.pool.num_held == 0
    assert bench.scheduler.transfers.is_idle


def test_an_accept_beyond_the_chain_is_corrupt() -> None:
    bench = Leg()
    bench.leg("prefill")
    bench.told(Accepted(ID, 3))
    end = bench.end(1)
    assert isinstance(end, SequenceFailed)
    assert end.code == "transfer_corrupt"
    assert "Withdraw" in bench.kinds()


def test_a_computed_prompt_that_nobody_takes_over_gives_its_pages_to_others() -> None:
    bench = Leg(num_pages=4, context_tokens=16)
    bench.leg("prefill")
    bench.step()
    assert bench.scheduler.load().waiting_sequences == 1
    bench.submit(2, ids(12, 5), max_tokens=3)
    while bench.step() is not None:
        pass
    assert bench.tokens(2) == alone(ids(12, 5), 3)
    assert bench.step() is None, "nor is it computed again for nothing"
    bench.orders()
    bench.told(Accepted(ID, 0))
    bench.step()
    *_, last = bench.orders()
    assert isinstance(last, HandOver)
    assert last.handover is not None
    assert last.handover.token == alone(PROMPT, 1)[0]
    assert bench.scheduler.preemptions == 0


def test_a_prompt_that_was_accepted_keeps_its_pages() -> None:
    bench = Leg(num_pages=4, context_tokens=16)
    bench.leg("prefill")
    bench.told(Accepted(ID, 0))
    bench.step()
    bench.submit(2, ids(12, 5), max_tokens=3)
    assert bench.step() is None
    bench.told(HandedOver(ID), TransferQuiet(ID))
    bench.drain()
    assert bench.tokens(2) == alone(ids(12, 5), 3)
