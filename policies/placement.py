"""Which node should change its role: one at a time, when one kind is short for long and the other
can spare it. A kind that nobody is of stays so, and the last of a kind stays.

Prefill nodes are short when uncached prompt tokens come faster than a share of what they compute,
decode nodes when contexts fill more than a share of their pools. A node moves only where those that
stay behind are not short without it, by a margin: so no load that stays as it is can bring it back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from policies.contract.wire import Role

SAMPLES = 16  # of the demand, in one window
MoveReason = Literal["prefill_short", "decode_short"]


class PlacementParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """defaults/pairing.toml says what each is for."""

    window_s: float = 60.0
    dwell_s: float = 300.0
    prefill_load: float = 0.75
    decode_fill: float = 0.7
    margin: float = 0.9


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A ready node, over its engines. is_switching: its role changes now."""

    node_id: str
    role: Role
    tokens_per_s: float  # of prefill
    context_tokens: int
    capacity_tokens: int
    is_switching: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    node_id: str
    role: Role  # from now on
    reason: MoveReason


class RoleBalance:
    """Watches a fleet's load and says when to move a node. Mixed nodes are let alone."""

    def __init__(self, parameters: PlacementParameters) -> None:
        self._parameters = parameters
        self._demand: deque[tuple[float, int]] = deque()  # (time, uncached tokens so far)
        self._short: MoveReason | None = None
        self._short_since = 0.0
        self._moved_at: float | None = None

    def observe(self, nodes: Sequence[NodeLoad], prompt_tokens: int, now: float) -> Move | None:
        """prompt_tokens: uncached ones that came since the beginning. Call it about once a second;
        a move counts as made."""
        rate = self._rate(prompt_tokens, now)
        move = None if rate is None else self._wish(nodes, rate)
        if (move.reason if move else None) != self._short:
            self._short = move.reason if move else None
            self._short_since = now
        if (
            move is None
            or now - self._short_since < self._parameters.window_s
            or any(node.is_switching for node in nodes)
            or (self._moved_at is not None and now - self._moved_at < self._parameters.dwell_s)
        ):
            return None
        self._moved_at = self._short_since = now
        return move

    def _rate(self, prompt_tokens: int, now: float) -> float | None:
        """Tokens per second over the last window; None before there was one."""
        demand, window_s = self._demand, self._parameters.window_s
        if not demand or now - demand[-1][0] >= window_s / SAMPLES:
            demand.append((now, prompt_tokens))
        while len(demand) > 1 and now - demand[1][0] >= window_s:
            demand.popleft()
        began, tokens = demand[0]
        return (prompt_tokens - tokens) / (now - began) if now - began >= window_s else None

    def _wish(self, nodes: Sequence[NodeLoad], rate: float) -> Move | None:
        prefill = [node for node in nodes if node.role == "prefill"]
        decode = [node for node in nodes if node.role == "decode"]
        computes = self._parameters.prefill_load * sum([one.tokens_per_s for one in prefill])
        holds = self._parameters.decode_fill * sum([one.capacity_tokens for one in decode])
        context = sum([one.context_tokens for one in decode])
        if rate > computes and context <= holds and prefill and len(decode) > 1:
            spare = min(decode, key=lambda one: (one.context_tokens, one.node_id))
            left = holds - self._parameters.decode_fill * spare.capacity_tokens
            if context <= self._parameters.margin * left:
                return Move(spare.node_id, "prefill", "prefill_short")
        elif context > holds and rate <= computes and decode and len(prefill) > 1:
            spare = min(prefill, key=lambda one: (one.tokens_per_s, one.node_id))
            left = computes - self._parameters.prefill_load * spare.tokens_per_s
            if rate <= self._parameters.margin * left:
                return Move(spare.node_id, "decode", "decode_short")
        return None
