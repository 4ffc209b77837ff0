"""Makes a tier that may hang, fail or be gone safe to ask: deadlines, quarantine, circuit breaker.

A tier's call may outlive its deadline by half a minute (a stopped Mooncake owner). So it runs on a
thread of the guard, its caller is told TIMEOUT when the deadline passes, and the views it was given
stay *quarantined* until the tier has really returned: then, and only then, they are quiet again.
A tier that fails time after time is left alone for a while, and asked again by one call.

Calls and Breaker hold the rules and take the time as an argument; Guard adds threads and a clock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.store.tier import PageRecord, Status, Tier, TierStats
from policies.contract.wire import Tier as TierName

OnDone = Callable[[list[Status]], None]
OnQuiet = Callable[[], None]
FAILURES = frozenset({Status.TIMEOUT, Status.UNAVAILABLE})


class Breaker:
    """ok → broken after failures_to_open calls failed in a row; when pause_s has passed one call
    may probe: its success closes the breaker, its failure begins another pause."""

    def __init__(self, failures_to_open: int, pause_s: float) -> None:
        self._failures_to_open = failures_to_open
        self._pause_s = pause_s
        self._failures = 0
        self._closed_until: float | None = None  # None: ok
        self._probing = False

    @property
    def state(self) -> Literal["ok", "broken"]:
        return "ok" if self._closed_until is None else "broken"

    def admits(self, now: float) -> bool:
        return self._closed_until is None or (now >= self._closed_until and not self._probing)

    def begin(self) -> bool:
        """An admitted call begins; whether it is the probe."""
        self._probing = self._closed_until is not None
        return self._probing

    def settle(self, *, probe: bool, failed: bool, now: float) -> None:
        if probe:
            self._probing = False
        elif self._closed_until is not None:
            return  # begun before the breaker opened: it tells nothing new
        self._failures = self._failures + 1 if failed else 0
        if not failed:
            self._closed_until = None
        elif probe or self._failures >= self._failures_to_open:
            self._closed_until = now + self._pause_s


@dataclass(slots=True, eq=False)
class Call:
    """One call. Its caller is told once how it ended, then once that its views are quiet."""

    work: Callable[[], list[Status]]
    size: int  # statuses it answers with
    deadline: float
    on_done: OnDone
    on_quiet: OnQuiet
    writes: bool  # puts, removes …: whatever is not a read
    probe: bool = False
    answer: list[Status] | None = None  # what its caller is told
    told: bool = False  # on_done has returned
    returned: bool = False  # the tier is out of it


class Calls:
    """The calls in flight and what each is still owed. Not thread-safe: Guard locks."""

    def __init__(self, breaker: Breaker, *, max_in_flight: int, max_writes: int) -> None:
        self.breaker = breaker
        self.timeouts = 0  # pages, as their callers saw it
        self.unavailable = 0
        self._max_in_flight = max_in_flight
        self._max_writes = max_writes
        self._in_flight: list[Call] = []  # admitted and not yet returned: each has a thread

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def quarantined(self) -> int:
        """Calls that are answered while the tier may still write."""
        return sum(call.answer is not None for call in self._in_flight)

    @property
    def next_deadline(self) -> float | None:
        return min((call.deadline for call in self._in_flight if call.answer is None), default=None)

    def submit(self, call: Call, now: float) -> bool:
        """Whether the call may go to the tier; if not it is answered, and the tier out of it."""
        writes = sum(other.writes for other in self._in_flight)
        if call.deadline <= now:
            self.refuse(call, Status.TIMEOUT)
        elif (
            len(self._in_flight) >= self._max_in_flight
            or (call.writes and writes >= self._max_writes)
            or not self.breaker.admits(now)
        ):
            self.refuse(call, Status.UNAVAILABLE)
        else:
            call.probe = self.breaker.begin()
            self._in_flight.append(call)
        return not call.returned

    def refuse(self, call: Call, status: Status) -> None:
        self._answer(call, [status] * call.size)
        call.returned = True

    def expire(self, now: float) -> list[Call]:
        """Those to be told TIMEOUT now."""
        late = [call for call in self._in_flight if call.answer is None and call.deadline <= now]
        for call in late:
            self._answer(call, [Status.TIMEOUT] * call.size)
            self.breaker.settle(probe=call.probe, failed=True, now=now)
        return late

    def abandon(self) -> list[Call]:
        """Those to be told UNAVAILABLE now, because nobody will ask the tier again."""
        left = [call for call in self._in_flight if call.answer is None]
        for call in left:
            self._answer(call, [Status.UNAVAILABLE] * call.size)
        return left

    def end(self, call: Call, statuses: list[Status] | None, now: float) -> None:
        """The tier is out of the call; None: it was never asked, as the call had its answer."""
        self._in_flight.remove(call)
        call.returned = True
        if call.answer is None:
            assert statuses is not None
            self._answer(call, statuses)
            self.breaker.settle(probe=call.probe, failed=not FAILURES.isdisjoint(statuses), now=now)

    def _answer(self, call: Call, answer: list[Status]) -> None:
        call.answer = answer
        self.timeouts += answer.count(Status.TIMEOUT)
        self.unavailable += answer.count(Status.UNAVAILABLE)


class Guard:
    """A tier behind its own threads. submit_* never block; their callbacks run on those threads,
    so they must be quick, and may submit again.

    on_done is called exactly once, by the deadline at the latest. on_quiet is called exactly once
    after it, whatever the answer was: from then on the tier no longer touches the call's views or
    payloads. At most max_in_flight calls run, hung ones included; writes take at most half of
    these, so that a read finds a thread. Whatever is more is UNAVAILABLE at once. A closed guard
    answers UNAVAILABLE from the caller's own thread.

    The blocking forms make a Guard a Tier: they copy, so that a hung backend never holds the
    caller's views. They are for tools and tests; the engine submits.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        max_in_flight: int = 4,
        failures_to_open: int = 3,
        pause_s: float = 5.0,
        close_within_s: float = 2.0,
    ) -> None:
        self._tier = tier
        self._close_within_s = close_within_s
        self._calls = Calls(
            Breaker(failures_to_open, pause_s),
            max_in_flight=max_in_flight,
            max_writes=max(1, max_in_flight // 2),
        )
        lock = threading.Lock()
        self._work_due = threading.Condition(lock)  # the lock guards all that follows
        self._timer_due = threading.Condition(lock)
        self._waiting: deque[Call] = deque()  # admitted, so at most max_in_flight
        self._refused: deque[Call] = deque()  # to be told so by the timer; each has a caller
        self._closing = False
        self._workers_left = max_in_flight
        # Daemons: one that hangs in the tier must not keep the process from ending.
        self._threads = [
            threading.Thread(target=run, name=f"{tier.name}-tier-{name}", daemon=True)
            for name, run in (
                ("timer", self._keep_time),
                *((str(at), self._work) for at in range(max_in_flight)),
            )
        ]
        for thread in self._threads:
            thread.start()

    # --- what does not block --------------------------------------------------------------------

    def submit_get(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        deadline: float,
        *,
        on_done: OnDone,
        on_quiet: OnQuiet,
    ) -> None:
        self._submit(
            lambda: self._tier.get(keys, into, deadline),
            len(keys),
            deadline,
            on_done=on_done,
            on_quiet=on_quiet,
            writes=False,
        )

    def submit_put(
        self,
        records: Sequence[PageRecord],
        payloads: Sequence[memoryview],
        deadline: float,
        *,
        on_done: OnDone,
        on_quiet: OnQuiet,
    ) -> None:
        self._submit(
            lambda: self._tier.put(records, payloads, deadline),
            len(records),
            deadline,
            on_done=on_done,
            on_quiet=on_quiet,
        )

    def submit_remove(
        self, keys: Sequence[bytes], deadline: float, *, on_done: OnDone, on_quiet: OnQuiet
    ) -> None:
        self._submit(
            lambda: self._tier.remove(keys, deadline),
            len(keys),
            deadline,
            on_done=on_done,
            on_quiet=on_quiet,
        )

    def submit_purge(
        self, owner: bytes, deadline: float, *, on_done: OnDone, on_quiet: OnQuiet
    ) -> None:
        self._submit(
            lambda: [self._tier.purge(owner, deadline)],
            1,
            deadline,
            on_done=on_done,
            on_quiet=on_quiet,
        )

    def submit_flush(self, deadline: float, *, on_done: OnDone, on_quiet: OnQuiet) -> None:
        self._submit(
            lambda: [self._tier.flush(deadline)],
            1,
            deadline,
            on_done=on_done,
            on_quiet=on_quiet,
        )

    @property
    def state(self) -> Literal["ok", "broken"]:
        """broken: nothing but a probe now and then reaches the tier."""
        with self._work_due:
            return self._calls.breaker.state

    @property
    def quarantined(self) -> int:
        """Calls that were answered while the tier may still write into their views."""
        with self._work_due:
            return self._calls.quarantined

    # --- a Tier ---------------------------------------------------------------------------------

    @property
    def name(self) -> TierName:
        return self._tier.name

    @property
    def capacity_pages(self) -> int:
        return self._tier.capacity_pages

    def records(self) -> Iterable[PageRecord]:
        return self._tier.records()

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        found: list[int] = []

        def ask() -> list[Status]:
            found.append(self._tier.lookup(keys, deadline))
            return [Status.OK]

        return found[0] if self._wait(ask, 1, deadline, writes=False) == [Status.OK] else 0

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        copies = [memoryview(bytearray(view.nbytes)) for view in into]
        statuses = self._wait(
            lambda: self._tier.get(keys, copies, deadline), len(keys), deadline, writes=False
        )
        for view, copy, status in zip(into, copies, statuses, strict=True):
            if status is Status.OK:
                view[:] = copy
        return statuses

    def put(
        self, records: Sequence[PageRecord], payloads: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        copies = [memoryview(bytes(payload)) for payload in payloads]
        return self._wait(lambda: self._tier.put(records, copies, deadline), len(records), deadline)

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        return self._wait(lambda: self._tier.remove(keys, deadline), len(keys), deadline)

    def purge(self, owner: bytes, deadline: float) -> Status:
        return self._wait(lambda: [self._tier.purge(owner, deadline)], 1, deadline)[0]

    def flush(self, deadline: float) -> Status:
        return self._wait(lambda: [self._tier.flush(deadline)], 1, deadline)[0]

    def stats(self) -> TierStats:
        """The tier's own; timeouts and unavailable as the guard's callers saw them."""
        stats = self._tier.stats()
        with self._work_due:
            return replace(
                stats, timeouts=self._calls.timeouts, unavailable=self._calls.unavailable
            )

    def close(self) -> None:
        """Answer what is in flight UNAVAILABLE, then close the tier: within close_within_s, or when
        its last hung call returns, and then on that call's thread."""
        until = time.monotonic() + self._close_within_s
        with self._work_due:
            if not self._closing:
                self._closing = True
                self._refused.extend(self._calls.abandon())
                self._work_due.notify_all()
                self._timer_due.notify()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    # --- inside ---------------------------------------------------------------------------------

    def _submit(
        self,
        work: Callable[[], list[Status]],
        size: int,
        deadline: float,
        *,
        on_done: OnDone,
        on_quiet: OnQuiet,
        writes: bool = True,
    ) -> None:
        call = Call(work, size, deadline, on_done, on_quiet, writes)
        with self._work_due:
            if closed := self._closing:
                self._calls.refuse(call, Status.UNAVAILABLE)
            elif self._calls.submit(call, time.monotonic()):
                self._waiting.append(call)
                self._work_due.notify()
                if self._calls.next_deadline == deadline:
                    self._timer_due.notify()
            else:
                self._refused.append(call)
                self._timer_due.notify()
        if closed:
            self._tell(call)

    def _wait(
        self, work: Callable[[], list[Status]], size: int, deadline: float, *, writes: bool = True
    ) -> list[Status]:
        """The blocking form. Raises the ValueError that the tier raises for a caller's mistake."""
        done = threading.Event()
        answer: list[Status] = []
        mistakes: list[ValueError] = []

        def ask() -> list[Status]:
            try:
                return work()
            except ValueError as error:
                mistakes.append(error)
                return [Status.STALE] * size

        def tell(statuses: list[Status]) -> None:
            answer.extend(statuses)
            done.set()

        self._submit(ask, size, deadline, on_done=tell, on_quiet=_nothing, writes=writes)
        done.wait()  # the timer ends it at the deadline
        if mistakes:
            raise mistakes[0]
        return answer

    def _work(self) -> None:
        while True:
            with self._work_due:
                self._work_due.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                call = self._waiting.popleft()
                overdue = call.answer is not None
            statuses = None if overdue else _ask(call)
            with self._work_due:
                self._calls.end(call, statuses, time.monotonic())
                # Somebody else answered: they tell it, and that it is quiet if they are not done.
                answered = overdue or call.answer is not statuses
                quiet = answered and call.told
            if not answered:
                self._tell(call)
            elif quiet:
                _run(call.on_quiet)
        with self._work_due:
            self._workers_left -= 1
            last = not self._workers_left
        if last:
            self._tier.close()

    def _keep_time(self) -> None:
        while True:
            with self._work_due:
                now = time.monotonic()
                due = [*self._refused, *self._calls.expire(now)]
                self._refused.clear()
                if not due:
                    if self._closing:
                        return
                    deadline = self._calls.next_deadline
                    self._timer_due.wait(
                        None if deadline is None else min(deadline - now, threading.TIMEOUT_MAX)
                    )
            for call in due:
                self._tell(call)

    def _tell(self, call: Call) -> None:
        """Tell the caller its answer, and that the call is quiet if the tier is out of it; if not,
        the worker that comes back from the tier does."""
        answer = call.answer
        assert answer is not None
        _run(lambda: call.on_done(answer))
        with self._work_due:
            call.told = True
            quiet = call.returned
        if quiet:
            _run(call.on_quiet)


def _nothing() -> None: ...


def _ask(call: Call) -> list[Status]:
    """What the tier says; a tier that breaks its promise not to raise is not there."""
    statuses: list[Status] = []

    def ask() -> None:
        statuses.extend(call.work())
        assert len(statuses) == call.size, "a tier answers with a status for each key"

    return statuses if _run(ask) else [Status.UNAVAILABLE] * call.size


def _run(step: Callable[[], None]) -> bool:
    """Whether it ended well; an error in it is shown, and does not end the thread."""
    try:
        step()
    except Exception:
        exc_type, exc, traceback = sys.exc_info()
        assert exc_type is not None
        threading.excepthook(
            threading.ExceptHookArgs((exc_type, exc, traceback, threading.current_thread()))
        )
        return False
    return True
