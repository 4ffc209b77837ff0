"""A time limit means what asyncio.timeout means, also when a cancellation meets it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.api.time_limit import TimeLimit

pytestmark = pytest.mark.anyio


async def test_block_that_takes_too_long_ends_in_timeout_and_the_task_goes_on() -> None:
    with pytest.raises(TimeoutError), TimeLimit(0.01):
        await asyncio.sleep(10)
    await asyncio.sleep(0.02)  # no cancellation is left over
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_block_in_time_is_left_alone() -> None:
    with TimeLimit(0.02):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)


async def test_error_of_the_block_is_its_own() -> None:
    with pytest.raises(KeyError), TimeLimit(1):
        raise KeyError


async def test_moved_limit_ends_later() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def moved() -> None:
        with TimeLimit(0.02) as limit:
            limit.move(began + 0.1)
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        await moved()
    assert loop.time() - began > 0.08


async def test_cancellation_from_elsewhere_stays_one_even_at_the_limit() -> None:
    limit = TimeLimit(10)

    async def limited() -> None:
        with limit:
            await asyncio.sleep(10)

    for is_over in (False, True):
        task = asyncio.create_task(limited())
        await asyncio.sleep(0)
        if is_over:
            limit._end()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
