"""Sends nodes the roles that were ordered, and orders them itself where the fleet keeps balance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog

from gateway.nodes.node import Node
from gateway.nodes.served import ServedModels
from policies.contract import wire
from policies.placement import NodeLoad, PlacementParameters, RoleBalance

log = structlog.get_logger("kagari.nodes")

OBSERVE_S = 1.0


class Balance:
    """parameters None: roles are as they are ordered. `tick` does what is due."""

    def __init__(
        self,
        node_by_id: Mapping[str, Node],
        served: ServedModels,
        parameters: PlacementParameters | None,
        fallback_tokens_per_s: float,
    ) -> None:
        self.prompt_tokens = 0  # uncached ones of prompts that are worth a split, so far
        self._node_by_id = node_by_id
        self._served = served
        self._roles = None if parameters is None else RoleBalance(parameters)
        self._fallback_tokens_per_s = fallback_tokens_per_s
        self._observed_at = 0.0

    def tick(self, now: float) -> None:
        if self._roles is not None and now - self._observed_at >= OBSERVE_S:
            self._observed_at = now
            move = self._roles.observe(list(self._loads()), self.prompt_tokens, now)
            if move is not None:
                self._node_by_id[move.node_id].role.ask(move.role, now)
                log.info("role_moves", node=move.node_id, role=move.role, reason=move.reason)
        for node in self._node_by_id.values():
            session = node.session
            if session is None:
                continue
            role = node.role.due(now, is_idle=session.in_flight == 0)
            if role is not None:
                session.outbox.send_urgent(wire.encode(wire.SetRole(role)))
                log.info("role_ordered", node=node.node_id, role=role, was=node.role.current)

    def _loads(self) -> Iterable[NodeLoad]:
        for node in self._node_by_id.values():
            if self._served.state(node) != "ready":
                continue
            engines = node.engine_by_index.values()
            yield NodeLoad(
                node.node_id,
                node.role.current,
                sum([one.tokens_per_s or self._fallback_tokens_per_s for one in engines]),
                sum([one.context_tokens for one in engines]),
                sum([one.capacity_tokens for one in engines]),
                node.role.is_switching,
            )
