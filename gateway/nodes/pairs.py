"""Where a flow goes: to one node, or to a pair of which one computes the prompt for the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from gateway.nodes.engines import Engine
from gateway.nodes.node import Node
from gateway.nodes.pair_faults import PairFaults
from gateway.nodes.placement import Choice, NoCapacity, NoNode, Placement, TooLate, stores
from gateway.nodes.streams import Flow
from policies.contract import wire
from policies.contract.wire import Failed, Finished
from policies.pairing import (
    Computing,
    Decoding,
    Pairing,
    PairingParameters,
    SplitMode,
    Wanted,
    keep_whole,
    pair,
)
from policies.routing import Decision, RoutingParameters, Scored, affinity

Outcome = Literal["ok", "retried", "local", "failed", "left"]  # of an attempt that is a split

MAX_SPLITS = 2  # of a request; then it is computed where it was to be decoded
RETRYABLE = frozenset({"node_draining", "engine_lost", "engine_full"})  # faults of the place
TRANSFER_CODES = frozenset(  # faults of a pair
    f"transfer_{what}" for what in ("refused", "lost", "timeout", "corrupt", "layout")
)
CODES = RETRYABLE | TRANSFER_CODES | {"node_lost"}  # that are counted by name
ID_BYTES = 16
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine of a node, chosen. transfer: how prompt pages leave or reach it, encoded."""

    node: Node
    engine: Engine
    uncached_tokens: int
    transfer: bytes | None = None
    fetch_s: float = 0.0  # of what slower tiers hold of the prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the flow's lanes go, and who computes their prompt if another node does."""

    choice: Choice
    seat: Seat
    prefill: Seat | None = None


class Pairs:
    """The policy of pairing over the live nodes. draw: so many random bytes."""

    def __init__(
        self,
        node_by_id: Mapping[str, Node],
        placement: Placement,
        routing: RoutingParameters,
        mode: SplitMode,
        parameters: PairingParameters,
        draw: Callable[[int], bytes],
    ) -> None:
        self._node_by_id = node_by_id
        self._placement = placement
        self._routing = routing
        self._mode = mode
        self._parameters = parameters
        self._draw = draw
        self.outcomes: Counter[Outcome] = Counter()
        self.failures: Counter[str] = Counter()  # by code
        self._faults = PairFaults()

    def plan(self, flow: Flow, now: float, *, is_last: bool) -> Plan:
        """Raises NoNode, NoCapacity or TooLate. is_last: no other attempt will follow, so it is no
        split."""
        if all(
            [node.role.current == "mixed" for node in self._node_by_id.values() if node.session]
        ):
            decision = self._placement.decide(flow, now)
            return Plan(Choice("mixed", decision), self._seat(decision.chosen))
        decision = self._placement.decide(flow, now, may_be_late=True)
        sampling = flow.dispatch.sampling
        wanted = Wanted(
            prompt_tokens=len(flow.dispatch.prompt),
            lanes=len(flow.lanes),
            prompt_logprobs=sampling.prompt_logprobs is not None,
            may_split=flow.num_splits < MAX_SPLITS and not is_last,
        )
        prefill: Decision | None = None
        if (why := keep_whole(wanted, self._mode)) is not None:
            pairing = Pairing(why, uncached_tokens=decision.chosen.uncached_tokens)
        else:
            pairing, prefill = self._pair(flow, wanted, decision, now, self._mode)
        if flow.ttft_by is not None:
            return self._plan_in_time(flow, wanted, decision, pairing, prefill, now)
        if prefill is not None and pairing.decoder is not None:
            return self._split(decision, prefill, pairing, pairing.decoder)
        return self._bypass(flow, decision, pairing, prefill)

    def _plan_in_time(
        self,
        flow: Flow,
        wanted: Wanted,
        decision: Decision,
        pairing: Pairing,
        prefill: Decision | None,
        now: float,
    ) -> Plan:
        """Whole or by a pair as it was weighed where that is in time, else the other of the two.

        The decision of the whole may be a late one; that of the prefill is not.
        """
        if prefill is not None and pairing.decoder is not None:
            return self._split(decision, prefill, pairing, pairing.decoder)
        try:
            whole = self._placement.decide(flow, now)
        except TooLate:
            if keep_whole(wanted, self._mode) is not None:
                raise
            pairing, prefill = self._pair(flow, wanted, decision, now, SplitMode.ALWAYS)
            if prefill is None or pairing.decoder is None:
                raise
            return self._split(decision, prefill, pairing, pairing.decoder)
        return self._bypass(flow, whole, pairing, prefill)

    def _bypass(
        self, flow: Flow, decision: Decision, pairing: Pairing, prefill: Decision | None
    ) -> Plan:
        for one in decision.scored:
            if one.candidate.node_id == flow.stays_on:
                decision = _moved(decision, one)
        choice = Choice("bypass", decision, pairing, prefill)
        return Plan(choice, self._seat(decision.chosen))

    def failed(self, flow: Flow, code: str, now: float, *, prefill: bool) -> None:
        """Its present attempt, which is to be followed by another one elsewhere. prefill: by the
        prefill node's fault. Whose fault a broken transfer is nobody knows; decode has pages of
        it, so prefill is exchanged."""
        node_id, _, prefill_node, _ = flow.tries[-1]
        if prefill_node is not None:
            self.failures[code if code in CODES else "other"] += 1
            if code in TRANSFER_CODES:
                self._faults.failed(prefill_node, node_id, now)
                prefill = True
        if prefill and prefill_node is not None:
            flow.faulty.add(prefill_node)
            flow.stays_on = node_id
        else:
            flow.faulty.add(node_id)
            flow.stays_on = None

    def replaced(self, flow: Flow) -> None:
        """The attempt before the present one failed."""
        before, last = flow.tries[-2:]
        if before.prefill_node is not None:
            self.outcomes["local" if last.prefill_node is None else "retried"] += 1

    def ended(self, flow: Flow, end: Finished | Failed) -> None:
        """The flow is over."""
        node_id, _, prefill_node, _ = flow.tries[-1]
        if prefill_node is None:
            return
        if flow.is_answered:
            self.outcomes["ok"] += 1
            self._faults.worked(prefill_node, node_id)
        else:
            self.outcomes["left" if isinstance(end, Finished) else "failed"] += 1

    def _pair(
        self, flow: Flow, wanted: Wanted, decision: Decision, now: float, mode: SplitMode
    ) -> tuple[Pairing, Decision | None]:
        """No pair is one that would be too late."""
        whole = self._computing(decision.chosen)
        try:
            prefill = self._placement.decide(flow, now, "prefill")
        except (NoNode, NoCapacity):
            return Pairing("no_pair", uncached_tokens=whole.uncached_tokens), None
        source = self._engine(prefill.chosen).info
        decoders = [
            self._decoding(one, wanted.prompt_tokens, source)
            for one in decision.scored
            if self._can_decode(one, prefill.chosen, now)
        ]
        computing = self._computing(prefill.chosen)
        return pair(wanted, whole, computing, decoders, mode, self._parameters), prefill

    def _can_decode(self, one: Scored, prefill: Scored, now: float) -> bool:
        """Whether pages of prefill mean the same there and get there; in another precision only
        where no exact answer is promised, as it would not be decode's own."""
        node_id = one.candidate.node_id
        node, engine = self._node_by_id[node_id], self._engine(one)
        source = self._engine(prefill).info
        is_exact = source.compute == "exact"
        return (
            node.role.current != "prefill"
            and node.splits(engine)
            and engine.info.identity == source.identity
            and engine.info.page_size == source.page_size
            and (not is_exact or engine.info.layout_id == source.layout_id)
            and self._faults.allows(prefill.candidate.node_id, node_id, now)
        )

    def _split(
        self, decision: Decision, prefill: Decision, pairing: Pairing, decoder: Decoding
    ) -> Plan:
        chosen = next(
            one
            for one in decision.scored
            if (one.candidate.node_id, one.candidate.engine) == (decoder.node_id, decoder.engine)
        )
        seat, source = self._seat(chosen), self._seat(prefill.chosen)
        is_return = _sends_back(seat.engine, source.engine)
        at_decode = wire.Transfer(
            transfer_id=self._draw(ID_BYTES),
            secret=self._draw(SECRET_BYTES),
            peer=source.engine.info.peer,
            return_id=self._draw(ID_BYTES) if is_return else b"",
            return_secret=self._draw(SECRET_BYTES) if is_return else b"",
        )
        at_prefill = msgspec.structs.replace(at_decode, peer=seat.engine.info.peer)
        return Plan(
            Choice("split", _moved(decision, chosen), pairing, prefill),
            replace(seat, uncached_tokens=0, transfer=wire.encode(at_decode)),
            replace(source, transfer=wire.encode(at_prefill)),
        )

    def _seat(self, one: Scored) -> Seat:
        node = self._node_by_id[one.candidate.node_id]
        return Seat(node, self._engine(one), one.uncached_tokens, fetch_s=one.fetch_s)

    def _engine(self, one: Scored) -> Engine:
        candidate = one.candidate
        return self._node_by_id[candidate.node_id].engine_by_index[candidate.engine]

    def _computing(self, one: Scored) -> Computing:
        candidate, report = one.candidate, self._engine(one).report
        return Computing(
            node_id=candidate.node_id,
            engine=candidate.engine,
            uncached_tokens=one.uncached_tokens,
            backlog_tokens=candidate.backlog_tokens,
            tokens_per_s=candidate.tokens_per_s or self._routing.fallback_tokens_per_s,
            fetch_s=one.fetch_s,
            decoding=max(candidate.in_flight, report.running_sequences if report else 0),
        )

    def _decoding(self, one: Scored, prompt_tokens: int, source: wire.EngineInfo) -> Decoding:
        """Pages travel in the smaller of the two forms."""
        candidate, engine = one.candidate, self._engine(one)
        report = engine.report
        return Decoding(
            node_id=candidate.node_id,
            engine=candidate.engine,
            missing_tokens=prompt_tokens - one.hit_tokens,
            context_tokens=engine.context_tokens,
            capacity_tokens=engine.capacity_tokens,
            bytes_per_token=min(engine.info.page_bytes, source.page_bytes) / source.page_size,
            bytes_per_s=report.import_bytes_per_s if report else 0.0,
        )


def _moved(decision: Decision, chosen: Scored) -> Decision:
    """The same with another choice among its candidates."""
    told = affinity(decision.wanted, chosen.candidate.node_id)
    return replace(decision, chosen=chosen, affinity=told)


def _sends_back(decode: Engine, prefill: Engine) -> bool:
    """Whether decode should bring what it computes to prefill: not where pages mean something else
    there, nor where a store that both use brings them."""
    if decode.info.layout_id != prefill.info.layout_id:
        return False
    return set(stores(decode)).isdisjoint(stores(prefill))
