"""The rate that an engine announces at its start."""

import time

import pytest

from engine.warmup import work_clock


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
