"""Where a request goes: filter → score → pick, in seconds, with the reasons kept.

Cost is (tokens still to compute before it + its own uncached ones) ÷ the node's measured prefill
rate, + (own_weight − 1) × its own uncached tokens ÷ the nodes' mean rate, which prices the delay to
others, + the time to fetch what slower tiers hold of its prefix, where that is quicker than
computing it, + pressure_s × k ÷ (1 − k) where a share k of the pages is in use: affinity and
residency are worth tokens, they are no command. Among nodes whose costs are nearly equal the order
is rendezvous hashing (Thaler and Ravishankar, 1998) on the session's key, else on the first page of
the prompt that none of them has, walked with a bounded load (Mirrokni et al., 2016), so that
gateways agree without talking and a node that joins or leaves moves few sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from math import ceil, inf
from typing import Literal

import msgspec
from msgspec import Struct

from policies.contract.wire import NodeState, Tier

Affinity = Literal["hit", "spill", "new", "none"]
Reason = Literal["home", "least_cost", "rendezvous", "least_in_flight", "turn"]
Rejection = Literal[
    "bundle",
    "compute",
    "role",
    "state",
    "engine",
    "wire_version",
    "tried",
    "full",
    "overloaded",
    "queue",  # the gateway's own before that engine is full
    "late",  # its first token would come after the request's deadline for it
]


MAX_RETRY_S = 30.0
_MAX_KV_SHARE = 0.99  # of the pressure term, which has no end


class RoutingPolicy(StrEnum):
    """cost: the policy above; round_robin: nodes in turn, as a baseline to compare with."""

    COST = "cost"
    ROUND_ROBIN = "round_robin"


class RoutingParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """defaults/routing.toml says what each is for."""

    version: str = "routing-4"
    own_weight: float = 4.0
    pressure_s: float = 0.5
    slack: float = 0.15
    window_s: float = 0.05
    load_bound: float = 1.25
    fallback_tokens_per_s: float = 2000.0
    home_idle_s: float = 3600.0
    max_homes: int = 65_536
    host_bytes_per_s: float = 4e9
    disk_bytes_per_s: float = 1e9
    cluster_bytes_per_s: float = 5e8

    def bytes_per_s(self, tier: Tier) -> float:
        """Of a slower tier that has not measured its own rate."""
        match tier:
            case "device":
                return inf
            case "host":
                return self.host_bytes_per_s
            case "disk":
                return self.disk_bytes_per_s
            case "cluster":
                return self.cluster_bytes_per_s


def parse_parameters(text: str) -> RoutingParameters:
    """Parameters from TOML text; raises msgspec.ValidationError on an unknown or wrong field."""
    return msgspec.toml.decode(text, type=RoutingParameters)


class Candidate(Struct, frozen=True, gc=False):
    """One engine of one node as the gateway sees it now."""

    node_id: str
    engine: int
    state: NodeState
    engine_ready: bool
    tried: bool  # an earlier attempt of this request failed there
    in_flight: int  # sequences of this gateway on the node
    max_in_flight: int
    overloaded: bool  # its out-queue is full
    backlog_tokens: int  # uncached prompt tokens waiting or running there
    tokens_per_s: float  # measured prefill rate; 0: not known
    speaks: bool = True  # its wire version has every field that the request needs
    kv_share: float = 0.0  # of its pages, those in use
    tells_pages: bool = True  # what of a prompt is resident there is known
    window_tokens: int = 0  # most that the engine is given at a time; 0: no queue before it
    queue_is_full: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What routing must know of a request. home_tokens: of the session's last prompt; they are what
    a home that tells of no pages is believed to hold. page_keys: of full pages, deepest first,
    where nothing names the session."""

    prompt_tokens: int
    hash_key: bytes  # same key, same order of nodes
    home: str | None  # the session's home, when it is known
    has_affinity_key: bool
    home_tokens: int = 0
    page_keys: Sequence[bytes] = ()
    page_tokens: int = 1

    def order_key(self, resident_tokens: int) -> bytes:
        """What orders nodes of equal cost that have so much of the prompt. What begins as many
        others do and is everywhere tells nothing: it would put the same nodes first for all."""
        if not self.page_keys:
            return self.hash_key
        pages = resident_tokens // self.page_tokens
        return self.page_keys[max(0, len(self.page_keys) - 1 - pages)]


class Reach(Struct, frozen=True, gc=False):
    """tokens: how much of the prompt's prefix an engine has, this tier and all faster ones taken
    together. fetch_s: seconds to bring one of its tokens to the device; 0 where they are there."""

    tokens: int
    fetch_s: float = 0.0


class Scored(Struct, frozen=True, gc=False):
    """hit_tokens are not computed; fetching those that are in slower tiers takes fetch_s. The cost
    is the sum of its four terms, in seconds. Of its first token, queue_s would pass in the
    gateway's queue."""

    candidate: Candidate
    hit_tokens: int
    uncached_tokens: int
    backlog_s: float = 0.0
    own_s: float = 0.0  # its own tokens, and what others wait for them
    fetch_s: float = 0.0
    pressure_s: float = 0.0
    queue_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.backlog_s + self.own_s + self.fetch_s + self.pressure_s


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice and why: what was wanted, the scored nodes, and why others were left out."""

    wanted: Wanted
    chosen: Scored
    affinity: Affinity
    reason: Reason
    scored: tuple[Scored, ...]
    rejected: tuple[tuple[str, Rejection], ...]


def filter_candidates(
    candidates: Sequence[Candidate],
) -> tuple[list[Candidate], list[tuple[str, Rejection]]]:
    """Those that can take a sequence now, and (node_id, why not) of the others.

    Nodes that failed this request before are kept only when no other is left.
    """
    kept: list[Candidate] = []
    tried: list[Candidate] = []
    rejected: list[tuple[str, Rejection]] = []
    for candidate in candidates:
        why = _rejection(candidate)
        if why is not None:
            rejected.append((candidate.node_id, why))
        elif candidate.tried:
            tried.append(candidate)
        else:
            kept.append(candidate)
    if not kept:
        return tried, rejected
    rejected += [(candidate.node_id, "tried") for candidate in tried]
    return kept, rejected


def _rejection(candidate: Candidate) -> Rejection | None:
    if candidate.state != "ready":
        return "state"
    if not candidate.engine_ready:
        return "engine"
    if not candidate.speaks:
        return "wire_version"
    if candidate.in_flight >= candidate.max_in_flight:
        return "full"
    if candidate.overloaded:
        return "overloaded"
    if candidate.queue_is_full:
        return "queue"
    return None


def score(
    candidates: Sequence[Candidate],
    wanted: Wanted,
    reach: Callable[[Candidate], Sequence[Reach]],
    parameters: RoutingParameters,
    ahead: Callable[[Candidate, int], float] | None = None,
) -> list[Scored]:
    """Each candidate's cost in seconds; reach looks up the resident prefix on one, tier by tier,
    the fastest first. ahead: how much of its backlog would be computed before so many tokens of
    this request; None: all of it."""
    scored: list[Scored] = []
    rates = [_rate(candidate, parameters) for candidate in candidates]
    # Who comes behind waits as long as the own work takes, and the faster a node the more come: so
    # the price of their waiting is the same on all nodes.
    others_s = (parameters.own_weight - 1.0) * len(rates) / max(1e-9, sum(rates))
    for candidate, rate in zip(candidates, rates, strict=True):
        hit, fetch_s = _hit(reach(candidate), rate)
        if candidate.node_id == wanted.home and not candidate.tells_pages:
            hit = max(hit, min(wanted.home_tokens, wanted.prompt_tokens))
        uncached = max(1, wanted.prompt_tokens - hit)  # the last token is always computed
        used = min(candidate.kv_share, _MAX_KV_SHARE)
        before = candidate.backlog_tokens if ahead is None else ahead(candidate, uncached)
        window = candidate.window_tokens
        excess = before + min(uncached, window) - window if window else 0
        scored.append(
            Scored(
                candidate,
                hit,
                uncached,
                backlog_s=candidate.backlog_tokens / rate,
                own_s=uncached * (1.0 / rate + others_s),
                fetch_s=fetch_s,
                pressure_s=parameters.pressure_s * used / (1.0 - used),
                queue_s=excess / rate if excess > 0 else 0.0,
                first_token_s=(before + uncached) / rate + fetch_s,
            )
        )
    return scored


def _rate(candidate: Candidate, parameters: RoutingParameters) -> float:
    return candidate.tokens_per_s or parameters.fallback_tokens_per_s


def _hit(reaches: Sequence[Reach], tokens_per_s: float) -> tuple[int, float]:
    """(tokens not computed, seconds to fetch them), as the engine decides: a run that is slower to
    fetch than to compute is computed, and what comes behind it too."""
    hit, seconds = 0, 0.0
    for one in reaches:
        if one.tokens <= hit:
            continue
        if one.fetch_s * tokens_per_s >= 1.0:
            break
        seconds += (one.tokens - hit) * one.fetch_s
        hit = one.tokens
    return hit, seconds


def hit_tokens(reaches: Sequence[Reach], tokens_per_s: float) -> int:
    """How much of a prompt an engine of this rate would not compute."""
    return _hit(reaches, tokens_per_s)[0]


def pick(
    scored: Sequence[Scored],
    wanted: Wanted,
    rejected: Sequence[tuple[str, Rejection]],
    parameters: RoutingParameters,
) -> Decision:
    """The home when it is nearly as good as the best, else rendezvous among the nearly best."""
    least = min(one.cost_s for one in scored)
    reason: Reason = "home"
    chosen = _pick_home(scored, wanted, least, parameters)
    if chosen is None:
        near = [one for one in scored if one.cost_s <= least + parameters.window_s]
        chosen, reason = _pick_near(near, scored, wanted, parameters)
    return Decision(
        wanted=wanted,
        chosen=chosen,
        affinity=affinity(wanted, chosen.candidate.node_id),
        reason=reason,
        scored=tuple(scored),
        rejected=tuple(rejected),
    )


def _pick_home(
    scored: Sequence[Scored], wanted: Wanted, least: float, parameters: RoutingParameters
) -> Scored | None:
    for one in scored:
        if one.candidate.node_id == wanted.home:
            rate = _rate(one.candidate, parameters)
            slack_s = max(parameters.window_s, parameters.slack * wanted.prompt_tokens / rate)
            return one if one.cost_s <= least + slack_s else None
    return None


def _pick_near(
    near: Sequence[Scored],
    scored: Sequence[Scored],
    wanted: Wanted,
    parameters: RoutingParameters,
) -> tuple[Scored, Reason]:
    if len(near) == 1:
        return near[0], "least_cost"
    # A node's share of the bound is its share of the fleet's rate.
    sequences = sum([one.candidate.in_flight for one in scored]) + 1
    rate = sum([_rate(one.candidate, parameters) for one in scored])
    most_per_rate = parameters.load_bound * sequences / rate

    def load(one: Scored) -> float:
        return one.candidate.in_flight / _rate(one.candidate, parameters)

    key = wanted.order_key(max([one.hit_tokens for one in near]))
    ordered = sorted(near, key=lambda one: rendezvous(key, one.candidate), reverse=True)
    for one in ordered:
        if one.candidate.in_flight < ceil(most_per_rate * _rate(one.candidate, parameters)):
            return one, "rendezvous"
    return min(ordered, key=load), "least_in_flight"


def pick_in_turn(
    candidates: Sequence[Candidate],
    wanted: Wanted,
    rejected: Sequence[tuple[str, Rejection]],
    turn: int,
) -> Decision:
    """The baseline: the turn-th node in order of node_id, whatever it holds."""
    ordered = sorted(candidates, key=lambda one: (one.node_id, one.engine))
    chosen = Scored(ordered[turn % len(ordered)], 0, wanted.prompt_tokens)
    return Decision(
        wanted=wanted,
        chosen=chosen,
        affinity=affinity(wanted, chosen.candidate.node_id),
        reason="turn",
        scored=(chosen,),
        rejected=tuple(rejected),
    )


def affinity(wanted: Wanted, node_id: str) -> Affinity:
    """hit: home serves it; spill: a known session elsewhere; new: first seen; none: no signal."""
    if not wanted.has_affinity_key:
        return "none"
    if wanted.home is None:
        return "new"
    return "hit" if wanted.home == node_id else "spill"


def rendezvous(key: bytes, candidate: Candidate) -> bytes:
    """Weight of a node for a key; the greatest wins, and its loss moves only its own keys."""
    place = f"{candidate.node_id}\0{candidate.engine}".encode()
    return blake2b(place, key=key[:64], digest_size=8).digest()


def in_time(
    scored: Sequence[Scored], left_s: float
) -> tuple[list[Scored], list[tuple[str, Rejection]]]:
    """Those whose first token would come within left_s, and the others as rejected."""
    kept = [one for one in scored if one.first_token_s <= left_s]
    late: list[tuple[str, Rejection]] = [
        (one.candidate.node_id, "late") for one in scored if one.first_token_s > left_s
    ]
    return kept, late


def late_retry_after_s(
    scored: Sequence[Scored], deadline_s: float, parameters: RoutingParameters
) -> float:
    """When the best of them would meet the deadline if nothing else came: 0.5 to 30 s. The most,
    where a prompt takes longer by itself."""
    waits = [
        one.first_token_s - deadline_s
        for one in scored
        if one.uncached_tokens / _rate(one.candidate, parameters) + one.fetch_s <= deadline_s
    ]
    return retry_within_bounds(min(waits, default=MAX_RETRY_S))


def retry_within_bounds(wait_s: float) -> float:
    """Advice is neither an invitation to knock without pause nor to go away."""
    return min(MAX_RETRY_S, max(0.5, wait_s))


def retry_after_s(candidates: Sequence[Candidate], parameters: RoutingParameters) -> float:
    """When the least loaded of the full nodes may have room again: 0.5 to 30 s."""
    waits = [one.backlog_tokens / _rate(one, parameters) for one in candidates]
    return retry_within_bounds(min(waits, default=1.0))
