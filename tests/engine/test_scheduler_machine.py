"""Random lives of sequences on tiny pools: tokens as in a fresh run, every page in one place.

Steps are planned, planned ahead, computed and applied as separate rules, in any order that can be:
a step ahead is computed before or after the events of the one that it follows are known.
"""

from array import array
from dataclasses import dataclass, field

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

from engine.config import ScheduleConfig, TierConfig
from engine.schedule.events import (
    PromptAdvanced,
    PromptTold,
    SequenceFailed,
    SequenceFinished,
    SequenceRefused,
    SequenceStarted,
    TokensProduced,
)
from engine.schedule.pages import HoldKind
from engine.schedule.plan import StepPlan, StepResult
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from policies.contract.page_keys import max_hit_pages
from policies.contract.wire import CacheCleared, PageRemoved, PageStored, Sampling
from tests.engine.arena_runner import START, VOCAB, ArenaRunner, choose, fold, likelihood, mix

PAGE_SIZE = 4
ROOTS = (b"a" * 32, b"b" * 32)


@dataclass
class Stream:
    new: NewSequence
    state: int  # of the reference run, after the tokens so far
    untold: list[int] = field(default_factory=list)  # states before the prompt tokens to tell of
    produced: list[int] = field(default_factory=list)
    started: SequenceStarted | None = None


class SchedulerMachine(RuleBasedStateMachine):
    tiers: tuple[TierConfig, ...] = ()

    @initialize(
        num_pages=st.integers(6, 14),
        step_tokens=st.integers(1, 24),
        max_running=st.integers(1, 6),
        context_tokens=st.integers(20, 60),
        rate=st.sampled_from([1.0, 10.0, 1000.0]),
        calm=st.booleans(),
    )
    def build(
        self,
        num_pages: int,
        step_tokens: int,
        max_running: int,
        context_tokens: int,
        rate: float,
        calm: bool,
    ) -> None:
        self.calm = calm  # room for all, short prompts: most steps can be planned ahead
        if calm:
            num_pages, step_tokens, max_running = 14, 24, 6
        self.config = ScheduleConfig(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            context_tokens=context_tokens,
            step_tokens=step_tokens,
            max_running=min(max_running, step_tokens),
            max_waiting=8,
            prefill_tokens_per_s=rate,
            tiers=self.tiers,
            page_bytes=1000,
        )
        self.scheduler = Scheduler(self.config)
        self.runner = ArenaRunner(num_pages, PAGE_SIZE)
        self.now = 100.0
        self.next_id = 1
        self.streams: dict[int, Stream] = {}
        self.flights: list[StepPlan] = []  # planned and not applied
        self.results: list[StepResult] = []  # of the first ones
        self.flipped: set[int] = set()
        self.resident: set[tuple[bytes, str]] = set()
        self.next_event = 0

    # --- rules ----------------------------------------------------------------------------------

    @rule(
        copies=st.integers(1, 3),
        family=st.integers(0, 1),
        length=st.integers(1, 32),
        root=st.sampled_from(ROOTS),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 4),
        stops=st.sets(st.integers(0, VOCAB - 1), max_size=3),
        deadline_s=st.one_of(st.none(), st.none(), st.floats(0.5, 30.0)),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        forks=st.booleans(),
        penalty=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    )
    def submit(
        self,
        copies: int,
        family: int,
        length: int,
        root: bytes,
        max_tokens: int,
        min_tokens: int,
        stops: set[int],
        deadline_s: float | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        forks: bool,
        penalty: float,
    ) -> None:
        deadline = None if deadline_s is None else self.now + deadline_s
        leader = None
        if self.calm:
            copies, length, max_tokens, penalty = 1, min(length, 9), max_tokens + 8, 0.0
        for seed in range(copies):
            sampling = Sampling(
                max_tokens,
                seed=seed,
                min_tokens=min_tokens,
                stop_token_ids=tuple(sorted(stops)),
                frequency_penalty=penalty,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs if leader is None or not forks else None,
            )
            sequence_id = self.submit_one(family, length, root, sampling, deadline, leader)
            if forks and leader is None:
                leader = sequence_id

    def submit_one(
        self,
        family: int,
        length: int,
        root: bytes,
        sampling: Sampling,
        deadline: float | None,
        leader: int | None,
    ) -> int | None:
        # Families share long prefixes, so that prompts hit and duplicate each other.
        prompt = array("I", [(family * 7 + i // 9) % VOCAB for i in range(length)])
        new = NewSequence(self.next_id, prompt, root, sampling, deadline, leader, owner=root[:16])
        self.next_id += 1
        full = self.scheduler.load().waiting_sequences >= 8
        fits = length < min(self.config.context_tokens, self.config.num_pages * PAGE_SIZE)
        if full or not fits:
            with pytest.raises(SequenceRefused):
                self.scheduler.submit(new, self.now)
            return None
        self.scheduler.submit(new, self.now)
        self.runner.begin(new.sequence_id, prompt)
        stream = self.streams[new.sequence_id] = Stream(new, fold(prompt))
        if sampling.prompt_logprobs is not None:
            state = START
            for token in prompt[:-1]:
                state = mix(state, token)
                stream.untold.append(state)
        return new.sequence_id

    @precondition(lambda self: not self.flights)
    @rule()
    def plan(self) -> None:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            assert not self.streams or self.may_wait(), "there is work, and the pages are free"
            return
        assert not plan.follows
        for row in plan.rows:
            stream = self.streams[row.sequence_id]
            assert row.history is not None or not stream.new.sampling.frequency_penalty
            if row.history is not None:
                assert row.history == array("I", [*stream.new.prompt, *stream.produced])
        self.take_off(plan)

    def may_wait(self) -> bool:
        """Whether something else than sequences holds pages."""
        return False

    def can_follow(self) -> bool:
        """The engine plans ahead while one step computes; a runner that it does so with tells
        every token."""
        if len(self.flights) != 1:
            return False
        rows = self.flights[0].rows
        return all(
            token is not None or not row.samples or index in result.corrupt
            for result in self.results
            for index, (row, token) in enumerate(zip(rows, result.tokens, strict=True))
        )

    @precondition(can_follow)
    @rule()
    def plan_ahead(self) -> None:
        (before,) = self.flights
        plan = self.scheduler.plan_ahead(self.now)
        if plan is None:
            return
        assert len(plan.rows) == len(plan.follows)
        assert not plan.copies
        for row, index in zip(plan.rows, plan.follows, strict=True):
            followed = before.rows[index]
            stream = self.streams[row.sequence_id]
            assert followed.sequence_id == row.sequence_id
            assert followed.samples
            assert row.samples
            assert row.history is None
            assert row.num_completion == len(stream.produced) + 1 < stream.new.sampling.max_tokens
            assert row.start == len(stream.new.prompt) + len(stream.produced)
            assert len(row.token_ids) == 1
        if self.results:
            plan.follow(self.results[0].tokens)
        self.take_off(plan)

    def take_off(self, plan: StepPlan) -> None:
        ids = [row.sequence_id for row in plan.rows]
        assert len(set(ids)) == len(ids)
        assert set(ids) <= set(self.streams)
        assert all(row.token_ids for row in plan.rows)
        assert sum(len(row.token_ids) for row in plan.rows) <= self.config.step_tokens
        self.flights.append(plan)

    @precondition(lambda self: len(self.results) < len(self.flights))
    @rule(not_due=st.sets(st.integers(1, 12), max_size=3))
    def compute(self, not_due: set[int]) -> None:
        plan = self.flights[len(self.results)]
        is_followed = plan is not self.flights[-1]
        self.runner.not_due = set() if is_followed else not_due
        result = self.runner.execute(plan)
        if is_followed:
            self.flights[-1].follow(result.tokens)
        self.results.append(result)
        self.flipped -= {page for page, _ in plan.assigned}

    @precondition(lambda self: self.results)
    @rule()
    def apply(self) -> None:
        plan, result = self.flights.pop(0), self.results.pop(0)
        corrupt = {plan.rows[index].sequence_id for index in result.corrupt}
        corrupt &= set(self.streams)
        self.now += 0.05
        events = self.scheduler.apply(result, self.now)
        failed = {e.sequence_id for e in events if isinstance(e, SequenceFailed)}
        assert failed == corrupt, "corruption ends its sequence and no other"
        self.take(events)

    @rule(steps=st.integers(1, 25))
    def run_on(self, steps: int) -> None:
        for _ in range(steps):
            if not self.flights:
                self.plan()
            if not self.flights:
                return
            if not self.results:
                self.compute(set())
            self.apply()

    @rule(steps=st.integers(1, 25))
    def run_ahead(self, steps: int) -> None:
        """As the engine does it; stops beside two steps in flight, if it can."""
        self.plan_both()
        for _ in range(steps):
            if not self.flights:
                return
            if not self.results:
                self.compute(set())
            self.apply()
            self.plan_both()

    def plan_both(self) -> None:
        if not self.flights:
            self.plan()
        if self.can_follow():
            self.plan_ahead()

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.streams)))
        (event,) = self.scheduler.abort(sequence_id, self.now)
        assert isinstance(event, SequenceFinished)
        assert event.reason == "abort"
        self.take([event])
        assert self.scheduler.abort(sequence_id, self.now) == []

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), keep=st.integers(0, 8))
    def finish(self, data: st.DataObject, keep: int) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.streams)))
        produced = len(self.streams[sequence_id].produced)
        (event,) = self.scheduler.finish(sequence_id, keep, self.now)
        assert isinstance(event, SequenceFinished)
        assert event.reason == "stop"
        assert event.usage.completion_tokens == min(keep, produced)
        self.take([event])

    @rule(seconds=st.floats(0.0, 5.0))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        events = self.scheduler.expire(self.now)
        assert all(e.code == "deadline_exceeded" for e in events if isinstance(e, SequenceFailed))
        late = {i for i, s in self.streams.items() if (s.new.deadline or 1e9) <= self.now}
        assert {event.sequence_id for event in events} == late
        self.take(events)

    @rule(page=st.integers(0, 13))
    def flip_tag(self, page: int) -> None:
        """Some page is overwritten behind our back."""
        if page < self.config.num_pages:
            self.runner.tags[page] += 1000
            self.flipped.add(page)

    # --- what must hold -------------------------------------------------------------------------

    def take(self, events: list) -> None:
        for event in events:
            stream = self.streams[event.sequence_id]
            prompt, sampling = stream.new.prompt, stream.new.sampling
            match event:
                case SequenceStarted():
                    assert stream.started is None
                    assert not stream.produced
                    most = max_hit_pages(len(prompt), PAGE_SIZE) * PAGE_SIZE
                    if stream.new.fork_of is not None:
                        most = len(prompt) - 1
                    if sampling.prompt_logprobs is not None:
                        most = 0
                    assert 0 <= event.cached_tokens <= most
                    assert event.queue_s >= 0
                    stream.started = event
                case PromptAdvanced(num_computed=num_computed):
                    assert stream.started is not None
                    assert not stream.produced
                    assert 0 < num_computed < len(prompt)
                case PromptTold(start=start, entries=entries):
                    assert stream.started is not None
                    assert not stream.produced
                    assert start == len(prompt) - len(stream.untold), "told twice, or not at all"
                    for position, entry in enumerate(entries, start):
                        state, top = stream.untold.pop(0), sampling.prompt_logprobs
                        assert entry == likelihood(state, prompt[position], top or 0)
                case TokensProduced(tokens=tokens, logprobs=logprobs):
                    assert stream.started is not None
                    assert not stream.untold, "a token before the whole prompt was told of"
                    if sampling.logprobs is None:
                        assert logprobs == ()
                    else:
                        entry = likelihood(stream.state, tokens[0], sampling.logprobs)
                        assert logprobs == (entry,)
                    for token in tokens:
                        expected = choose(stream.state, sampling.seed)
                        assert token == expected, "another token than in a fresh run"
                        stream.state = mix(stream.state, token)
                        stream.produced.append(token)
                case SequenceFinished(reason=reason, usage=usage):
                    produced = stream.produced
                    total = len(prompt) + len(produced)
                    if reason == "length":
                        limit = self.config.context_tokens, self.config.num_pages * PAGE_SIZE
                        assert len(produced) == sampling.max_tokens or total == min(limit)
                    if reason != "stop":
                        assert usage.completion_tokens == len(produced)
                    self.over(event, stream)
                case SequenceFailed():
                    self.over(event, stream)

    def over(self, event: SequenceFinished | SequenceFailed, stream: Stream) -> None:
        assert event.usage.prompt_tokens == len(stream.new.prompt)
        if stream.started is not None:
            assert event.usage.cached_tokens == stream.started.cached_tokens
        sampling = stream.new.sampling
        for position, token in enumerate(stream.produced[:-1], 1):
            assert token not in sampling.stop_token_ids or position < sampling.min_tokens
        assert len(stream.produced) <= sampling.max_tokens
        self.runner.end(event.sequence_id)
        del self.streams[event.sequence_id]

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.invariants()
        load = self.scheduler.load()
        assert load.pages_free + load.pages_held + load.pages_cached == load.pages_total
        assert load.waiting_sequences + load.running_sequences == len(self.streams)
        assert self.runner.live == set(self.streams)

    @invariant()
    def a_step_in_flight_keeps_its_pages(self) -> None:
        pool = self.scheduler.pool
        for plan in self.flights:
            for row in plan.rows:
                assert [pool.generations[page] for page in row.page_table[0]] == row.generations[0]
                for page in row.page_table[0]:
                    assert any(pool.holds(page, kind) for kind in HoldKind)
                    assert page not in pool.idle
            for copy in plan.copies:
                assert pool.holds(copy.source, HoldKind.STEP)

    @invariant()
    def events_replayed_are_the_residency(self) -> None:
        first, events = self.scheduler.take_page_events()
        assert first == self.next_event
        self.next_event += len(events)
        for event in events:
            match event:
                case CacheCleared(tier=tier):
                    assert not any(held == tier for _, held in self.resident)
                case PageStored(page_key=key, tier=tier):
                    assert (key, tier) not in self.resident
                    assert len(key) == 16
                    self.resident.add((key, tier))
                case PageRemoved(page_key=key, tier=tier):
                    self.resident.remove((key, tier))
        on_device = [key for key, tier in self.resident if tier == "device"]
        assert len(on_device) == len(self.scheduler.cache)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.flights:
                self.plan()
            if not self.flights:
                if not self.settle():
                    break
                continue
            if not self.results:
                self.compute(set())
            self.apply()
            self.events_replayed_are_the_residency()
        assert not self.streams, "a sequence starved"
        self.books_agree()
        assert self.scheduler.pool.num_held == 0

    def settle(self) -> bool:
        """Let what sequences wait for happen; whether something did."""
        return False


SMALL = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_scheduler_machine() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=SMALL)


@pytest.mark.slow
def test_scheduler_machine_at_length() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(SMALL, max_examples=3000, stateful_step_count=80)
    )
