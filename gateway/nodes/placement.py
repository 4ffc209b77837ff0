"""Choosing a node for a flow: gathers what routing must know and remembers sessions' homes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.nodes.engines import Engine
from gateway.nodes.node import Node, Work
from gateway.nodes.served import ServedModels
from gateway.nodes.streams import FleetPath, Flow
from policies.contract.wire import Tier
from policies.homes import Homes
from policies.pairing import Pairing
from policies.queue import Entry
from policies.residency import TIERS
from policies.routing import (
    Candidate,
    Decision,
    Reach,
    Rejection,
    RoutingParameters,
    RoutingPolicy,
    Scored,
    Wanted,
    filter_candidates,
    hit_tokens,
    in_time,
    late_retry_after_s,
    pick,
    pick_in_turn,
    retry_after_s,
    score,
)

MAX_REMEMBERED = 256  # requests whose decisions are kept for `explain`

Rejected = tuple[str, Rejection]  # node_id, why
Store = tuple[Tier, str]  # a tier that several engines share, and which one


class NoNode(Exception):
    """No node serves the model now. rejected: those that would, and why they cannot."""

    def __init__(self, model: str, rejected: Sequence[Rejected] = ()) -> None:
        super().__init__(f"no node serves {model!r} now")
        self.model = model
        self.rejected = rejected


class OldNodes(NoNode):
    """Nodes serve the model, but none that knows every field of the request."""


class NoCapacity(Exception):
    """Every node that serves the model is full; try again after retry_after_s."""

    def __init__(self, model: str, retry_after_s: float, rejected: Sequence[Rejected]) -> None:
        super().__init__(f"every node that serves {model!r} is full")
        self.model = model
        self.rejected = rejected
        self.retry_after_s = retry_after_s


class TooLate(NoCapacity):
    """Nodes have room, but the first token of none would come within the request's deadline for it:
    that of the best after first_token_s."""

    def __init__(
        self,
        model: str,
        retry_after_s: float,
        rejected: Sequence[Rejected],
        *,
        first_token_s: float,
        left_s: float,
    ) -> None:
        super().__init__(model, retry_after_s, rejected)
        self.args = (
            f"no node that serves {model!r} would have a first token within {left_s:.3g} s, the"
            f" best after {first_token_s:.3g} s",
        )
        self.first_token_s = first_token_s
        self.left_s = left_s


@dataclass(frozen=True, slots=True)
class Choice:
    """How one attempt runs, and why. pairing: in a fleet of several roles; prefill: of the node
    that computes the prompt for another, or was weighed for it."""

    path: FleetPath
    decision: Decision
    pairing: Pairing | None = None
    prefill: Decision | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """A choice that was acted on, and when, on the fleet's clock."""

    at: float
    choice: Choice


class Placement:
    """The policies of routing over the live nodes."""

    def __init__(
        self,
        node_by_id: Mapping[str, Node],
        served: ServedModels,
        policy: RoutingPolicy,
        parameters: RoutingParameters,
        max_in_flight: int,
    ) -> None:
        self._node_by_id = node_by_id
        self._served = served
        self._policy = policy
        self._parameters = parameters
        self._max_in_flight = max_in_flight
        self.homes = Homes(parameters.max_homes, parameters.home_idle_s)
        self._turn = 0
        self._decided: OrderedDict[str, list[Decided]] = OrderedDict()

    def find_home(self, flow: Flow, now: float) -> None:
        """Before the first attempt: where the session's last turn ran."""
        key = flow.dispatch.affinity_key
        flow.home = None if key is None else self.homes.find(key, now)

    def settle(self, flow: Flow, choice: Choice, now: float) -> None:
        """The choice holds: remember it, and the session's next turn finds its home there."""
        flow.decision, flow.pairing = choice.decision, choice.pairing
        self._turn += 1
        request_id = flow.dispatch.request_id
        self._decided.setdefault(request_id, []).append(Decided(now, choice))
        if len(self._decided) > MAX_REMEMBERED:
            self._decided.popitem(last=False)
        key, pages = flow.dispatch.affinity_key, flow.keys
        if key is not None:
            home = choice.decision.chosen.candidate.node_id
            self.homes.settle(key, home, now, pages[0] if pages else None, len(pages))

    def decided(self, request_id: str) -> Sequence[Decided]:
        """Of a recent request, one an attempt."""
        return self._decided.get(request_id, ())

    def decide(
        self, flow: Flow, now: float, work: Work = "whole", *, may_be_late: bool = False
    ) -> Decision:
        """Raises NoNode, NoCapacity or TooLate. Changes nothing.

        Whole requests go to nodes of another role only while none of theirs is ready. may_be_late:
        the deadline of the first token is for the caller to heed.
        """
        dispatch = flow.dispatch
        served = self._served.find(dispatch.model)
        if served is None:
            raise NoNode(dispatch.model)
        model, digest = served.info.model, served.info.bundle_digest
        engines: dict[tuple[str, int], Engine] = {}
        candidates: list[Candidate] = []
        others: list[Candidate] = []
        unlike: list[Rejected] = []
        for node in self._node_by_id.values():
            for engine in node.engine_by_index.values():
                info = engine.info
                if info.model != model:
                    continue
                # With another bundle, a node would read another text from our ids; computed
                # otherwise, the answer would not be the one that was announced.
                if info.bundle_digest != digest:
                    unlike.append((node.node_id, "bundle"))
                elif info.compute != dispatch.compute:
                    unlike.append((node.node_id, "compute"))
                else:
                    takers = candidates if node.takes(engine, work) else others
                    takers.append(self._candidate(node, engine, flow))
                    engines[node.node_id, info.engine] = engine
        if work == "whole" and others and not any(map(_is_routable, candidates)):
            candidates, others = [*candidates, *others], []
        if not candidates:
            raise NoNode(dispatch.model, unlike)
        kept, rejected = filter_candidates(candidates)
        rejected += [*unlike, *[(one.node_id, "role") for one in others]]
        if not kept:
            routable = list(filter(_is_routable, candidates))
            if routable and not any(one.speaks for one in routable):
                raise OldNodes(dispatch.model, rejected)
            wait_s = retry_after_s(routable, self._parameters)
            raise NoCapacity(dispatch.model, wait_s, rejected)
        wanted = Wanted(
            prompt_tokens=len(dispatch.prompt),
            hash_key=dispatch.affinity_key or dispatch.request_id.encode(),
            home=flow.home,
            has_affinity_key=dispatch.affinity_key is not None,
            page_keys=flow.keys if dispatch.affinity_key is None else (),
            page_tokens=served.info.page_size,
        )
        in_turn = self._policy is RoutingPolicy.ROUND_ROBIN
        ttft_by = None if may_be_late else flow.ttft_by
        if in_turn and ttft_by is None:
            return pick_in_turn(kept, wanted, rejected, self._turn)

        most = max(0, wanted.prompt_tokens - 1) // served.info.page_size
        shared = _shared_depths(engines.values(), flow.keys)

        def reach(candidate: Candidate) -> list[Reach]:
            engine = engines[candidate.node_id, candidate.engine]
            return _reach(engine, flow.keys, shared, most, self._parameters)

        ahead = None
        if any([engine.queue.tokens for engine in engines.values()]):

            def ahead(candidate: Candidate, tokens: int) -> float:
                engine = engines[candidate.node_id, candidate.engine]
                rate = self._rate(engine)
                entry: Entry[Any] = Entry(flow, dispatch.tenant, tokens, flow.arrived_at)
                return engine.window.outstanding(now, rate) + engine.queue.before(entry, rate)

        scored = score(kept, wanted, reach, self._parameters, ahead)
        if ttft_by is not None:
            scored = self._in_time(flow, scored, rejected, ttft_by - now)
        if in_turn:
            kept = [one.candidate for one in scored]
            return pick_in_turn(kept, wanted, rejected, self._turn)
        return pick(scored, wanted, rejected, self._parameters)

    def _in_time(
        self, flow: Flow, scored: list[Scored], rejected: list[Rejected], left_s: float
    ) -> list[Scored]:
        """Adds the others to `rejected`."""
        kept, late = in_time(scored, left_s)
        rejected += late
        if kept:
            return kept
        dispatch = flow.dispatch
        assert dispatch.ttft_deadline_s is not None  # else there is nothing to be late for
        raise TooLate(
            dispatch.model,
            late_retry_after_s(scored, dispatch.ttft_deadline_s, self._parameters),
            rejected,
            first_token_s=min([one.first_token_s for one in scored]),
            left_s=max(0.0, left_s),
        )

    def uncached_tokens(self, flow: Flow, engine: Engine) -> int:
        """What the flow would compute there now, by what is known of the engine's own pages."""
        prompt_tokens, page_size = len(flow.dispatch.prompt), engine.info.page_size
        most = max(0, prompt_tokens - 1) // page_size
        rate = self._rate(engine)
        reaches = _reach(engine, flow.keys, {}, most, self._parameters)
        return max(1, prompt_tokens - hit_tokens(reaches, rate))

    def _rate(self, engine: Engine) -> float:
        return engine.tokens_per_s or self._parameters.fallback_tokens_per_s

    def _candidate(self, node: Node, engine: Engine, flow: Flow) -> Candidate:
        session = node.session
        in_flight = session.in_flight + node.num_queued if session is not None else 0
        if in_flight:  # a bound makes the many lanes of one request wait, it never shuts them out
            in_flight += flow.dispatch.n - 1
        return Candidate(
            node_id=node.node_id,
            engine=engine.info.engine,
            state=node.state(servable=True),  # its engine is asked below
            engine_ready=self._served.is_servable(engine),
            speaks=node.wire_version >= flow.dispatch.sampling.least_version,
            tried=node.node_id in flow.faulty,
            in_flight=in_flight,
            max_in_flight=self._max_in_flight,
            overloaded=session is not None and not session.outbox.has_room(),
            backlog_tokens=engine.backlog.tokens,
            tokens_per_s=engine.tokens_per_s,
            kv_share=engine.kv_share,
            window_tokens=engine.window.tokens,
            queue_is_full=engine.queue.tokens > 0 and engine.queue.is_full,
        )


def _is_routable(candidate: Candidate) -> bool:
    return candidate.state == "ready" and candidate.engine_ready


def stores(engine: Engine) -> list[Store]:
    """Those that others fill too, fastest first: the memory of a machine's engines, and the cluster
    store, where engines find pages of their own kind."""
    info, works = engine.info, engine.fetch_rates
    stores: list[Store] = []
    if info.host_arena and "host" in works:
        stores.append(("host", info.host_arena))
    if "cluster" in works:
        stores.append(("cluster", info.page_kind or info.layout_id))
    return stores


def _shared_depths(engines: Iterable[Engine], keys: Sequence[bytes]) -> dict[Store, int]:
    """What one engine put into a store all can fetch that share it. In pages; the keys are of one
    interchangeable model."""
    depths: dict[Store, int] = {}
    for engine in engines:
        for store in stores(engine):
            for _, depth in engine.residency.reach(keys, store[:1]):
                depths[store] = max(depth, depths.get(store, 0))
    return depths


def _reach(
    engine: Engine,
    keys: Sequence[bytes],
    shared: Mapping[Store, int],
    most: int,
    parameters: RoutingParameters,
) -> list[Reach]:
    """At most `most` pages of the prompt."""
    info = engine.info
    rates = engine.fetch_rates
    pages = engine.residency.reach(keys, ("device", *rates))
    pages += [(store[0], shared.get(store, 0)) for store in stores(engine)]
    pages.sort(key=lambda run: TIERS.index(run[0]))
    return [
        Reach(
            min(most, depth) * info.page_size,
            0.0
            if tier == "device"
            else info.page_bytes / info.page_size / (rates[tier] or parameters.bytes_per_s(tier)),
        )
        for tier, depth in pages
    ]
