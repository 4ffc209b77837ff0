"""One step after the other: plan, compute, apply; the next one is under way where the runner can.

    N     plan ─▶ launch ┐             ┌▶ collect ─▶ apply, its events go out
    N+1                  └▶ plan_ahead ┘       └▶ launch ┐             ┌▶ collect ─▶ apply …
    N+2                                                  └▶ plan_ahead ┘       └▶ launch …

So whatever the engine does between two collects happens beside a step that computes.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.schedule.events import SequenceEvent
from engine.schedule.plan import AheadRunner, Runner
from engine.schedule.scheduler import Scheduler


class Stepper:
    """A scheduler and its runner in lockstep; with overlap the runner is one step ahead of it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool,
        clock: Callable[[], float],
        planned: Callable[[], None] = lambda: None,
    ) -> None:
        """planned: called before a step is computed, for what its plan has ordered."""
        self._planned = planned
        self._scheduler = scheduler
        self._runner = runner
        self._ahead: AheadRunner | None = None
        if overlap and isinstance(runner, AheadRunner) and runner.runs_ahead:
            self._ahead = runner
        self._clock = clock
        self._is_computing = False

    @property
    def is_computing(self) -> bool:
        """A step is under way, whose result the next step() takes."""
        return self._is_computing

    def step(self) -> list[SequenceEvent] | None:
        """The events of one step, or None when nothing can be computed now.

        Whatever the runner raises passes through, and the steps under way are lost.
        """
        scheduler, ahead = self._scheduler, self._ahead
        if not self._is_computing:
            plan = scheduler.plan(self._clock())
            if plan is None:
                return None
            self._planned()
            if ahead is None:
                return scheduler.apply(self._runner.execute(plan), self._clock())
            ahead.launch(plan)
        assert ahead is not None
        self._is_computing = False
        following = scheduler.plan_ahead(self._clock())
        result = ahead.collect(following)
        self._is_computing = following is not None
        return scheduler.apply(result, self._clock())

    def close(self) -> None:
        """Wait for the step under way; nobody wants its result any more."""
        if self._is_computing:
            self._is_computing = False
            assert self._ahead is not None
            self._ahead.collect(None)
