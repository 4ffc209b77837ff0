"""Random lives of split sequences over a network that is slow, breaks, and says things twice, and
over slower tiers that lose pages and hang.

Whatever happens, decode's tokens are those of a fresh run, prefill tells none, and when all is over
every page of both engines is free or cached.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.config import TierConfig
from engine.schedule.events import (
    PromptAdvanced,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRefused,
    SequenceStarted,
    TokensProduced,
)
from engine.schedule.orders import Fetch, Order
from engine.schedule.plan import StepPlan, StepResult
from engine.schedule.sequence import NewSequence
from engine.store.tier import Status
from policies.contract.wire import Role, Sampling, Transfer
from tests.engine.arena_runner import VOCAB, choose, fold, likelihood, mix
from tests.engine.order_bench import OrderBench
from tests.engine.scheduler_bench import Bench
from tests.engine.split_bench import Network

ROOTS = (b"a" * 32, b"b" * 32)
CODES = ("transfer_lost", "transfer_timeout", "transfer_corrupt", "page_integrity", "aborted")
MISHAPS = (Status.TIMEOUT, Status.MISS, Status.CORRUPT, Status.UNAVAILABLE)
MOST_STEPS = 60  # of a sequence: 40 of a prompt and 20 behind it, a token each
ENDS = {*CODES, "transfer_refused", "deadline_exceeded", "logits_not_finite"} - {"aborted"}


@dataclass
class Stream:
    new: NewSequence
    state: int  # of the reference run, after the tokens so far
    produced: int = 0
    started: SequenceStarted | None = None


class Site(Bench):
    """One engine: its streams, and a step that may be under way, with one planned behind it; and
    perhaps a host tier of so many pages."""

    def __init__(self, host_pages: int, **limits: float) -> None:
        host = TierConfig(name="host", capacity_pages=host_pages, bytes_per_s=1e6, latency_s=1e-3)
        tiers = (host,) if host_pages else ()
        super().__init__(**limits, tiers=tiers, page_bytes=1000)  # type: ignore[arg-type]
        self.tier = OrderBench(self.scheduler.tiers, self.runner, {"host": host_pages})
        self.streams: dict[int, Stream] = {}
        self.flights: list[StepPlan] = []
        self.result: StepResult | None = None  # of the first one

    def begin(self, new: NewSequence) -> bool:
        try:
            self.scheduler.submit(new, self.now)
        except SequenceRefused:  # too long for its pool
            return False
        self.runner.begin(new.sequence_id, new.prompt)
        self.streams[new.sequence_id] = Stream(new, fold(new.prompt))
        return True

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            assert all(self.streams[row.sequence_id] for row in plan.rows)
            self.flights.append(plan)
        return plan

    def plan_ahead(self) -> None:
        plan = self.scheduler.plan_ahead(self.now)
        if plan is not None:
            for row in plan.rows:
                assert self.streams[row.sequence_id].new.role != "prefill"
            if self.result is not None:
                plan.follow(self.result.tokens)
            self.flights.append(plan)

    def compute(self, not_due: set[int]) -> None:
        self.runner.not_due = not_due if len(self.flights) == 1 else set()
        self.result = self.runner.execute(self.flights[0])
        if len(self.flights) > 1:
            self.flights[1].follow(self.result.tokens)

    def apply(self) -> None:
        assert self.result is not None
        self.tier.meddle()
        self.flights.pop(0)
        result, self.result = self.result, None
        self.now += 0.05
        self.events += self.scheduler.apply(result, self.now)

    def go(self, steps: int, *, ahead: bool = False) -> bool:
        """Some steps, one after the other or one ahead; whether one could be planned."""
        for _ in range(steps):
            if not self.flights and self.plan() is None:
                return False
            if ahead and self.can_follow:
                self.plan_ahead()
            if self.result is None:
                self.compute(set())
            self.apply()
        return True

    @property
    def can_follow(self) -> bool:
        return len(self.flights) == 1 and not (self.result and self.runner.not_due)


class SplitMachine(RuleBasedStateMachine):
    @initialize(
        pools=st.tuples(st.integers(6, 16), st.integers(6, 16)),
        step_tokens=st.integers(2, 24),
        max_running=st.integers(1, 5),
        host_pages=st.sampled_from([(0, 0), (0, 30), (9, 9), (30, 30)]),
    )
    def build(
        self,
        pools: tuple[int, int],
        step_tokens: int,
        max_running: int,
        host_pages: tuple[int, int],
    ) -> None:
        self.prefill, self.decode = (
            Site(
                of_host,
                num_pages=num_pages,
                context_tokens=60,
                step_tokens=step_tokens,
                max_running=min(max_running, step_tokens),
                vocab_size=VOCAB,
                prefill_tokens_per_s=1.0,
            )
            for num_pages, of_host in zip(pools, host_pages, strict=True)
        )
        self.sites = self.prefill, self.decode
        self.network = Network(*self.sites)
        self.next_id = 1
        self.cached: dict[int, int] = {}  # as prefill saw it
        self.purged: set[bytes] = set()

    # --- what a gateway does --------------------------------------------------------------------

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 40),
        root=st.sampled_from(ROOTS),
        max_tokens=st.integers(1, 20),
        stops=st.sets(st.integers(0, VOCAB - 1), max_size=3),
        logprobs=st.sampled_from([None, None, 2]),
        seed=st.integers(0, 2),
        deadline_s=st.one_of(st.none(), st.none(), st.floats(0.5, 30.0)),
        path=st.sampled_from(["split", "split", "split", "prefill", "decode"]),
        returns=st.booleans(),
        decode_first=st.booleans(),
    )
    def submit(
        self,
        family: int,
        length: int,
        root: bytes,
        max_tokens: int,
        stops: set[int],
        logprobs: int | None,
        seed: int,
        deadline_s: float | None,
        path: str,
        returns: bool,
        decode_first: bool,
    ) -> None:
        """Split, or whole on one of the two."""
        if root in self.purged:
            return
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        prompt = array("I", [(family * 7 + at // 9) % VOCAB for at in range(length)])
        sampling = Sampling(
            max_tokens, seed=seed, stop_token_ids=tuple(sorted(stops)), logprobs=logprobs
        )
        name = sequence_id.to_bytes(15)
        home = (b"r" + name, b"R" * 32) if returns else (b"", b"")
        transfer = Transfer(b"t" + name, b"S" * 32, "peer:1", *home)

        def new(site: Site, role: Role) -> NewSequence:
            deadline = None if deadline_s is None else site.now + deadline_s
            split = None if role == "mixed" else transfer
            return NewSequence(
                sequence_id, prompt, root, sampling, deadline, owner=root, role=role, transfer=split
            )

        if path != "split":
            site = self.prefill if path == "prefill" else self.decode
            site.begin(new(site, "mixed"))
            return
        legs: list[tuple[Site, Role]] = [(self.decode, "decode"), (self.prefill, "prefill")]
        begun = [
            site
            for site, role in (legs if decode_first else legs[::-1])
            if site.begin(new(site, role))
        ]
        if len(begun) == 1:
            self.end(begun[0], sequence_id)

    def end(self, site: Site, sequence_id: int) -> None:
        site.events += site.scheduler.abort(sequence_id, site.now)

    @precondition(lambda self: any(site.streams for site in self.sites))
    @rule(data=st.data(), how=st.sampled_from(["abort", "abort", "finish"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        site = data.draw(st.sampled_from([site for site in self.sites if site.streams]))
        sequence_id = data.draw(st.sampled_from(sorted(site.streams)))
        if how == "abort":
            self.end(site, sequence_id)
        else:
            site.events += site.scheduler.finish(sequence_id, 0, site.now)

    @rule(seconds=st.floats(0.0, 5.0))
    def expire(self, seconds: float) -> None:
        for site in self.sites:
            site.now += seconds
            site.events += site.scheduler.expire(site.now)

    @rule(root=st.sampled_from(ROOTS))
    def purge(self, root: bytes) -> None:
        """The tenant sends nothing after it, so nothing of it may be left."""
        self.purged.add(root)
        for site in self.sites:
            site.scheduler.purge(root)
            site.scheduler.tiers.purge(root, site.now + 10.0)

    @precondition(lambda self: any(site.streams for site in self.sites))
    @rule(at=st.integers(0, 1), is_broken=st.booleans())
    def fail_all(self, at: int, is_broken: bool) -> None:
        if is_broken and not self.sites[at].flights:
            self.sites[at].events += self.sites[at].scheduler.fail_all("transfer_lost", "broken")

    @rule(at=st.integers(0, 1), page=st.integers(0, 15))
    def flip_tag(self, at: int, page: int) -> None:
        """Some page is overwritten behind our back."""
        if page < self.sites[at].config.num_pages:
            self.sites[at].runner.tags[page] += 1000

    # --- steps ----------------------------------------------------------------------------------

    @rule(at=st.integers(0, 1), steps=st.integers(1, 20), ahead=st.booleans())
    def go(self, at: int, steps: int, ahead: bool) -> None:
        self.sites[at].go(steps, ahead=ahead)

    @rule(
        at=st.integers(0, 1),
        what=st.sampled_from(["plan", "ahead", "compute", "apply"]),
        not_due=st.sets(st.integers(1, 8), max_size=3),
    )
    def half_a_step(self, at: int, what: str, not_due: set[int]) -> None:
        site = self.sites[at]
        match what:
            case "plan" if not site.flights:
                site.plan()
            case "ahead" if site.can_follow:
                site.plan_ahead()
            case "compute" if site.flights and site.result is None:
                site.compute(not_due)
            case "apply" if site.result is not None:
                site.apply()

    # --- the network ----------------------------------------------------------------------------

    @precondition(lambda self: self.network.live())
    @rule(data=st.data(), what=st.sampled_from(["advance", "hear", "hear twice", "break"]))
    def one_transfer(self, data: st.DataObject, what: str) -> None:
        keys = self.network.live()
        key = keys[data.draw(st.integers(0, len(keys) - 1))]
        match what:
            case "advance":
                self.network.advance(key, data.draw(st.integers(1, 4)))
            case "break":
                half, code = self.network.halves[key], data.draw(st.sampled_from(CODES))
                self.network.break_(half, self.network.peer(key), code)
            case _:
                self.network.hear(key, twice=what == "hear twice")

    @precondition(lambda self: self.network.unmet())
    @rule(data=st.data())
    def nobody_comes(self, data: st.DataObject) -> None:
        """Decode's mover finds out by itself; prefill's hears of it when it dials."""
        halves = self.network.unmet()
        half = halves[data.draw(st.integers(0, len(halves) - 1))]
        half.fail("transfer_timeout", "peer: found not connected")

    @precondition(lambda self: any(site.tier.ready() for site in self.sites))
    @rule(data=st.data(), status=st.sampled_from([Status.OK, Status.OK, *MISHAPS]))
    def one_order_of_a_tier(self, data: st.DataObject, status: Status) -> None:
        """The pages of it behind the first few go badly."""
        site = data.draw(st.sampled_from([site for site in self.sites if site.tier.ready()]))
        order = data.draw(st.sampled_from(site.tier.ready()))
        good = data.draw(st.integers(0, 3))
        site.tier.carry_out(
            order, site.now, lambda _, at: Status.OK if at < good else self.mishap(order, status)
        )

    def mishap(self, order: Order, status: Status) -> Status:
        is_fetch = isinstance(order, Fetch)
        return status if is_fetch or status is Status.TIMEOUT else Status.OK

    @rule(quiet=st.booleans())
    def all_orders_of_tiers(self, quiet: bool) -> None:
        for site in self.sites:
            site.tier.settle(site.now, quiet=quiet)

    @rule(at=st.integers(0, 1))
    def device_is_emptied(self, at: int) -> None:
        """So that what comes again is to be had from slower tiers and peers alone."""
        while self.sites[at].scheduler.cache.evict(self.sites[at].now):
            pass

    @rule()
    def all_transfers(self) -> None:
        self.network.settle()

    @rule()
    def serve_all(self) -> None:
        """As on a quiet day."""
        for _ in range(6):
            self.network.settle()
            for site in self.sites:
                site.tier.settle(site.now, quiet=False)
                site.go(10)

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def all_is_right(self) -> None:
        if hasattr(self, "sites"):
            self.answers_are_right()
            self.books_agree()

    def answers_are_right(self) -> None:
        for site in self.sites:
            for event in site.events:
                self.take(site, event)
            site.events.clear()

    def take(self, site: Site, event: SequenceEvent) -> None:
        stream = site.streams[event.sequence_id]
        new = stream.new
        match event:
            case SequenceStarted(cached_tokens=cached):
                assert stream.started is None
                stream.started = event
                if new.role == "prefill":
                    self.cached[event.sequence_id] = cached
                elif new.role == "decode":
                    assert cached == self.cached[event.sequence_id]
            case PromptAdvanced(num_computed=num_computed):
                assert stream.started is not None
                assert not stream.produced
                assert 0 < num_computed < len(new.prompt)
            case TokensProduced(tokens=(token,), logprobs=logprobs):
                assert new.role != "prefill"
                assert stream.started is not None
                if new.sampling.logprobs is not None:
                    assert logprobs == (likelihood(stream.state, token, 2),)
                assert token == choose(stream.state, new.sampling.seed), "not as in a fresh run"
                stream.state = mix(stream.state, token)
                stream.produced += 1
            case SequenceFinished(reason=reason, usage=usage):
                assert usage.prompt_tokens == len(new.prompt)
                if new.role == "prefill":
                    assert usage.completion_tokens == 0
                elif reason == "length":
                    total = min(60, site.config.num_pages * site.config.page_size)
                    limit = min(new.sampling.max_tokens, total - len(new.prompt))
                    assert usage.completion_tokens == stream.produced == limit
                self.over(site, event)
            case SequenceFailed(code=code, usage=usage):
                assert code in ENDS
                assert usage.completion_tokens == stream.produced
                assert (
                    new.role != "decode"
                    or not code.startswith("transfer")
                    or (not stream.produced or code == "transfer_lost")
                )
                self.over(site, event)
            case _:
                raise AssertionError(event)

    def over(self, site: Site, event: SequenceFinished | SequenceFailed) -> None:
        site.runner.end(event.sequence_id)
        del site.streams[event.sequence_id]

    def books_agree(self) -> None:
        self.network.gather()
        self.network.meddle()
        for site in self.sites:
            site.tier.meddle()
            site.scheduler.invariants()
            load = site.scheduler.load()
            assert load.pages_free + load.pages_held + load.pages_cached == load.pages_total
            assert load.waiting_sequences + load.running_sequences == len(site.streams)
            assert site.runner.live == set(site.streams)
            for root in self.purged:
                assert all(page.owner != root for page in site.scheduler.cache.contents())

    def all_goes_well(self) -> bool:
        """Of what tiers and transfers were asked; whether there was anything."""
        settled = [site.tier.settle(site.now) for site in self.sites]
        return any([*settled, self.network.settle()])

    def teardown(self) -> None:
        if not hasattr(self, "sites"):
            return
        # Alone, and begun again for every other: then it is not slow, but goes round in a circle.
        rounds = 200 + MOST_STEPS * sum(len(site.streams) for site in self.sites)
        for _ in range(rounds):
            moved = self.all_goes_well()
            went = [site.go(1) for site in self.sites]
            self.all_is_right()
            if not moved and not any(went) and not self.all_goes_well():
                # One leg may have ended alone: its gateway ends the other.
                alone = [
                    (site, sequence_id)
                    for site, other in (self.sites, self.sites[::-1])
                    for sequence_id, stream in site.streams.items()
                    if stream.new.role != "mixed" and sequence_id not in other.streams
                ]
                if not alone:
                    break
                for site, sequence_id in alone:
                    self.end(site, sequence_id)
        for site in self.sites:
            assert not site.streams, "a sequence starved"
            assert site.scheduler.pool.num_held == 0, "a hold is left"
            assert site.scheduler.transfers.is_idle


SMALL = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_split_machine() -> None:
    run_state_machine_as_test(SplitMachine, settings=SMALL)


def test_all_that_is_submitted_at_once_comes_to_its_end() -> None:
    """Far more than fits: the longest run that the machine can choose takes its turns too."""
    chance = Random(3)
    machine = SplitMachine()
    machine.build(pools=(11, 15), step_tokens=12, max_running=4, host_pages=(9, 30))
    for _ in range(80):
        machine.submit(
            family=chance.randint(0, 1),
            length=chance.randint(1, 40),
            root=chance.choice(ROOTS),
            max_tokens=20,
            stops=set(),
            logprobs=None,
            seed=0,
            deadline_s=None,
            path=chance.choice(["split", "split", "split", "prefill", "decode"]),
            returns=chance.random() < 0.5,
            decode_first=chance.random() < 0.5,
        )
    machine.teardown()


@pytest.mark.slow
def test_split_machine_at_length() -> None:
    run_state_machine_as_test(
        SplitMachine, settings=settings(SMALL, max_examples=3000, stateful_step_count=80)
    )
