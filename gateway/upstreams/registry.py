"""All upstreams of one gateway: what they serve, which of their servers a request goes to.

Choosing is synchronous and uses the policies that nodes are chosen by; the tasks that probe, listen
to page events and end what clients left behind are owned here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import structlog
from msgspec import Struct

from gateway.nodes.placement import NoCapacity, NoNode, Rejected, TooLate
from gateway.telemetry import Metrics
from gateway.upstreams.server import Server
from gateway.upstreams.settings import Dialect
from gateway.upstreams.upstream import Upstream, UpstreamModel
from policies.breaker import BreakerState
from policies.contract.wire import Role
from policies.homes import Homes
from policies.predicted import TTL_S
from policies.residency import Residency
from policies.routing import (
    Candidate,
    Decision,
    Reach,
    RoutingParameters,
    Scored,
    Wanted,
    filter_candidates,
    in_time,
    late_retry_after_s,
    pick,
    retry_after_s,
    score,
)

log = structlog.get_logger("kagari.upstreams")

ServerState = Literal["up", "down", "open", "half_open"]
MAX_NAMES = 65_536
MAX_ENDING = 1024  # requests whose clients left, that still end at a server
CLOSE_WITHIN_S = 2.0
LOOK_EVERY_S = 0.1  # a server may list hundreds of models, and each request asks for one


@dataclass(frozen=True, slots=True)
class Ask:
    """What choosing must know of a request. keys: of an upstream, deepest first.

    whole: it cannot be split, whatever its servers could.
    """

    model: UpstreamModel
    prompt_tokens: int
    keys: Callable[[Upstream], Sequence[bytes]]
    session: bytes | None
    request_id: str
    whole: bool = False
    ttft_by: float | None = None  # on the registry's clock: rather refused than answered later
    tried: list[str] = field(default_factory=list)  # servers that failed it


@dataclass(frozen=True, slots=True)
class Way:
    """first computes the prompt; then decode, if there is one, the rest."""

    upstream: Upstream
    first: Server
    decode: Server | None
    decision: Decision

    @property
    def answering(self) -> Server:
        return self.decode or self.first

    @property
    def uncached_tokens(self) -> int:
        return self.decision.chosen.uncached_tokens


class ServerView(Struct, frozen=True):
    """state: up, or what the breaker says, or down with the problem of the last probe."""

    name: str
    upstream: str
    dialect: Dialect
    role: Role
    state: ServerState
    problem: str
    models: tuple[str, ...]
    in_flight: int
    max_in_flight: int
    outstanding_tokens: int
    resident_pages: int
    residency: Literal["events", "predicted"]


class Upstreams:
    """Built once; `running` for as long as the gateway serves."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        parameters: RoutingParameters,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.all = tuple(upstreams)
        self.clock = clock
        self._parameters = parameters
        self._names: dict[str, None] = {}  # every model that was ever there, in order
        self._models: list[UpstreamModel] = []
        self._look_at = 0.0
        self._homes = Homes(parameters.max_homes, parameters.home_idle_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def servers(self) -> list[Server]:
        return [server for upstream in self.all for server in upstream.servers]

    # --- what is served ---------------------------------------------------------------------------

    def models(self) -> list[UpstreamModel]:
        """What can be served now, or could a moment ago: by first sight, aliases last."""
        now = self.clock()
        if now >= self._look_at:
            self._models, self._look_at = self._look(), now + LOOK_EVERY_S
        return self._models

    def _look(self) -> list[UpstreamModel]:
        found: dict[str, list[tuple[Upstream, str]]] = {}
        aliases: dict[str, str] = {}
        for upstream in self.all:
            if upstream.is_up():
                for ours, theirs in upstream.names().items():
                    found.setdefault(ours, []).append((upstream, theirs))
                aliases |= upstream.config.aliases
        for name in found:
            self._names.setdefault(name)
        while len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
        models = {
            name: UpstreamModel(
                name,
                upstreams=tuple([upstream for upstream, _ in found[name]]),
                own_names=tuple([own_name for _, own_name in found[name]]),
            )
            for name in self._names
            if name in found
        }
        return [
            *models.values(),
            *(
                UpstreamModel(alias, real.upstreams, real.own_names, alias_of=real.name)
                for alias, name in aliases.items()
                if (real := models.get(name)) is not None and alias not in models
            ),
        ]

    def model(self, name: str) -> UpstreamModel | None:
        """One of them by its name or alias."""
        return next((model for model in self.models() if model.name == name), None)

    def knows(self, name: str) -> bool:
        """Whether it is, was or should be served by an upstream."""
        return name in self._names or any(
            name in upstream.config.models or name in upstream.config.aliases
            for upstream in self.all
        )

    # --- choosing ---------------------------------------------------------------------------------

    def choose(self, ask: Ask) -> Way:
        """Raises NoNode, NoCapacity or TooLate. The session's home is settled where it goes."""
        now = self.clock()
        places = {
            server.name: (upstream, server)
            for upstream in ask.model.upstreams
            for server in self._firsts(upstream, ask, now)
        }
        candidates = [
            self._candidate(upstream, server, ask, now) for upstream, server in places.values()
        ]
        kept, rejected = filter_candidates(candidates)
        if not kept:
            if not any(why == "full" for _, why in rejected):
                raise NoNode(ask.model.name)
            raise NoCapacity(ask.model.name, retry_after_s(candidates, self._parameters), rejected)
        home = None if ask.session is None else self._homes.find(ask.session, now)
        wanted = Wanted(
            prompt_tokens=ask.prompt_tokens,
            hash_key=ask.session or ask.request_id.encode(),
            home=home,
            has_affinity_key=ask.session is not None,
            page_keys=ask.keys(ask.model.upstreams[0]) if ask.session is None else (),
            page_tokens=ask.model.upstreams[0].config.page_size,
        )

        def reach(candidate: Candidate) -> list[Reach]:
            upstream, server = places[candidate.node_id]
            return [Reach(self._hit_tokens(upstream, server, ask, now))]

        scored = score(kept, wanted, reach, self._parameters)
        if ask.ttft_by is not None:
            scored = self._in_time(ask, scored, rejected, ask.ttft_by - now)
        decision = pick(scored, wanted, rejected, self._parameters)
        upstream, first = places[decision.chosen.candidate.node_id]
        decode = self._decode_for(upstream, ask, now) if first.role == "prefill" else None
        if ask.session is not None:
            pages = ask.prompt_tokens // upstream.config.page_size
            self._homes.settle(ask.session, first.name, now, prompt_pages=pages)
        return Way(upstream, first, decode, decision)

    def _in_time(
        self, ask: Ask, scored: list[Scored], rejected: list[Rejected], left_s: float
    ) -> list[Scored]:
        """Adds the others to `rejected`. A server whose rate nobody told is asked all the same: it
        shows itself whether it is late."""
        untold = [one for one in scored if left_s > 0 and not one.candidate.tokens_per_s]
        kept, late = in_time([one for one in scored if one not in untold], left_s)
        kept += untold
        rejected += late
        if not kept:
            raise TooLate(
                ask.model.name,
                late_retry_after_s(scored, left_s, self._parameters),
                rejected,
                first_token_s=min([one.first_token_s for one in scored]),
                left_s=max(0.0, left_s),
            )
        return kept

    def _firsts(self, upstream: Upstream, ask: Ask, now: float) -> list[Server]:
        """Servers that may take the prompt: of a cluster its prefill servers, if it can be split
        now and somebody can go on."""
        if not upstream.is_split:
            return list(upstream.servers)
        prefill = upstream.of_role("prefill")
        can_split = any(_works(one, now) for one in prefill) and any(
            _works(one, now) for one in upstream.of_role("decode")
        )
        if upstream.mixed and (ask.whole or not can_split):
            return upstream.mixed
        return prefill if can_split else []

    def _decode_for(self, upstream: Upstream, ask: Ask, now: float) -> Server:
        """The emptiest of those that work, first of those that did not fail this request."""
        most = upstream.config.max_in_flight
        free = [
            one for one in upstream.of_role("decode") if _works(one, now) and one.in_flight < most
        ]
        if not free:
            raise NoCapacity(ask.model.name, retry_after_s((), self._parameters), ())
        return min(free, key=lambda one: (one.name in ask.tried, one.in_flight, one.name))

    def _candidate(self, upstream: Upstream, server: Server, ask: Ask, now: float) -> Candidate:
        return Candidate(
            node_id=server.name,
            engine=0,
            state="ready" if server.probes.is_up else "lost",
            engine_ready=server.breaker.allows(now),
            tried=server.name in ask.tried,
            in_flight=server.in_flight,
            max_in_flight=upstream.config.max_in_flight,
            overloaded=False,
            backlog_tokens=server.outstanding_tokens,
            tokens_per_s=upstream.config.prefill_tokens_per_s,
        )

    def _hit_tokens(self, upstream: Upstream, server: Server, ask: Ask, now: float) -> int:
        """Of the prompt's tokens, those a server has; without text what its session had there."""
        keys = ask.keys(upstream)
        if keys:
            pages = server.resident_pages(keys, now)
        else:
            home = None if ask.session is None else self._homes.look(ask.session, now)
            if home is None or home.node_id != server.name or now - home.used_at > TTL_S:
                return 0
            pages = home.prompt_pages
        return min(pages * upstream.config.page_size, ask.prompt_tokens - 1)

    # --- tasks ------------------------------------------------------------------------------------

    def start_ending(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that outlives its request, to free what the request holds at a server."""
        if len(self._ending) >= MAX_ENDING:
            work.close()
            return
        self.let_end(asyncio.create_task(work))

    def let_end(self, task: asyncio.Task[None]) -> None:
        """Keep it until it has ended: one that was cancelled still closes its connection."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    @asynccontextmanager
    async def running(
        self, listeners: Sequence[Coroutine[Any, Any, None]] = ()
    ) -> AsyncIterator[None]:
        """Probes and listeners run until the block ends; then all connections are closed."""
        works = [*(server.probing() for server in self.servers), *listeners]
        self._tasks = {asyncio.create_task(work) for work in works}
        for task in self._tasks:
            task.add_done_callback(_tell_fault)
        try:
            yield
        finally:
            left = [*self._tasks, *self._ending]
            if self._ending:
                await asyncio.wait(self._ending, timeout=CLOSE_WITHIN_S)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=CLOSE_WITHIN_S)
            for server in self.servers:
                await server.connections.close()

    # --- operators --------------------------------------------------------------------------------

    def views(self) -> list[ServerView]:
        now = self.clock()
        return [
            _view(upstream, server, now) for upstream in self.all for server in upstream.servers
        ]


def _tell_fault(task: asyncio.Task[None]) -> None:
    """None of them ends by itself."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("upstream_task_failed", error=repr(error))


def _works(server: Server, now: float) -> bool:
    return server.probes.is_up and server.breaker.allows(now)


def _view(upstream: Upstream, server: Server, now: float) -> ServerView:
    breaker: BreakerState = server.breaker.state(now)
    residency: Residency | None = server.told
    return ServerView(
        name=server.name,
        upstream=upstream.name,
        dialect=upstream.config.dialect,
        role=server.role,
        state="down" if not server.probes.is_up else "up" if breaker == "closed" else breaker,
        problem=server.problem,
        models=tuple(upstream.names()),
        in_flight=server.in_flight,
        max_in_flight=upstream.config.max_in_flight,
        outstanding_tokens=server.outstanding_tokens,
        resident_pages=len(server.predicted if residency is None else residency),
        residency="predicted" if residency is None else "events",
    )


def tell_servers(board: Metrics, views: Sequence[ServerView]) -> None:
    """The gauges of upstreams, as of now."""
    states = [view.state for view in views]
    for state in get_args(ServerState):
        board.set("kagari_upstreams", states.count(state), state=state)
    for view in views:
        board.set("kagari_upstream_in_flight", view.in_flight, upstream=view.name)
        board.set("kagari_upstream_resident_pages", view.resident_pages, upstream=view.name)
