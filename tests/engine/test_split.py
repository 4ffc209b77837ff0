"""A split, one news at a time: who holds which pages when, and what becomes of either leg."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import pytest

from engine.config import TierConfig
from engine.schedule.events import (
    SequenceFailed,
    SequenceFinished,
    SequenceRefused,
    SequenceStarted,
    TokensProduced,
)
from engine.schedule.imports import GETS_ON_S
from engine.schedule.orders import Fetch
from engine.schedule.pages import HoldKind
from engine.schedule.sequence import NewSequence
from engine.schedule.transfer_orders import (
    Accepted,
    Acked,
    Arrived,
    Expect,
    Export,
    HandedOver,
    HandOver,
    Handover,
    Import,
    Offered,
    Received,
    Send,
    TransferFailed,
    TransferOrder,
    TransferQuiet,
    Withdraw,
)
from engine.store.tier import Status
from policies.contract.wire import Role, Sampling, TokenLogprob, Transfer
from tests.engine.arena_runner import alone
from tests.engine.order_bench import OrderBench
from tests.engine.scheduler_bench import PAGE_SIZE, ROOT, Bench, ids
from tests.engine.split_bench import SplitBench

ID, HOME = b"t" * 16, b"h" * 16
TRANSFER = Transfer(ID, b"s" * 32, "peer:1", HOME, b"r" * 32)
PROMPT = ids(10)  # two pages and a half


class Leg(Bench):
    """One side alone; the test plays its mover."""

    def leg(
        self,
        role: Role,
        prompt: array[int] = PROMPT,
        *,
        sequence_id: int = 1,
        transfer: Transfer = TRANSFER,
        **sampling: int,
    ) -> None:
        asked = Sampling(**{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
        new = NewSequence(
            sequence_id, prompt, ROOT, asked, owner=ROOT[:16], role=role, transfer=transfer
        )
        self.scheduler.submit(new, self.now)
        self.runner.begin(sequence_id, prompt)

    def orders(self) -> list[TransferOrder]:
        return self.scheduler.transfers.take_orders()

    def told(self, *news: object) -> None:
        for one in news:
            self.events += self.scheduler.take(one, self.now)  # type: ignore[arg-type]
            self.scheduler.invariants()

    def kinds(self) -> list[str]:
        return [type(order).__name__ for order in self.orders()]

    def write(self, order: Import) -> None:
        """Into these pages what a prefill would have computed."""
        other = Bench()
        other.submit(1, PROMPT, max_tokens=1)
        other.step()
        (pages,) = other.runner.plans[0].rows[0].page_table
        for at, page in enumerate(order.page_ids, order.first):
            self.runner.arena[page] = list(other.runner.arena[pages[at]])
            self.runner.tags[page] = order.generations[at - order.first]


def transfer_holds(bench: Bench) -> int:
    return bench.scheduler.pool.num_with(HoldKind.TRANSFER)


# --- prefill --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("transfer_refused", "transfer_refused"),
        ("transfer_layout", "transfer_layout"),
        ("aborted", "transfer_lost"),
        ("deadline_exceeded", "transfer_lost"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_transfer_that_fails_ends_the_leg_with_a_code_of_transfers(
    role: Role, code: str, told: str
) -> None:
    bench = Leg()
    bench.leg(role)
    bench.step()
    bench.told(TransferFailed(ID, code, "it says why"))
    end = bench.end(1)
    assert isinstance(end, SequenceFailed)
    assert end.code == told
    assert "it says why" in end.message
    withdrawn = [order.transfer_id for order in bench.orders() if isinstance(order, Withdraw)]
    assert withdrawn == ([HOME] if role == "prefill" else []), "nothing will come home"
    bench.told(TransferQuiet(ID))
    assert bench.scheduler.pool.num_held == 0
    assert not bench.scheduler.has_work


def test_a_transfer_that_is_over_before_it_is_handed_over_is_lost() -> None:
    for role in ("prefill", "decode"):
        bench = Leg()
        bench.leg(role)
        bench.step()
        bench.told(TransferQuiet(ID))
        end = bench.end(1)
        assert isinstance(end, SequenceFailed)
        assert end.code == "transfer_lost"


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


# --- decode ---------------------------------------------------------------------------------------


def imported(bench: Leg) -> Import:
    bench.step()
    (order,) = [order for order in bench.orders() if isinstance(order, Import)]
    return order


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


# --- what others bring of it ----------------------------------------------------------------------

OTHER = msgspec.structs.replace(TRANSFER, transfer_id=b"u" * 16, return_id=b"v" * 16)


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


# --- afterwards -----------------------------------------------------------------------------------


def test_who_has_taken_over_is_preempted_like_any_other() -> None:
    bench = Leg(num_pages=4, context_tokens=16)
    bench.leg("decode", max_tokens=6)
    bench.write(imported(bench))
    bench.told(Arrived(ID, 0, 3), Received(ID, Handover(alone(PROMPT, 1)[0])), TransferQuiet(ID))
    bench.step()
    bench.scheduler._preempt(bench.scheduler._running[1], set())
    bench.drain()
    assert bench.tokens(1) == alone(PROMPT, 6)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_id_is_for_one_transfer(role: Role) -> None:
    bench = Leg()
    bench.leg(role)
    with pytest.raises(SequenceRefused) as refused:
        bench.leg(role, sequence_id=2)
    assert refused.value.code == "transfer_refused"
    assert bench.scheduler.load().waiting_sequences == 1


# --- what comes home ------------------------------------------------------------------------------


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


def test_a_token_is_told_once_however_often_news_come() -> None:
    bench = SplitBench()
    bench.submit(1, PROMPT)
    for _ in range(50):
        for key in bench.network.live():
            bench.network.advance(key)
            while bench.network.hear(key, twice=True):
                pass
        bench.prefill.step()
        bench.decode.step()
    bench.rest()
    told = [event for event in bench.decode.events if isinstance(event, TokensProduced)]
    assert [event.tokens[0] for event in told] == alone(PROMPT, 4)
