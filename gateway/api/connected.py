"""Run a handler only while its client is there.

The server neither cancels a handler nor fails a send when the client goes; the one sign is an
`http.disconnect` from receive(). So one task reads receive() for as long as the handler runs, and
the handler is cancelled when the sign comes: its `finally` aborts the stream and settles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gateway.api.body import ClientLeft
from gateway.api.exchange import Exchange


async def while_connected(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Raises what work raised, or ClientLeft. The body must have been read to its end."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(exchange))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and exchange.ending:
            # The server sends the same sign when an answer is complete.
            await asyncio.wait((task,))
        exchange.client_left = exchange.client_left or not task.done()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.wait((task, watcher))
    if exchange.client_left and task.cancelled():
        raise ClientLeft
    task.result()


async def _disconnect(exchange: Exchange) -> None:
    while (await exchange.receive())["type"] != "http.disconnect":
        continue
