"""The stall guard: a send that hangs ends the block, slow producers and quick sends do not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from gateway.api.stall import StallGuard

LIMIT_S = 0.08


async def answer(producing: Awaitable[None], sending: Awaitable[None]) -> None:
    async with StallGuard(LIMIT_S) as guard:
        await producing
        await guard.send(sending)


async def fail() -> None:
    raise KeyError


@pytest.mark.anyio
async def test_a_send_that_hangs_ends_the_block_in_time() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        await answer(asyncio.sleep(LIMIT_S * 0.7), asyncio.sleep(30))
    assert LIMIT_S * 1.6 < loop.time() - began < 5


@pytest.mark.anyio
async def test_quick_sends_and_a_slow_producer_are_no_stall() -> None:
    async with StallGuard(LIMIT_S) as guard:
        for _ in range(4):
            await guard.send(asyncio.sleep(0))
            await asyncio.sleep(LIMIT_S * 0.9)


@pytest.mark.anyio
async def test_what_the_block_raises_passes_through() -> None:
    with pytest.raises(KeyError):
        await answer(asyncio.sleep(0), fail())
    await asyncio.sleep(LIMIT_S * 1.5)  # no timer is left that could cancel us
