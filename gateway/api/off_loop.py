"""Work on many tokens that would hold the event loop: done in a thread, so that others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INLINE_TOKENS = 512  # about a millisecond of making texts and entries; a thread costs 0.1 ms


async def off_loop(num_tokens: int, work: Callable[[], T]) -> T:
    """work's result; it must not touch what the loop changes."""
    return work() if num_tokens <= INLINE_TOKENS else await asyncio.to_thread(work)
