"""One server of an upstream as the gateway knows it: is it up, what runs there, what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog
from msgspec import Struct

from gateway.upstreams.faults import TransportFault
from gateway.upstreams.settings import UpstreamConfig
from policies.breaker import Breaker, Outcome, Probes
from policies.contract.wire import Role
from policies.predicted import PredictedResidency
from policies.residency import Residency

if TYPE_CHECKING:
    from gateway.upstreams.transport import Connections

PROBE_DEADLINE_S = 5.0
MAX_MODELS = 1024  # of one server's list
MAX_KEYS = 500_000

log = structlog.get_logger("kagari.upstreams")


class _Meta(Struct, frozen=True):
    n_ctx_train: int | None = None
    n_ctx: int | None = None


class Listed(Struct, frozen=True):
    """A model as a server lists it; the window under whatever name it has."""

    id: str
    max_model_len: int | None = None
    context_length: int | None = None
    context_window: int | None = None
    meta: _Meta | None = None

    @property
    def context_tokens(self) -> int | None:
        of_meta = None if self.meta is None else self.meta.n_ctx or self.meta.n_ctx_train
        return self.max_model_len or self.context_length or self.context_window or of_meta


class _List(Struct, frozen=True):
    data: list[Listed]


_decode_list = msgspec.json.Decoder(_List).decode


class Server:
    """What runs here counts from its lease to the lease's end, whatever happens between."""

    def __init__(
        self, name: str, role: Role, base: str, config: UpstreamConfig, connections: Connections
    ) -> None:
        self.name = name
        self.base = base
        self.role = role
        self.connections = connections
        self.breaker = Breaker()
        self.probes = Probes()
        self.listed: dict[str, Listed] = {}  # by the last good probe
        self.problem = "not asked yet"
        self.answered = asyncio.Event()  # it was up, once
        self.in_flight = 0
        self.outstanding_tokens = 0  # of prompts whose first byte has not come
        self.predicted = PredictedResidency(MAX_KEYS)
        self.told: Residency | None = None  # by its KV events, while they come
        self._config = config

    def resident_pages(self, deepest_first: Sequence[bytes], now: float) -> int:
        """How much of a prompt is here: as events say, else as is believed."""
        if self.told is not None:
            return max([pages for _, pages in self.told.reach(deepest_first)], default=0)
        return self.predicted.pages(deepest_first, now)

    def expect(self, deepest_first: Sequence[bytes], now: float) -> None:
        """A prompt was just computed here; where events come they say so, and more exactly."""
        if self.told is None:
            self.predicted.expect(deepest_first, now)

    def lease(self, tokens: int, now: float) -> Lease:
        self.in_flight += 1
        self.outstanding_tokens += tokens
        return Lease(self, tokens, self.breaker.begin(now))

    # --- probes -----------------------------------------------------------------------------------

    async def probing(self) -> None:
        """Until cancelled."""
        while True:
            await self.probe()
            await asyncio.sleep(self._config.probe_s)

    async def probe(self) -> None:
        """Ask once what it serves. It never raises for what a server does."""
        try:
            status, body = await self.connections.get("/v1/models", PROBE_DEADLINE_S)
            if status in (404, 405):  # no list: that it answers must do
                status, body = await self.connections.get("/health", PROBE_DEADLINE_S)
                listed: dict[str, Listed] = {}
            elif status == 200:
                listed = {one.id: one for one in _decode_list(body).data[:MAX_MODELS]}
            self.problem = "" if status == 200 else f"status {status} to a probe"
        except TransportFault as fault:
            self.problem = f"{fault.kind}: {fault}"
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.problem = f"a list of models that is none: {error}"
        if not self.problem:
            self.listed = listed
        if self.probes.take(not self.problem):
            log.info("upstream", server=self.name, up=self.probes.is_up, problem=self.problem)
        if self.probes.is_up:
            self.answered.set()


@dataclass(slots=True, eq=False)
class Lease:
    """One request's place on a server; ended once, by whoever comes first."""

    server: Server
    tokens: int
    is_trial: bool
    is_open: bool = True
    is_computed: bool = False

    def computed(self) -> None:
        """The first byte came: the prompt is no work any more."""
        if not self.is_computed:
            self.is_computed = True
            self.server.outstanding_tokens -= self.tokens

    def end(self, outcome: Outcome, now: float) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self.computed()
        self.server.in_flight -= 1
        self.server.breaker.end(self.is_trial, outcome, now)
