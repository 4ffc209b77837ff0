"""Bounded waits on one timer: they end in time, lose nothing, and leave other cancelling alone."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.api.patience import Patience

pytestmark = pytest.mark.anyio


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def test_wait_ends_in_time_again_and_again() -> None:
    patience = Patience()
    for seconds in (0.05, 0.01, 0.08, 0.0, -1.0):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await patience.wait(never(), seconds)
        assert seconds - 0.005 <= time.monotonic() - began < max(seconds, 0) + 0.5
    patience.close()


async def test_timer_of_a_wait_that_is_over_disturbs_nobody() -> None:
    patience = Patience()
    assert await patience.wait(asyncio.sleep(0, "quick"), 0.02) == "quick"
    await asyncio.sleep(0.04)
    began = time.monotonic()
    assert await patience.wait(asyncio.sleep(0.05, "slow"), 1) == "slow"
    with pytest.raises(TimeoutError):  # shorter than what the timer was set to
        await patience.wait(never(), 0.03)
    assert time.monotonic() - began < 0.8
    patience.close()


async def test_wait_that_grows_longer_is_not_cut_by_the_earlier_timer() -> None:
    patience = Patience()
    await patience.wait(asyncio.sleep(0), 0.02)
    assert await patience.wait(asyncio.sleep(0.06, "kept"), 0.5) == "kept"
    patience.close()


async def test_cancelling_from_outside_stays_cancelling() -> None:
    started = asyncio.Event()

    async def work() -> None:
        patience = Patience()
        started.set()
        await patience.wait(never(), 5)

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_together_with_the_timer_is_not_swallowed() -> None:
    made: list[Patience] = []

    async def work() -> None:
        made.append(Patience())
        await made[0].wait(never(), 0.0)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    made[0]._ring()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
