"""The rate that an engine announces at its start."""

import time

import pytest

from engine.config import ScheduleConfig
from engine.schedule.plan import StepPlan, StepResult
from engine.warmup import measure_prefill, work_clock
from tests.engine.arena_runner import ArenaRunner


class PacedRunner(ArenaRunner):
    """Each step takes the next of these times, on a clock of its own."""

    def __init__(self, *paces_s: float) -> None:
        super().__init__(num_pages=8, page_size=16)
        self.paces_s = list(paces_s)
        self.now = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        self.now += self.paces_s.pop(0)
        return super().execute(plan)


@pytest.mark.parametrize(
    ("step_tokens", "paces_s", "rate", "rounds"),
    [
        (64, (0.05, 0.02, 0.08, 0.01), 64 / 0.02, 3),  # short steps: the best of three
        (64, (0.5, 0.1), 64 / 0.5, 1),  # a start does not wait for a slow engine to be sure
        (64, (0.08, 0.05, 0.01), 64 / 0.05, 2),
        (100, (0.02, 0.02, 0.03, 0.05, 0.01), 100 / 0.02, 4),  # 64 tokens, then the whole step
        (512, (0.02, 0.03, 0.2), 127 / 0.03, 3),  # no more than the pool holds
    ],
)
def test_measuring_takes_no_longer_than_it_must(
    step_tokens: int, paces_s: tuple[float, ...], rate: float, rounds: int
) -> None:
    runner = PacedRunner(*paces_s)
    limits = ScheduleConfig(num_pages=8, page_size=16, context_tokens=128, step_tokens=step_tokens)
    assert measure_prefill(runner, limits, lambda: runner.now) == pytest.approx(rate)
    assert len(paces_s) - len(runner.paces_s) == rounds


def test_waiting_for_a_core_is_no_work() -> None:
    """Measured on the wall, an engine in a busy moment looked half as fast as its twin."""
    clock = work_clock(2)
    begun = clock()
    time.sleep(0.2)
    assert clock() - begun < 0.1
    worked = time.process_time()
    while time.process_time() - worked < 0.1:
        pass
    assert clock() - begun == pytest.approx(0.05, abs=0.04)
