"""A request's stream of tokens: a list and one waiter, so that a late reader gets all in one burst.

Flow is the fleet's side (it lives until the stream ended), Stream the request's side. A Stream
that its owner forgets is aborted when it is collected.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from policies.contract.wire import EngineInfo, Failed, Finished, Sampling, Usage
from policies.routing import Affinity, Decision

if TYPE_CHECKING:
    from types import TracebackType

    from gateway.nodes.engines import Engine
    from gateway.nodes.session import Session

MAX_UNREAD_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What the fleet needs of a request. affinity_key is a digest scoped to tenant and model."""

    request_id: str
    tenant: str
    model: str
    prompt: array[int]  # typecode 'I'
    page_keys: list[bytes]  # 32 bytes each, of all full pages
    salt: bytes  # 32 bytes
    sampling: Sampling
    deadline_s: float  # from now
    affinity_key: bytes | None


@dataclass(frozen=True, slots=True)
class Burst:
    """All that came since the last one. An empty burst with an end is the last."""

    tokens: list[int]
    end: Finished | Failed | None


class Flow:
    """The mutable state of one stream; `place` fields change when it is redispatched."""

    __slots__ = (
        "attempt",
        "cached_tokens",
        "credit",
        "credit_report",
        "deadline",
        "decision",
        "dispatch",
        "end",
        "engine",
        "home",
        "keys",
        "lane",
        "produced",
        "queue_s",
        "session",
        "tier",
        "tried",
        "unread",
        "waiter",
    )

    def __init__(self, dispatch: Dispatch, keys: list[bytes], deadline: float) -> None:
        self.dispatch = dispatch
        self.keys = keys  # event keys, deepest first
        self.deadline = deadline  # on the fleet's clock
        self.unread: list[int] = []
        self.waiter: asyncio.Future[None] | None = None
        self.produced = 0
        self.end: Finished | Failed | None = None
        self.cached_tokens: int | None = None
        self.queue_s = 0.0
        self.tier = "device"
        self.attempt = 0
        self.tried: list[str] = []  # node ids in order, this one last
        self.home: str | None = None  # before this request
        self.decision: Decision | None = None
        self.session: Session | None = None
        self.engine: Engine | None = None
        self.lane = -1
        self.credit = 0
        self.credit_report = 0

    def take(self) -> Burst | None:
        """All that is unread, or None when there is nothing and more may come."""
        if not self.unread and self.end is None:
            return None
        tokens, self.unread = self.unread, []
        return Burst(tokens, self.end)

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def usage(self, completion_tokens: int) -> Usage:
        return Usage(len(self.dispatch.prompt), self.cached_tokens or 0, completion_tokens)


class FlowOwner(Protocol):
    """Who ends a flow: the fleet, or a test's list of calls."""

    def abort(self, flow: Flow) -> None: ...
    def finish(self, flow: Flow, keep: int) -> None: ...
    def orphaned(self, flow: Flow) -> None: ...


class Stream:
    """Handle of a request's tokens; abort it in a `finally` or use `with`: that is idempotent."""

    __slots__ = ("_abort", "_finish", "_flow", "_orphaned")

    def __init__(self, flow: Flow, owner: FlowOwner) -> None:
        self._flow = flow
        self._abort: Callable[[Flow], None] = owner.abort
        self._finish: Callable[[Flow, int], None] = owner.finish
        self._orphaned: Callable[[Flow], None] = owner.orphaned

    @property
    def node_id(self) -> str:
        """The node that serves it now; settled once the first token came."""
        return self._flow.tried[-1]

    @property
    def tried(self) -> tuple[str, ...]:
        """The nodes of all attempts, in order."""
        return tuple(self._flow.tried)

    @property
    def attempt(self) -> int:
        """1 for the first node."""
        return self._flow.attempt

    @property
    def decision(self) -> Decision:
        """Why this node."""
        assert self._flow.decision is not None
        return self._flow.decision

    @property
    def affinity(self) -> Affinity:
        return self.decision.affinity

    @property
    def info(self) -> EngineInfo:
        """The serving engine, for what is disclosed about precision."""
        assert self._flow.engine is not None
        return self._flow.engine.info

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not recomputed; None until the engine started the sequence."""
        return self._flow.cached_tokens

    @property
    def queue_s(self) -> float:
        """Seconds the sequence waited in the engine."""
        return self._flow.queue_s

    @property
    def tier(self) -> str:
        """Slowest tier the hit came from."""
        return self._flow.tier

    @property
    def produced(self) -> int:
        """Completion tokens that arrived so far, read or not."""
        return self._flow.produced

    async def next(self) -> Burst:
        """Wait until something came and take all of it; after the end, the end again."""
        flow = self._flow
        while (burst := flow.take()) is None:
            assert flow.waiter is None, "one reader per stream"
            flow.waiter = asyncio.get_running_loop().create_future()
            try:
                await flow.waiter
            finally:
                flow.waiter = None
        return burst

    async def next_within(self, timeout_s: float) -> Burst | None:
        """As next, but None when nothing came in time.

        One timer: asyncio.timeout around next costs a chunk 7 of 35 µs (benchmarks.gateway,
        64 × 200/s).
        """
        flow = self._flow
        burst = flow.take()
        if burst is not None:
            return burst
        assert flow.waiter is None, "one reader per stream"
        loop = asyncio.get_running_loop()
        flow.waiter = loop.create_future()
        timer = loop.call_later(timeout_s, flow.wake)
        try:
            await flow.waiter
        finally:
            timer.cancel()
            flow.waiter = None
        return flow.take()

    def abort(self) -> None:
        """Stop the sequence at once; the stream ends as Finished(reason="abort") if it had not."""
        self._abort(self._flow)

    def finish(self, keep: int) -> None:
        """A stop string matched: end as Finished(reason="stop") with keep completion tokens."""
        self._finish(self._flow, keep)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        if self._flow.end is None:
            self._orphaned(self._flow)
