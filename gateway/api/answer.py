"""A run's answer on its way to the client, streamed or whole, settled exactly once.

Before the first byte a failure is a status; after it, a terminal error event. Headers are held back
until something is known or the first heartbeat is due, so most failures still become a status.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Protocol

from gateway.api.body import ClientLeft
from gateway.api.choice import Turn
from gateway.api.completion_run import CompletionRun
from gateway.api.exchange import Exchange
from gateway.api.logprobs import TokenBytes
from gateway.api.off_loop import INLINE_TOKENS, off_loop
from gateway.api.sampling_request import SamplingRequest
from gateway.api.sse import (
    DONE,
    HEARTBEAT,
    STREAM_HEADERS,
    ChatChunks,
    TextChunks,
    error_event,
)
from gateway.api.stall import StallGuard
from gateway.api.time_limit import TimeLimit
from gateway.config import StreamConfig
from gateway.errors import GatewayError, fault
from gateway.services import Services
from policies.contract.wire import Usage


class Dialect(Protocol):
    """How one route writes turns. `opening` comes in front of a choice's first turn."""

    def opening(self, index: int) -> bytes: ...
    def turn(self, turn: Turn) -> bytes: ...
    def usage(self, usage: Usage) -> bytes: ...
    def whole(self, turns: Sequence[Sequence[Turn]], usage: Usage) -> bytes:
        """The one body of an answer that is not streamed; turns by choice."""


class Asked(Protocol):
    """What both routes' requests say of the answer's form."""

    @property
    def model(self) -> str: ...
    @property
    def stream(self) -> bool: ...
    @property
    def include_usage(self) -> bool: ...
    @property
    def include_cost(self) -> bool: ...
    @property
    def sampling(self) -> SamplingRequest: ...


async def answer(
    services: Services,
    exchange: Exchange,
    run: CompletionRun,
    request: Asked,
    make_dialect: type[ChatChunks] | type[TextChunks],
    *,
    token_bytes: TokenBytes,
) -> None:
    """Ends and settles the run, whatever happens. Raises GatewayError before the first byte."""
    with settled(exchange, run):
        dialect: Dialect = make_dialect(
            completion_id=f"{make_dialect.ID_PREFIX}-{exchange.request_id}",
            created=run.created,
            model=request.model,
            include_usage=request.include_usage,
            rates=run.rates if request.include_cost else None,
            choices=len(run.choices),
            token_bytes=None if request.sampling.logprobs is None else token_bytes,
        )
        if request.stream:
            await _Streamed(services, exchange, run, dialect, request.include_usage).send()
        else:
            await _send_whole(services.config.stream, exchange, run, dialect)


class Settling(Protocol):
    """A run that ends once. is_broken: a fault of ours, for which nothing is billed."""

    is_broken: bool

    def close(self, *, client_left: bool) -> None: ...


@contextmanager
def settled(exchange: Exchange, run: Settling) -> Iterator[None]:
    """The run is closed when the block ends, however it ends; a send that stalled is ClientLeft."""
    try:
        yield
    except TimeoutError:  # a send that stalled: who takes nothing for so long is gone
        exchange.client_left = True
        raise ClientLeft from None
    except Exception:
        run.is_broken = True
        raise
    finally:
        run.close(client_left=exchange.client_left)


async def _send_whole(
    config: StreamConfig, exchange: Exchange, run: CompletionRun, dialect: Dialect
) -> None:
    turns: list[list[Turn]] = [[] for _ in run.choices]
    while not run.is_complete:
        for turn in await run.next():
            if turn.failure is not None:
                raise _ours(turn.failure)
            turns[turn.index].append(turn)
    usage = run.usage()
    data = await off_loop(_num_told(chain(*turns)), lambda: dialect.whole(turns, usage))
    headers = [*run.headers(), ("x-kagari-cost-nano-usd", str(run.cost_nano_usd()))]
    run.close(client_left=False)  # from here on it is billed, so nothing of ours may fail after it
    with TimeLimit(config.send_stall_s):
        await exchange.reply(200, data, headers=headers)


class _Streamed:
    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        run: CompletionRun,
        dialect: Dialect,
        include_usage: bool,
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._run = run
        self._dialect = dialect
        self._include_usage = include_usage
        self._unopened = {choice.index for choice in run.choices}

    async def send(self) -> None:
        run, exchange, config = self._run, self._exchange, self._services.config.stream
        first_wait_s = exchange.started + config.first_heartbeat_s - time.monotonic()
        turns = await run.next(max(first_wait_s, 0.01))
        failure = _failure(turns)
        if failure is not None:
            raise _ours(failure)  # nothing was sent yet: it becomes a status
        async with StallGuard(config.send_stall_s) as guard:
            await guard.send(exchange.start(200, [*STREAM_HEADERS, *run.headers()]))
            while True:
                if not turns:
                    data = HEARTBEAT
                elif (num_told := _num_told(turns)) > INLINE_TOKENS:
                    data = await off_loop(num_told, partial(self._written, turns))
                else:
                    data = self._written(turns)
                if failure is not None:
                    await guard.send(exchange.end(data + self._failed(failure)))
                    return
                if run.is_complete:
                    if self._include_usage:
                        data += self._dialect.usage(run.usage())
                    run.close(client_left=False)
                    await guard.send(exchange.end(data + DONE))
                    return
                if data:
                    await guard.send(exchange.write(data))
                try:
                    turns = await run.next(config.heartbeat_s)
                except GatewayError as error:  # the deadline, or no place for a waiting prompt
                    await guard.send(exchange.end(self._failed(error)))
                    return
                failure = _failure(turns)

    def _written(self, turns: Sequence[Turn]) -> bytes:
        data = b""
        for turn in turns:
            if self._unopened and turn.index in self._unopened:
                self._unopened.discard(turn.index)
                data += self._dialect.opening(turn.index)
            data += self._dialect.turn(turn)
        return data

    def _failed(self, failure: GatewayError) -> bytes:
        """Settles. Who reads too slowly left of their own will: what was produced is billed."""
        self._run.close(client_left=failure.code == "slow_reader")
        self._services.metrics.count("kagari_errors", code=failure.code)
        self._exchange.notes["error"] = failure.code
        return error_event(failure.body(self._exchange.request_id))


def _num_told(turns: Iterable[Turn]) -> int:
    num_told = 0
    for turn in turns:
        num_told += len(turn.tokens)
    return num_told


def _failure(turns: Sequence[Turn]) -> GatewayError | None:
    """One choice that fails fails the answer."""
    for turn in turns:
        if turn.failure is not None:
            return turn.failure
    return None


def _ours(failure: GatewayError) -> GatewayError:
    """While nothing is sent nobody can read slowly: tokens waited for us, say for the row."""
    return fault("server_error") if failure.code == "slow_reader" else failure
