"""Run a handler only while its client is there.

The server neither cancels a handler nor fails a send when the client goes; the one sign is an
`http.disconnect` from receive(). So one task reads receive() for as long as the handler runs, and
cancels the handler when the sign comes: its `finally` aborts the stream and settles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from gateway.api.body import ClientLeft
from gateway.api.exchange import Exchange


async def while_connected(exchange: Exchange, work: Awaitable[None]) -> None:
    """Raises what work raised, or ClientLeft. The body must have been read to its end.

    The handler runs in the caller's task: a task of its own cost a request some 10 µs.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    watcher = asyncio.create_task(_cancel_when_left(exchange, task))
    try:
        await work
    except asyncio.CancelledError:
        if not _has_cancelled(watcher) or task.cancelling() > 1:
            raise  # somebody else's, too
        raise ClientLeft from None
    finally:
        if _has_cancelled(watcher):
            task.uncancel()
        watcher.cancel()  # it ends in the loop's next turn, wherever it is


async def _cancel_when_left(exchange: Exchange, task: asyncio.Task[object]) -> bool:
    """Whether task was cancelled."""
    while (await exchange.receive())["type"] != "http.disconnect":
        continue
    if exchange.ending:  # the server sends the same sign when an answer is complete
        return False
    exchange.client_left = True
    task.cancel()
    return True


def _has_cancelled(watcher: asyncio.Task[bool]) -> bool:
    return watcher.done() and not watcher.cancelled() and watcher.result()
