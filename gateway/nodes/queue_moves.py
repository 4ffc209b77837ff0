"""What is queued where it would be late, or for a node that changed, goes to another place, else
away; it was sent to none before, so that costs it nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from gateway.nodes.node import Node
from gateway.nodes.pairs import Seat
from gateway.nodes.placement import NoCapacity, NoNode, TooLate
from gateway.nodes.queued import Queues
from gateway.nodes.streams import Flow
from policies.routing import retry_within_bounds

log = structlog.get_logger("kagari.nodes")


class QueueMoves:
    """`tick` and `node_changed` when they are due. replace: take a flow to another place now; where
    there is none it stays, and why is returned. fail: end it by this code and message."""

    def __init__(
        self,
        queues: Queues,
        replace: Callable[[Flow, float], NoNode | NoCapacity | None],
        fail: Callable[[Flow, str, str], None],
    ) -> None:
        self._queues = queues
        self._replace = replace
        self._fail = fail

    def tick(self, now: float) -> None:
        """Give up what is late, move what would be late here."""
        for entry in self._queues.entries():
            flow = entry.what.flow
            if flow.queued is not entry:  # it moved meanwhile
                continue
            if flow.deadline <= now:
                self._queues.sheds["deadline"] += 1
                self._fail(flow, "deadline_exceeded", "its deadline passed in the gateway's queue")
            elif flow.ttft_by is not None:
                first_token_s = self._queues.first_token_s(entry, now, flow.ttft_by - now)
                if now + first_token_s > flow.ttft_by:
                    self._spill(flow, first_token_s, now)

    def _spill(self, flow: Flow, first_token_s: float, now: float) -> None:
        """Its first token would be late here: to another engine, else away before it costs any."""
        refusal = self._replace(flow, now)
        if refusal is None:
            return
        self._queues.sheds["ttft_queued"] += 1
        if isinstance(refusal, TooLate):
            flow.retry_after_s = refusal.retry_after_s
        else:
            limit_s = flow.dispatch.ttft_deadline_s or 0.0
            flow.retry_after_s = retry_within_bounds(first_token_s - limit_s)
        self._fail(flow, "ttft_missed", f"first token in {first_token_s:.3g} s; {refusal}")

    def node_changed(self, node: Node, now: float) -> None:
        """What is queued for it goes elsewhere if it serves no more."""
        if not node.num_queued:
            return
        for entry in self._queues.entries():
            flow, queued = entry.what.flow, entry.what
            if flow.queued is not entry or node not in queued.nodes:
                continue
            for seat in (queued.seat, queued.prefill):
                if seat is None or seat.node is not node:
                    continue
                why = _unfit(seat)
                if why is not None:
                    self._leave(flow, *why, now=now)
                    break

    def _leave(self, flow: Flow, code: str | None, why: str, *, now: float) -> None:
        refusal = self._replace(flow, now)
        if refusal is None:
            log.info("requeued", request_id=flow.dispatch.request_id, why=why)
        elif code is not None:
            self._fail(flow, code, f"{why}; {refusal}")


def _unfit(seat: Seat) -> tuple[str | None, str] | None:
    """Why it is better sent elsewhere now; without a code it can be sent there yet."""
    node, engine = seat.node, seat.engine
    if node.session is None:
        return "node_lost", f"node {node.node_id} was lost"
    if node.engine_by_index.get(engine.info.engine) is not engine or not engine.ready:
        return "engine_lost", f"an engine of {node.node_id} went down"
    if node.draining_itself:  # it takes nothing new
        return "node_draining", f"node {node.node_id} drains"
    if node.drained_by_operator or node.suspect or node.role.is_switching:
        return None, f"node {node.node_id} drains, is suspect or changes its role"
    return None
