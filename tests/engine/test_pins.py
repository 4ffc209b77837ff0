"""Pins: a prompt's pages are computed once, told of once, and stay until the pin ends."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from engine.schedule.pages import HoldKind
from policies.contract import wire
from policies.contract.wire import Pin, PinResult, Purge, Sampling, Unpin, pack_ids
from tests.engine.arena_runner import VOCAB, alone
from tests.engine.engine_bench import SALT, EngineBench

PROMPT = array("I", [(5 * at) % VOCAB for at in range(14)])  # three full pages of four, and two
PIN = Pin(2, "a", pack_ids(PROMPT), SALT, ttl_s=100.0, max_pages=20)


def pinned(bench: EngineBench) -> int:
    return bench.engine.scheduler.load().pages_pinned


def pin(bench: EngineBench, **fields: object) -> PinResult:
    """The one result of a Pin, with everything that it needs computed."""
    bench.results.clear()
    bench.engine.handle(1, msgspec.structs.replace(PIN, **fields))
    bench.drain()
    (result,) = bench.results
    assert isinstance(result, PinResult)
    return result


def test_pinned_pages_are_computed_and_survive_any_pressure() -> None:
    bench = EngineBench()
    assert pin(bench) == PinResult(2, "a", 3)
    assert pinned(bench) == 3
    assert not bench.tokens
    assert not bench.records, "nobody is told of its sequence"
    assert not bench.runner.live
    while bench.engine.scheduler.cache.evict(1e9):
        pass
    bench.submit(1, (1,), prompt=pack_ids(PROMPT))
    bench.drain()
    assert bench.tokens[1, 1] == alone(PROMPT, 6)
    assert bench.records[0].usage.cached_tokens == 12
    bench.engine.scheduler.invariants()


def test_the_same_pin_again_is_one_pin_and_lasts_longer() -> None:
    bench = EngineBench()
    pin(bench)
    bench.now += 90.0
    assert pin(bench) == PinResult(2, "a", 3)
    bench.now += 90.0
    bench.step()
    assert pinned(bench) == 3
    bench.now += 11.0
    bench.step()
    assert pinned(bench) == 0


def test_two_links_that_pin_one_prompt_are_both_told() -> None:
    bench = EngineBench()
    for channel in (1, 3):
        bench.engine.handle(channel, PIN)
    bench.drain()
    assert bench.results == [PinResult(2, "a", 3)] * 2
    assert pinned(bench) == 3


def test_an_unpin_gives_the_pages_back_and_an_unknown_one_is_no_error() -> None:
    bench = EngineBench()
    pin(bench)
    pin(bench, pin_id="b")
    bench.engine.handle(1, Unpin(2, "a"))
    bench.engine.handle(1, Unpin(2, "nobody"))
    assert pinned(bench) == 3, "b holds them still"
    bench.engine.handle(1, Unpin(2, "b"))
    assert pinned(bench) == 0
    assert bench.engine.scheduler.pool.num_held == 0


def test_an_unpin_while_it_computes_ends_the_computing() -> None:
    bench = EngineBench()
    bench.engine.handle(1, PIN)
    bench.engine.handle(1, Unpin(2, "a"))
    bench.drain()
    assert pinned(bench) == 0
    assert not bench.runner.live
    assert bench.engine.scheduler.pool.num_held == 0


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"max_pages": 2}, "pin_quota_exceeded", "found 3 pages beside 0 pinned, allowed 2"),
        ({"prompt": pack_ids(PROMPT[:3])}, "invalid_submit", "no full page"),
        ({"prompt": b"abc"}, "invalid_submit", "3 bytes"),
        ({"prompt": pack_ids(array("I", [VOCAB] * 9))}, "invalid_submit", "token id"),
        ({"salt": b"short"}, "invalid_submit", "salt: found 5 bytes"),
        ({"ttl_s": 0.0}, "invalid_submit", "ttl_s"),
        ({"ttl_s": float("inf")}, "invalid_submit", "ttl_s"),
        ({"ttl_s": float("nan")}, "invalid_submit", "ttl_s"),
        (
            {"prompt": pack_ids(array("I", [at % VOCAB for at in range(199)])), "max_pages": 99},
            "pool_too_small",
            "49 pages beside 0 pinned, allowed 14",
        ),
    ],
)
def test_what_cannot_be_pinned_is_refused_by_name(
    fields: dict[str, object], code: str, words: str
) -> None:
    bench = EngineBench()
    result = pin(bench, **fields)
    assert (result.pages, result.code) == (0, code)
    assert words in result.message
    assert bench.engine.scheduler.pool.num_held == 0


def test_a_quota_counts_all_pins_of_a_tenant_and_no_others() -> None:
    bench = EngineBench()
    assert pin(bench, max_pages=3).pages == 3
    assert pin(bench, pin_id="b", max_pages=5).code == "pin_quota_exceeded"
    assert pin(bench, pin_id="c", max_pages=5, salt=b"x" * 32).pages == 3


def test_the_longest_sequence_runs_beside_all_that_can_be_pinned() -> None:
    """Also where the context ends inside a page."""
    bench = EngineBench(num_pages=20, context_tokens=63)
    pages = [pack_ids(array("I", [token] * 4)) for token in range(5)]
    codes = [pin(bench, pin_id=f"{page!r}", prompt=page).code for page in pages]
    assert codes == ["", "", "", "", "pool_too_small"]
    prompt = array("I", [5] * 20)
    bench.submit(1, (1,), prompt=pack_ids(prompt), sampling=Sampling(99, temperature=0.0))
    bench.drain()
    assert bench.tokens[1, 1] == alone(prompt, 43)


def test_a_draining_engine_pins_nothing() -> None:
    bench = EngineBench()
    bench.engine.handle(0, wire.Drain())
    assert pin(bench).code == "draining"


def test_a_purge_ends_its_tenants_pins() -> None:
    bench = EngineBench()
    pin(bench)
    pin(bench, pin_id="b", salt=b"x" * 32)
    bench.results.clear()
    bench.engine.handle(1, Purge(2, "p", SALT))
    bench.step()
    assert bench.results == [wire.PurgeResult(2, "p", 3)]
    assert pinned(bench) == 3
    while bench.engine.scheduler.cache.evict(1e9):
        pass
    pool = bench.engine.scheduler.pool
    assert sum(pool.holds(page, HoldKind.PIN) for page in range(pool.num_pages)) == 3
    assert pool.num_held == 3


def test_a_pin_whose_tenant_is_purged_while_it_computes_says_so() -> None:
    bench = EngineBench()
    bench.engine.handle(1, PIN)
    bench.submit(1, (1,), prompt=pack_ids(PROMPT), sampling=Sampling(3, temperature=0.0))
    bench.engine.handle(1, Purge(2, "p", SALT))
    bench.drain()
    failed, purged = bench.results
    assert isinstance(failed, PinResult)
    assert (failed.pages, failed.code) == (0, "pin_failed")
    assert purged == wire.PurgeResult(2, "p", 0)
    assert pinned(bench) == 0
    assert bench.tokens[1, 1] == alone(PROMPT, 3)


def test_a_prompt_that_fails_to_compute_fails_its_pin() -> None:
    bench = EngineBench()
    bench.engine.handle(1, PIN)
    bench.now += 1000.0
    bench.drain()
    (result,) = bench.results
    assert isinstance(result, PinResult)
    assert result.code == "deadline_exceeded"
    assert bench.engine.scheduler.pool.num_held == 0
