"""A request's streams of tokens, one a lane: lists and one waiter, so that a late reader gets all.

Flow is the fleet's side (it lives until its last lane ended), Stream the request's side. A Stream
that its owner forgets is aborted when it is collected.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from msgspec import Struct

from policies.backlog import Credit
from policies.contract.wire import EngineInfo, Failed, Finished, Sampling, TokenLogprob, Usage
from policies.pairing import Pairing
from policies.queue import Entry
from policies.routing import Affinity, Decision

if TYPE_CHECKING:
    from types import TracebackType

    from gateway.nodes.engines import Engine
    from gateway.nodes.legs import Leg
    from gateway.nodes.queued import Queued
    from gateway.nodes.session import Session

MAX_UNREAD_TOKENS = 4096  # of one lane
FleetPath = Literal["mixed", "split", "bypass"]  # a RequestPath of our own nodes


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
    n: int = 1  # lanes: they share the prompt and differ by their noise
    compute: str = "exact"  # of the engine, as announced when the request came
    retention_s: float | None = None  # how long the client asks its pages to stay
    ttft_deadline_s: float | None = None  # from now: rather refused than answered later


class Burst(Struct, frozen=True, gc=False):
    """All that came on one lane since its last burst. After an end nothing more comes."""

    index: int  # of the lane among the request's
    tokens: list[int]
    end: Finished | Failed | None
    logprobs: Sequence[TokenLogprob] = ()  # one a token, if asked for


class Waiter:
    """Where one reader waits, for one stream or for several at once."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        future = self.future
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self, timeout_s: float | None) -> None:
        """Until woken or timeout_s passed. Call it with nothing left to read.

        One timer: asyncio.timeout around it costs a chunk 7 of 35 µs (benchmarks.gateway,
        64 × 200/s).
        """
        assert self.future is None, "one reader per stream"
        loop = asyncio.get_running_loop()
        self.future = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self.wake)
        try:
            await self.future
        finally:
            if timer is not None:
                timer.cancel()
            self.future = None


class Lane:
    """One of a flow's streams; `number` is its lane on the link where the flow is now."""

    __slots__ = (
        "end",
        "flow",
        "index",
        "is_told",
        "logprobs",
        "number",
        "produced",
        "unread",
        "waiter",
    )

    def __init__(self, flow: Flow, index: int) -> None:
        self.flow = flow
        self.index = index
        self.number = -1
        self.unread: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # of what is unread
        self.produced = 0
        self.end: Finished | Failed | None = None
        self.is_told = False  # its end was read
        self.waiter = flow.waiter

    def take(self) -> Burst:
        """All that is unread."""
        tokens, self.unread = self.unread, []
        self.is_told = self.end is not None
        if not self.logprobs:
            return Burst(self.index, tokens, self.end)
        logprobs, self.logprobs = self.logprobs, []
        return Burst(self.index, tokens, self.end, logprobs)


class Try(NamedTuple):
    """Where one attempt of a request ran. prefill_node, prefill_info: of a split."""

    node_id: str
    path: FleetPath
    prefill_node: str | None = None
    prefill_info: EngineInfo | None = None


class Flow:
    """The mutable state of one request; `place` fields change when it is redispatched."""

    __slots__ = (
        "arrived_at",
        "attempt",
        "cached_by_tier",
        "cached_tokens",
        "credit",
        "deadline",
        "decision",
        "dispatch",
        "engine",
        "faulty",
        "home",
        "is_answered",
        "keys",
        "lanes",
        "leg",
        "num_live",
        "pairing",
        "prompt_logprobs",
        "queue_s",
        "queued",
        "retry_after_s",
        "seated_tokens",
        "session",
        "stays_on",
        "tries",
        "ttft_by",
        "waited_s",
        "waiter",
    )

    def __init__(
        self, dispatch: Dispatch, keys: list[bytes], now: float, waiter: Waiter | None = None
    ) -> None:
        self.dispatch = dispatch
        self.keys = keys  # event keys, deepest first
        self.arrived_at = now  # on the fleet's clock, as the next two
        self.deadline = now + dispatch.deadline_s
        limit_s = dispatch.ttft_deadline_s
        self.ttft_by = None if limit_s is None else now + limit_s  # for its first token
        self.waiter = waiter or Waiter()
        self.lanes = [Lane(self, index) for index in range(dispatch.n)]
        self.num_live = dispatch.n  # lanes that have not ended
        self.is_answered = False  # a first token came, on any lane
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cached_tokens: int | None = None
        self.queue_s = 0.0
        self.cached_by_tier: dict[str, int] = {}
        self.attempt = 0
        self.tries: list[Try] = []  # in order, this one last
        self.faulty: set[str] = set()  # nodes that failed it
        self.stays_on: str | None = None  # the node that has part of its prompt from a failed pair
        self.home: str | None = None  # before this request
        self.decision: Decision | None = None
        self.pairing: Pairing | None = None  # of a fleet of several roles
        self.session: Session | None = None
        self.engine: Engine | None = None
        self.leg: Leg | None = None  # who computes the prompt, where that is another node
        self.credit: Credit | None = None  # its share of the engine's backlog
        self.seated_tokens = 0  # of context, counted on the engine until the flow leaves it
        self.queued: Entry[Queued] | None = None  # it has a place and waits to be sent there
        self.waited_s = 0.0  # in the queue of this gateway
        self.retry_after_s: float | None = None  # advice with its end, if it was shed

    @property
    def is_over(self) -> bool:
        """Every lane ended."""
        return self.num_live == 0

    @property
    def is_untouched(self) -> bool:
        """Nothing of an answer came yet, so another node may give it."""
        return not self.is_answered and self.num_live == len(self.lanes)

    @property
    def tried(self) -> list[str]:
        """The nodes of all attempts in order."""
        return [one.node_id for one in self.tries]

    @property
    def num_splits(self) -> int:
        return sum([one.prefill_node is not None for one in self.tries])

    @property
    def produced(self) -> int:
        return sum([lane.produced for lane in self.lanes])

    def answered(self, step: int) -> None:
        """The first token came with that step: the prompt is computed, wherever that was."""
        self.is_answered = True
        if self.engine is not None:
            self.engine.computed(self, step)
        if self.leg is not None:
            self.leg.computed()

    def take(self) -> list[Burst]:
        """All that is unread, lane by lane; empty when there is nothing and more may come."""
        bursts: list[Burst] = []
        for lane in self.lanes:
            if lane.unread or (lane.end is not None and not lane.is_told):
                bursts.append(lane.take())  # noqa: PERF401 - a comprehension is a call, each chunk
        if bursts or self.num_live:
            return bursts
        return [lane.take() for lane in self.lanes]  # the ends again

    def wake(self) -> None:
        self.waiter.wake()

    def usage(self, completion_tokens: int) -> Usage:
        """Of one lane."""
        return Usage(len(self.dispatch.prompt), self.cached_tokens or 0, completion_tokens)


class FlowOwner(Protocol):
    """Who ends a flow: the fleet, or a test's list of calls."""

    def abort(self, flow: Flow) -> None: ...
    def finish(self, lane: Lane, keep: int) -> None: ...
    def orphaned(self, flow: Flow) -> None: ...


class Stream:
    """Handle of a request's tokens; abort it in a `finally` or use `with`: that is idempotent."""

    __slots__ = ("_abort", "_finish", "_flow", "_orphaned")

    def __init__(self, flow: Flow, owner: FlowOwner) -> None:
        self._flow = flow
        self._abort: Callable[[Flow], None] = owner.abort
        self._finish: Callable[[Lane, int], None] = owner.finish
        self._orphaned: Callable[[Flow], None] = owner.orphaned

    @property
    def node_id(self) -> str:
        """The node that serves it now; settled once the first token came."""
        return self._flow.tries[-1].node_id

    @property
    def path(self) -> FleetPath:
        """How it runs now; settled once the first token came."""
        return self._flow.tries[-1].path

    @property
    def prefill_node(self) -> str | None:
        """The node that computes the prompt for node_id; None where that is the same."""
        return self._flow.tries[-1].prefill_node

    @property
    def tries(self) -> tuple[Try, ...]:
        """Where all attempts ran, in order."""
        return tuple(self._flow.tries)

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
    def pairing(self) -> Pairing | None:
        """Why it is split or not; None in a fleet of mixed nodes."""
        return self._flow.pairing

    @property
    def prefill_info(self) -> EngineInfo | None:
        """The engine that computes the prompt, of a split."""
        return self._flow.tries[-1].prefill_info

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
    def waited_s(self) -> float:
        """Seconds it waited in the gateway before it was sent."""
        return self._flow.waited_s

    @property
    def retry_after_s(self) -> float | None:
        """When a client may come again whose request was shed."""
        return self._flow.retry_after_s

    @property
    def cached_by_tier(self) -> Mapping[str, int]:
        """The cached tokens by the tier that held them."""
        return self._flow.cached_by_tier

    @property
    def produced(self) -> int:
        """Completion tokens that arrived so far, read or not."""
        return self._flow.produced

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """Of all prompt tokens but the first, once a first token came; if they were asked for."""
        return self._flow.prompt_logprobs

    def produced_on(self, index: int) -> int:
        """Of one lane."""
        return self._flow.lanes[index].produced

    def take(self) -> list[Burst]:
        """What came on each lane since the last call; after the end of all, their ends again."""
        return self._flow.take()

    async def next(self) -> list[Burst]:
        """As take, once there is something."""
        flow = self._flow
        while not (bursts := flow.take()):
            await flow.waiter.wait(None)
        return bursts

    async def next_within(self, timeout_s: float) -> list[Burst]:
        """As next, but empty when nothing came in time."""
        flow = self._flow
        bursts = flow.take()
        if bursts:
            return bursts
        await flow.waiter.wait(timeout_s)
        return flow.take()

    def lift_ttft_deadline(self) -> None:
        """Another prompt of its request was answered: what is answered is not given up."""
        self._flow.ttft_by = None

    def abort(self) -> None:
        """Stop all lanes at once; those that had not ended do so as Finished(reason="abort")."""
        self._abort(self._flow)

    def finish(self, index: int, keep: int) -> None:
        """A stop string matched: this lane ends as Finished(reason="stop") with keep tokens.

        Only once keep tokens came: before, its end could overtake its Submit.
        """
        lane = self._flow.lanes[index]
        self._finish(lane, keep)
        lane.is_told = True

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
        if not self._flow.is_over:
            self._orphaned(self._flow)
