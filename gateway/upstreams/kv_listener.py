"""Listens to one server's KV events (ZMQ) and has lost ones replayed.

Messages are numbered. A number that is missing is asked for at the replay address; one that was
there before means that the server began anew. pyzmq comes with the extra `upstreams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from gateway.upstreams.kv_events import BlockBook
from gateway.upstreams.server import MAX_KEYS, Server
from gateway.upstreams.upstream import Upstream
from policies.contract.wire import CacheCleared, PageEvent, PageEvents
from policies.residency import Residency

REPLAY_S = 2.0  # for each message of a replay
AGAIN_AFTER_S = 1.0
MAX_QUEUED = 10_000
NUMBER_BYTES = 8

log = structlog.get_logger("kagari.upstreams")


class EventLog:
    """One server's messages in their order, whatever comes twice, late or not at all."""

    def __init__(self, server: Server, make_book: Callable[[], BlockBook]) -> None:
        self._server = server
        self._make_book = make_book
        self._book = make_book()
        self._heard = -1  # the last that came by itself
        self.expected = 0
        self._num_events = 0
        self.num_lost = 0

    def missing(self, number: int) -> int | None:
        """From which number on messages are missing before this one; None if none are."""
        if number <= self._heard:
            self._begin_anew()
        self._heard = number
        return self.expected if number > self.expected else None

    def take(self, number: int, payload: bytes) -> None:
        """Those that came already are skipped."""
        if number < self.expected:
            return
        if number > self.expected:
            self.num_lost += number - self.expected
            if self._server.told is not None:
                self._server.told.gaps += 1
        self.expected = number + 1
        try:
            self._tell(self._book.read(payload))
        except ValueError as error:
            log.warning("kv_events_refused", server=self._server.name, error=str(error)[:200])

    def _begin_anew(self) -> None:
        self._book, self.expected = self._make_book(), 0
        self._server.predicted.clear()
        self._tell([CacheCleared()])

    def _tell(self, events: list[PageEvent]) -> None:
        if self._server.told is None:
            self._server.told = Residency(MAX_KEYS)
        self._server.told.apply(PageEvents(0, self._num_events, events))
        self._num_events += len(events)


async def listening(upstream: Upstream, server: Server, address: str, replay: str | None) -> None:
    """Until cancelled."""
    import zmq
    import zmq.asyncio

    def book() -> BlockBook:
        assert upstream.text is not None, "the settings were checked"
        return BlockBook(upstream.text.page_size, lambda salt: _root(upstream, salt))

    await server.answered.wait()  # a page's key is of a model
    context = zmq.asyncio.Context()
    events = EventLog(server, book)
    try:
        while True:
            with context.socket(zmq.SUB) as socket:
                socket.set_hwm(MAX_QUEUED)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                try:
                    socket.connect(address)
                    await _listen(context, socket, events, replay)
                except zmq.ZMQError as error:
                    log.warning("kv_events_failed", server=server.name, error=str(error))
            await asyncio.sleep(AGAIN_AFTER_S)
    finally:
        context.destroy(linger=0)


async def _listen(context: Any, socket: Any, events: EventLog, replay: str | None) -> None:
    if replay is not None:
        await _replay(context, replay, events, 0)  # what was stored before we came
    while True:
        parts = await socket.recv_multipart()
        if len(parts) != 3:
            continue
        number = int.from_bytes(parts[1], "big")
        first = events.missing(number)
        if first is not None and replay is not None:
            await _replay(context, replay, events, first)
        events.take(number, parts[2])


async def _replay(context: Any, address: str, events: EventLog, first: int) -> None:
    """Take what the server still has from that number on."""
    import zmq

    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        await socket.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))
        while True:
            try:
                async with asyncio.timeout(REPLAY_S):
                    parts = await socket.recv_multipart()
            except TimeoutError:
                log.warning("kv_replay_failed", address=address)
                return
            if len(parts) != 3 or not parts[2]:  # the end is an empty one
                return
            events.take(int.from_bytes(parts[1], "big"), parts[2])


def _root(upstream: Upstream, cache_salt: str | None) -> bytes | None:
    """Of the chain of who sent this salt, for the first model that is served there: those beside it
    are adapters, whose events say so."""
    salt, model = upstream.salt_named(cache_salt), next(iter(upstream.names()), None)
    return None if salt is None or model is None else upstream.root(model, salt)
