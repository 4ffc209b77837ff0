"""A tier that hangs, fails or lies costs its caller a deadline, never a page or a thread more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.store.guard import Breaker, Call, Calls, Guard
from engine.store.tier import PageRecord, Status, TierStats

RECORD = PageRecord(b"k" * 32, b"p" * 32, 0, b"o" * 16, 1)
PATIENCE_S = 20.0  # for what must happen, on a busy machine


class HangingTier:
    """Holds one page of 8 bytes; each call waits while `hang` is set. `answer`: what it says."""

    name = "cluster"
    capacity_pages = 0

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.let_go.set()
        self.inside = threading.Semaphore(0)  # released by each call that came in
        self.answer = Status.OK
        self.calls = 0
        self.closed = threading.Event()
        self.fault: Exception | None = None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        self.let_go.clear()
        try:
            yield
        finally:
            self.let_go.set()

    def _come_in(self) -> None:
        self.calls += 1
        self.inside.release()
        self.let_go.wait()
        if self.fault is not None:
            raise self.fault

    def records(self) -> Iterable[PageRecord]:
        return (RECORD,)

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        self._come_in()
        return len(keys)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        self._come_in()
        for view in into:
            view[:] = b"payload!"
        return [self.answer] * len(keys)

    def put(
        self, records: Sequence[PageRecord], payloads: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        self._come_in()
        return [self.answer] * len(records)

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        self._come_in()
        return [self.answer] * len(keys)

    def purge(self, owner: bytes, deadline: float) -> Status:
        self._come_in()
        return self.answer

    def flush(self, deadline: float) -> Status:
        self._come_in()
        return self.answer

    def stats(self) -> TierStats:
        return TierStats(0, 1)

    def close(self) -> None:
        self.closed.set()


class Told:
    """What one caller was told, in order."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.threads: set[str] = set()
        self.done = threading.Event()
        self.quiet = threading.Event()

    def on_done(self, statuses: list[Status]) -> None:
        self.said.append(statuses)
        self.threads.add(threading.current_thread().name)
        self.done.set()

    def on_quiet(self) -> None:
        self.said.append("quiet")
        self.threads.add(threading.current_thread().name)
        self.quiet.set()


@contextmanager
def guarded(tier: HangingTier, **settings: float) -> Iterator[Guard]:
    guard = Guard(tier, **settings)  # type: ignore[arg-type]
    try:
        yield guard
    finally:
        tier.let_go.set()
        guard.close()


def ask(guard: Guard, seconds: float, view: memoryview | None = None) -> Told:
    told = Told()
    guard.submit_get(
        [RECORD.key],
        [memoryview(bytearray(8)) if view is None else view],
        time.monotonic() + seconds,
        on_done=told.on_done,
        on_quiet=told.on_quiet,
    )
    return told


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_get_is_done_and_then_quiet_on_a_thread_of_the_guard() -> None:
    tier, view = HangingTier(), memoryview(bytearray(8))
    with guarded(tier) as guard:
        told = ask(guard, PATIENCE_S, view)
        assert told.quiet.wait(PATIENCE_S)
    assert told.said == [[Status.OK], "quiet"]
    assert bytes(view) == b"payload!"
    assert all(name.startswith("cluster-tier-") for name in told.threads)


def test_a_hung_get_times_out_at_its_deadline_and_its_view_stays_quarantined() -> None:
    tier, view = HangingTier(), memoryview(bytearray(8))
    with guarded(tier) as guard, tier.hanging():
        begun = time.monotonic()
        told = ask(guard, 0.1, view)
        assert told.done.wait(PATIENCE_S)
        assert time.monotonic() - begun >= 0.1
        assert told.said == [[Status.TIMEOUT]]
        assert guard.quarantined == 1
        assert not told.quiet.wait(0.05)
        tier.let_go.set()
        assert told.quiet.wait(PATIENCE_S)
        assert bytes(view) == b"payload!"  # written late: what the quarantine is for
        assert guard.quarantined == 0
    assert told.said == [[Status.TIMEOUT], "quiet"]


def test_calls_beyond_the_bound_are_refused_at_once_and_writes_leave_a_thread_for_reads() -> None:
    tier = HangingTier()
    with guarded(tier, max_in_flight=4) as guard, tier.hanging():
        puts = [Told() for _ in range(3)]
        for told in puts:
            guard.submit_put(
                [RECORD],
                [memoryview(b"payload!")],
                time.monotonic() + PATIENCE_S,
                on_done=told.on_done,
                on_quiet=told.on_quiet,
            )
        gets = [ask(guard, PATIENCE_S) for _ in range(3)]
        assert puts[2].quiet.wait(PATIENCE_S)
        assert gets[2].quiet.wait(PATIENCE_S)
        refused = [[Status.UNAVAILABLE], "quiet"]
        assert [told.said for told in puts] == [[], [], refused]
        assert [told.said for told in gets] == [[], [], refused]
        tier.let_go.set()
        for told in (*puts[:2], *gets[:2]):
            assert told.quiet.wait(PATIENCE_S)
            assert told.said == [[Status.OK], "quiet"]
    assert tier.calls == 4


@pytest.mark.parametrize("failure", [Status.TIMEOUT, Status.UNAVAILABLE])
def test_the_breaker_opens_after_failures_in_a_row_and_one_probe_closes_it(
    failure: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, pause_s, ahead_s = HangingTier(), 1000.0, 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr("engine.store.guard.time", clock)
    with guarded(tier, failures_to_open=3, pause_s=pause_s) as guard:
        deadline = time.monotonic() + 2 * pause_s
        answers = (failure, failure, Status.MISS, failure, failure, failure)
        for tier.answer in answers:
            assert guard.state == "ok"
            assert guard.remove([RECORD.key], deadline) == [tier.answer]
        assert guard.state == "broken"
        tier.answer = Status.OK
        assert guard.remove([RECORD.key], deadline) == [Status.UNAVAILABLE]
        assert tier.calls == len(answers)
        ahead_s = pause_s
        with tier.hanging():
            probe = ask(guard, 2 * pause_s)
            assert tier.inside.acquire(timeout=PATIENCE_S)
            assert guard.remove([RECORD.key], deadline) == [Status.UNAVAILABLE]
            assert guard.state == "broken"
        assert probe.quiet.wait(PATIENCE_S)
        assert guard.state == "ok"
        assert guard.remove([RECORD.key], deadline) == [Status.OK]


def test_blocking_forms_keep_the_contract_while_the_tier_hangs() -> None:
    tier, view = HangingTier(), memoryview(bytearray(8))
    with guarded(tier, failures_to_open=99) as guard:
        with tier.hanging():
            soon_s = 0.3  # late enough for the tier to be asked
            assert guard.get([RECORD.key], [view], time.monotonic() + soon_s) == [Status.TIMEOUT]
            assert guard.lookup([RECORD.key], time.monotonic() + soon_s) == 0
            assert guard.put([RECORD], [view], time.monotonic() + soon_s) == [Status.TIMEOUT]
            assert guard.quarantined == 3
        until(lambda: guard.quarantined == 0)
        assert bytes(view) == bytes(8)  # the late answer went to the guard's copy
        later = time.monotonic() + PATIENCE_S
        assert guard.get([RECORD.key], [view], later) == [Status.OK]
        assert bytes(view) == b"payload!"
        assert guard.lookup([RECORD.key], later) == 1
        assert guard.purge(RECORD.owner, later) is Status.OK
        assert guard.flush(later) is Status.OK
        assert guard.stats().timeouts == 3  # the lookup too


def test_a_deadline_in_the_past_never_reaches_the_tier() -> None:
    tier = HangingTier()
    with guarded(tier) as guard:
        told = ask(guard, -1.0)
        assert told.quiet.wait(PATIENCE_S)
    assert told.said == [[Status.TIMEOUT], "quiet"]
    assert tier.calls == 0


def test_closing_answers_what_hangs_within_its_bound_and_the_tier_is_closed_by_the_last() -> None:
    tier = HangingTier()
    guard = Guard(tier, close_within_s=0.2)
    with tier.hanging():
        told = ask(guard, 60.0)
        assert tier.inside.acquire(timeout=PATIENCE_S)
        begun = time.monotonic()
        guard.close()
        assert time.monotonic() - begun < PATIENCE_S / 2
        assert told.done.wait(PATIENCE_S)
        assert told.said == [[Status.UNAVAILABLE]]
        assert not tier.closed.is_set()
        late = ask(guard, 60.0)
        assert late.said == [[Status.UNAVAILABLE], "quiet"]
    assert told.quiet.wait(PATIENCE_S)
    assert tier.closed.wait(PATIENCE_S)
    guard.close()
    until(lambda: not any(t.name.startswith("cluster-tier-") for t in threading.enumerate()))


def test_a_tier_and_a_caller_that_raise_are_shown_and_cost_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(str(args.exc_value)))
    tier = HangingTier()
    with guarded(tier, max_in_flight=1, failures_to_open=99) as guard:
        tier.fault = RuntimeError("no store")
        later = time.monotonic() + PATIENCE_S
        assert guard.remove([RECORD.key], later) == [Status.UNAVAILABLE]
        tier.fault = None
        told = Told()

        def on_done(statuses: list[Status]) -> None:
            raise RuntimeError("no caller")

        guard.submit_remove([RECORD.key], later, on_done=on_done, on_quiet=told.on_quiet)
        assert told.quiet.wait(PATIENCE_S)
        assert guard.remove([RECORD.key], later) == [Status.OK]
    assert shown == ["no store", "no caller"]


class CallsMachine(RuleBasedStateMachine):
    """Any order of submissions, returns, deadlines: as Guard's threads may interleave them."""

    MAX_IN_FLIGHT = 3
    MAX_WRITES = 1
    FAILURES = 2
    PAUSE_S = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls(
            Breaker(self.FAILURES, self.PAUSE_S),
            max_in_flight=self.MAX_IN_FLIGHT,
            max_writes=self.MAX_WRITES,
        )
        self.now = 0.0
        self.inside: list[Call] = []  # what the tier is at
        self.answers: dict[int, list[list[Status]]] = {}  # by call, as its caller was told
        self.every: list[Call] = []

    def hear(self, call: Call) -> None:
        assert call.answer is not None
        self.answers[id(call)].append(call.answer)

    @rule(writes=st.booleans(), lasts=st.floats(-1.0, 10.0))
    def submit(self, writes: bool, lasts: float) -> None:
        call = Call(lambda: [], 2, self.now + lasts, lambda statuses: None, lambda: None, writes)
        self.every.append(call)
        self.answers[id(call)] = []
        broken = self.calls.breaker.state == "broken"
        if self.calls.submit(call, self.now):
            assert lasts > 0
            assert not call.writes or not any(other.writes for other in self.inside)
            assert call.probe == broken
            if broken:
                assert not any(o.probe and o.answer is None for o in self.inside)
            self.inside.append(call)
        else:
            self.hear(call)
            assert call.returned

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), status=st.sampled_from(Status))
    def end(self, data: st.DataObject, status: Status) -> None:
        call = data.draw(st.sampled_from(self.inside))
        self.inside.remove(call)
        answered = call.answer is not None
        state = self.calls.breaker.state
        self.calls.end(call, [Status.OK, status], self.now)
        if answered:
            assert self.calls.breaker.state == state  # a late answer tells nothing
        else:
            assert call.answer == [Status.OK, status]
            self.hear(call)
            if call.probe:
                failed = status in (Status.TIMEOUT, Status.UNAVAILABLE)
                assert self.calls.breaker.state == ("broken" if failed else "ok")

    @rule(seconds=st.floats(0.0, 6.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for call in self.calls.expire(self.now):
            assert call.deadline <= self.now
            assert call.answer == [Status.TIMEOUT] * 2
            self.hear(call)

    @rule()
    def a_broken_breaker_opens_for_a_probe_after_its_pause(self) -> None:
        if self.calls.breaker.state == "ok":
            return
        self.pass_time(10.0)  # every deadline: a probe in flight has failed by now
        self.pass_time(self.PAUSE_S)
        assert self.calls.breaker.admits(self.now)

    @invariant()
    def nobody_is_told_twice_and_nobody_waits_beyond_the_deadline(self) -> None:
        for call in self.every:
            told = self.answers[id(call)]
            assert len(told) == (call.answer is not None)
            assert told or call.deadline > self.now

    @invariant()
    def the_bounds_hold(self) -> None:
        assert len(self.calls) == len(self.inside) <= self.MAX_IN_FLIGHT
        assert self.calls.quarantined == sum(call.answer is not None for call in self.inside)
        waiting = [call.deadline for call in self.inside if call.answer is None]
        assert self.calls.next_deadline == min(waiting, default=None)

    def teardown(self) -> None:
        for call in self.calls.abandon():
            self.hear(call)
        assert all(len(told) == 1 for told in self.answers.values())


TestCalls = CallsMachine.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(3))
def test_many_callers_at_once_each_hear_once_and_in_order(seed: int) -> None:
    """Threads for real: short deadlines against a tier that stalls now and then."""
    tier = HangingTier()
    told: list[Told] = []
    with guarded(tier, max_in_flight=3, failures_to_open=5, pause_s=0.01) as guard:

        def call(worker: int) -> None:
            for at in range(60):
                told.append(ask(guard, 0.001 * ((worker + at + seed) % 5)))
                time.sleep(0.0005)

        callers = [threading.Thread(target=call, args=(worker,)) for worker in range(4)]
        for caller in callers:
            caller.start()
        while any(caller.is_alive() for caller in callers):
            tier.let_go.clear()
            time.sleep(0.003)
            tier.let_go.set()
            time.sleep(0.003)
        for one in told:
            assert one.quiet.wait(PATIENCE_S)
    assert len(told) == 240
    assert all(len(one.said) == 2 and one.said[1] == "quiet" for one in told)
    assert {one.said[0][0] for one in told} >= {Status.OK, Status.TIMEOUT}  # type: ignore[index]
