"""Prefill and decode on two engines with real movers: as one engine answers, whatever is lost."""

from __future__ import annotations

import socket
import time
from array import array
from collections.abc import Iterator, Sequence

import pytest

from engine.__main__ import _new_mover
from engine.config import ConfigError, EngineConfig, ModelSpec
from engine.schedule.transfer_orders import Arrived, TransferNews
from engine.store.host import HostTier
from engine.store.tier import Tier
from policies.contract import wire
from policies.contract.page_keys import owner_tag
from policies.contract.wire import Abort, Drain, Sampling
from tests.engine.arena_runner import VOCAB, AheadArenaRunner, ArenaRunner, alone, fold, likelihood
from tests.engine.engine_bench import SALT
from tests.engine.engine_pair import CHANNEL, Answer, EnginePair, EngineSite
from tests.engine.tiered_bench import LAYOUT, ArenaBytes

PROMPT = array("I", [(7 * at) % VOCAB for at in range(43)])
GREEDY = Sampling(6, temperature=0.0)


def site(overlap: str = "", num_pages: int = 64, tiers: Sequence[Tier] = ()) -> EngineSite:
    runner = (
        AheadArenaRunner(num_pages, LAYOUT.page_size, lazy=overlap == "lazy")
        if overlap
        else ArenaRunner(num_pages, LAYOUT.page_size)
    )
    return EngineSite(
        runner,
        ArenaBytes(runner),
        LAYOUT,
        vocab_size=VOCAB,
        num_pages=num_pages,
        overlap=bool(overlap),
        tiers=tiers,
    )


@pytest.fixture(params=["", "eager", "lazy"])
def pair(request: pytest.FixtureRequest) -> Iterator[EnginePair]:
    pair = EnginePair(site(request.param), site(request.param))
    yield pair
    pair.close()


def finished(answer: Answer) -> wire.Finished:
    assert isinstance(answer.end, wire.Finished), answer.end
    return answer.end


def test_a_split_answer_is_the_whole_ones_and_only_decode_tells_it(pair: EnginePair) -> None:
    first, second = pair.split(PROMPT, GREEDY)
    pair.settle()
    assert second.tokens == alone(PROMPT, 6)
    assert first.tokens == []
    assert finished(first).usage == wire.Usage(43, 0, 0)
    assert finished(second).usage == wire.Usage(43, 0, 6)
    again = pair.split(PROMPT, Sampling(6, seed=3, logprobs=2))
    pair.settle()
    assert [finished(leg).usage.cached_tokens for leg in again] == [40, 40]
    assert again[1].tokens == alone(PROMPT, 6, seed=3)
    assert again[1].logprobs[0] == likelihood(fold(PROMPT), again[1].tokens[0], 2)
    assert len(again[1].logprobs) == 6
    assert [record.usage for record in pair.decode.records] == [
        wire.Usage(43, 0, 6),
        wire.Usage(43, 40, 6),
    ]


def test_an_answer_may_end_with_the_token_that_came(pair: EnginePair) -> None:
    (token,) = alone(PROMPT, 1)
    _, short = pair.split(PROMPT, Sampling(1, temperature=0.0))
    _, stopped = pair.split(PROMPT, Sampling(9, temperature=0.0, stop_token_ids=(token,)))
    pair.settle()
    assert (short.tokens, finished(short).reason) == ([token], "length")
    assert (stopped.tokens, finished(stopped).reason) == ([token], "stop")


def test_turn_after_turn_prefill_finds_the_whole_conversation(pair: EnginePair) -> None:
    history = PROMPT[:]
    for turn in range(3):
        known = len(history)
        history.extend((turn * 5 + at) % VOCAB for at in range(9))
        first, second = pair.split(history, GREEDY, returns=True)
        pair.settle()
        assert second.tokens == alone(history, 6)
        if turn:
            least = known - LAYOUT.page_size
            assert least < finished(second).usage.cached_tokens <= known
            assert finished(first).usage.host_tokens == 0
        history.extend(second.tokens)


def test_many_at_once_are_each_as_alone(pair: EnginePair) -> None:
    prompts = [array("I", [(at * step) % VOCAB for at in range(9 * step)]) for step in range(1, 9)]
    answers = [pair.split(prompt, GREEDY, returns=True)[1] for prompt in prompts]
    whole = [pair.send(place, prompts[3], GREEDY) for place in pair.sites]
    pair.settle()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == alone(prompt, 6)
    assert [answer.tokens for answer in whole] == [alone(prompts[3], 6)] * 2


@pytest.mark.parametrize("first_to_hear", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_client_that_leaves_leaves_no_page_held(
    pair: EnginePair, first_to_hear: int, steps: int
) -> None:
    answers = pair.split(PROMPT, GREEDY, returns=True)
    for _ in range(steps):
        for place in pair.sites:
            place.step()
    legs = list(zip(pair.sites, answers, strict=True))
    for place, _ in (legs[first_to_hear], legs[1 - first_to_hear]):
        for lane in place.answers:
            place.engine.handle(CHANNEL, Abort((lane,)))
        place.step()
    pair.settle()
    assert answers[0].tokens == []
    assert all(answer.end is not None for answer in answers)
    retried = pair.send(pair.decode, PROMPT, GREEDY)
    pair.settle()
    assert retried.tokens == alone(PROMPT, 6)


LONG = array("I", [(3 * at) % VOCAB for at in range(180)])


def half_way() -> tuple[EnginePair, tuple[Answer, Answer]]:
    """All full pages have arrived, and the first token never comes."""
    pair = EnginePair(site(), site())
    pair.prefill.runner.not_due = {1}
    answers = pair.split(LONG, GREEDY)
    until = time.monotonic() + 10.0
    while len(pair.decode.scheduler.cache) < 44:
        assert time.monotonic() < until
        for place in pair.sites:
            place.step()
    return pair, answers


def test_what_arrived_before_prefill_gave_up_is_found_by_a_local_one() -> None:
    pair, (first, second) = half_way()
    pair.prefill.engine.handle(CHANNEL, Abort(tuple(pair.prefill.answers)))
    pair.settle()
    assert finished(first).reason == "abort"
    assert isinstance(second.end, wire.Failed)
    assert second.end.code == "transfer_lost"
    assert "aborted" in second.end.message
    retried = pair.send(pair.decode, LONG, GREEDY)
    pair.settle()
    assert retried.tokens == alone(LONG, 6)
    assert finished(retried).usage == wire.Usage(180, 176, 6)
    pair.close()


def test_a_purge_ends_what_would_come_home_and_no_answer() -> None:
    pair = EnginePair(site(), site())
    _, second = pair.split(PROMPT, GREEDY, returns=True)
    while not second.tokens:
        for place in pair.sites:
            place.step()
    for place in pair.sites:
        place.engine.handle(2, wire.Purge(2, "p", SALT))
    pair.settle()
    assert second.tokens == alone(PROMPT, 6)
    for place in pair.sites:
        assert all(page.owner != owner_tag(SALT) for page in place.scheduler.cache.contents())
    pair.close()


def test_what_decodes_host_memory_has_need_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = EnginePair(site(), site(tiers=(HostTier(LAYOUT, 30),)))
    pair.send(pair.decode, PROMPT, GREEDY)
    pair.settle()
    while pair.decode.scheduler.cache.evict(time.monotonic()):
        pass
    take, arrived = pair.decode.mover.take, list[tuple[int, int]]()

    def listening() -> list[TransferNews]:
        news = take()
        arrived.extend((one.first, one.count) for one in news if isinstance(one, Arrived))
        return news

    monkeypatch.setattr(pair.decode.mover, "take", listening)
    first, second = pair.split(PROMPT, GREEDY)
    pair.settle()
    assert second.tokens == alone(PROMPT, 6)
    assert arrived == [(10, 1)], "the page behind the full ones"
    assert finished(first).usage.cached_tokens == 0, "prefill has nothing of it"
    (told,) = pair.decode.scheduler.tiers.report({})
    assert told.hit_pages == 10
    pair.close()


def test_a_drained_engine_refuses_new_legs_and_ends_those_it_has() -> None:
    pair = EnginePair(site(), site())
    _, answer = pair.split(PROMPT, GREEDY)
    for place in pair.sites:
        place.engine.handle(0, Drain())
    refused = pair.split(PROMPT, GREEDY)
    pair.settle()
    assert answer.tokens == alone(PROMPT, 6)
    assert [leg.end.code for leg in refused if isinstance(leg.end, wire.Failed)] == ["draining"] * 2
    pair.close()


@pytest.mark.parametrize("ends", [0, 1])
def test_an_engine_that_ends_fails_the_leg_of_the_other(ends: int) -> None:
    pair, answers = half_way()
    going, staying = pair.sites[ends], pair.sites[1 - ends]
    going.close()
    until = time.monotonic() + 10.0
    while answers[1 - ends].end is None:
        assert time.monotonic() < until
        staying.step()
    end = answers[1 - ends].end
    assert isinstance(end, wire.Failed)
    assert end.code in ("transfer_lost", "transfer_refused")
    while not staying.scheduler.transfers.is_idle:
        assert time.monotonic() < until
        staying.step()
    assert staying.scheduler.pool.num_held == 0
    staying.close()


def test_decode_finds_out_by_itself_that_prefill_never_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It died before its mover had heard of the transfer."""
    monkeypatch.setattr("engine.transfer.channel.CONNECT_S", 0.1)
    pair = EnginePair(site(), site())
    _, answer = pair.split(LONG, GREEDY)
    pair.decode.step()
    assert pair.decode.scheduler.pool.num_held == 45
    until = time.monotonic() + 10.0
    while answer.end is None or not pair.decode.scheduler.transfers.is_idle:
        assert time.monotonic() < until
        pair.decode.step()
    assert isinstance(answer.end, wire.Failed)
    assert answer.end.code == "transfer_timeout"
    assert pair.decode.scheduler.pool.num_held == 0
    retried = pair.send(pair.decode, LONG, GREEDY)
    while retried.end is None:
        assert time.monotonic() < until
        pair.decode.step()
    assert retried.tokens == alone(LONG, 6)
    pair.close()


def test_a_broken_runner_fails_both_legs() -> None:
    pair, (_, second) = half_way()
    pair.prefill.engine.fail("engine_error", "engine: found broken")
    pair.prefill.close()
    until = time.monotonic() + 10.0
    while second.end is None:
        assert time.monotonic() < until
        pair.decode.step()
    assert isinstance(second.end, wire.Failed)
    assert second.end.code == "transfer_lost"
    assert "engine_error" in second.end.message
    pair.decode.close()


def test_an_address_that_is_taken_is_named() -> None:
    memory = ArenaBytes(ArenaRunner(4, LAYOUT.page_size))
    spec = ModelSpec(name="m", identity="m", path="", format="gguf")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = EngineConfig(spec=spec, engine_index=0, peer_port=port)
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}") as refused:
            _new_mover(config, memory, LAYOUT, lambda: None)
    assert "--peer-port none" in str(refused.value)
