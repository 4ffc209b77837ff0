"""One stream of tokens: an append-only history, and how much of it is computed in which pages.

[0, cached)             shared: pages that a prefix hit, or a fork, brought
[cached, num_computed)  written; pages are published as they seal
[num_computed, tokens)  to be computed: a prompt's rest, a resumed history, or one new token
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from enum import Enum

from engine.schedule.pages import PageId
from engine.schedule.prefix_cache import Provenance
from engine.schedule.transfer_orders import Handover
from policies.contract.page_keys import max_hit_pages, next_key
from policies.contract.wire import Role, Sampling, Tier, Transfer, Usage, pack_ids

SLOWER_TIERS: tuple[Tier, ...] = ("host", "disk", "cluster")  # in the order of Usage's fields


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    MOVING = "moving"  # computed for another engine, or being taken over from one
    FINISHED = "finished"


_NEXT_STATES = {
    State.WAITING: (State.RUNNING, State.MOVING, State.FINISHED),
    State.RUNNING: (State.WAITING, State.MOVING, State.FINISHED),  # waiting again: preempted
    State.MOVING: (State.WAITING, State.RUNNING, State.FINISHED),  # waiting again: let go of
    State.FINISHED: (),
}


@dataclass(frozen=True, slots=True)
class NewSequence:
    """key_root: policies.contract.page_keys.seed(…) of model and tenant. deadline: monotonic.
    fork_of: the sequence of the same prompt and root whose pages this one waits for. owner:
    page_keys.owner_tag of the tenant. retention_s: its pages are kept so long where they can be.
    role: prefill computes the prompt for the peer of the transfer, decode takes it over from it."""

    sequence_id: int
    prompt: array[int]
    key_root: bytes
    sampling: Sampling
    deadline: float | None = None
    fork_of: int | None = None
    owner: bytes = b""
    retention_s: float = 0.0
    role: Role = "mixed"
    transfer: Transfer | None = None


class Sequence:
    """num_computed chases len(tokens); prefill, decode and resumption differ in nothing else."""

    __slots__ = (
        "arrived_at",
        "asks",
        "cached_tokens",
        "deadline",
        "first_planned_at",
        "fork_of",
        "generations",
        "hoped_pages",
        "keys",
        "num_computed",
        "num_prompt",
        "num_sealed",
        "num_told",
        "page_table",
        "penalises",
        "publishes",
        "retention_s",
        "role",
        "sampling",
        "sequence_id",
        "started",
        "state",
        "tier_tokens",
        "tokens",
        "transfer",
        "whose",
    )

    def __init__(self, new: NewSequence, now: float) -> None:
        self.sequence_id = new.sequence_id
        self.tokens = array("I", new.prompt)
        self.num_prompt = len(new.prompt)
        self.num_computed = 0
        self.num_sealed = 0  # pages that were published, or came from the cache
        self.sampling = sampling = new.sampling
        # Prompt tokens whose log probabilities are told, or never will be; the first has none.
        self.num_told = 1 if sampling.prompt_logprobs is not None else self.num_prompt
        self.penalises = (
            sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty != 0.0
            or sampling.presence_penalty != 0.0
        )
        self.fork_of = new.fork_of
        self.role = new.role  # mixed, once it has been taken over
        self.transfer = new.transfer
        self.deadline = math.inf if new.deadline is None else new.deadline
        self.arrived_at = now
        self.first_planned_at = now
        self.cached_tokens = 0  # of the first admission: what the client did not pay in full
        self.started = False
        self.state = State.WAITING
        self.tier_tokens: dict[Tier, int] = {}  # of the cached ones: what slower tiers brought
        self.whose = Provenance(new.key_root, new.owner)
        self.retention_s = new.retention_s
        self.publishes = True  # until its tenant is purged
        self.asks = 0  # of slower tiers, since it began to wait
        self.hoped_pages = 0  # leading pages that the last ask promised
        self.keys: list[bytes] = []
        self.page_table: tuple[list[PageId], ...] = ([],)
        self.generations: tuple[list[int], ...] = ([],)

    def transition(self, state: State) -> None:
        """The only way to change state; raises ValueError on a step the table does not know."""
        if state not in _NEXT_STATES[self.state]:
            raise ValueError(f"sequence {self.sequence_id}: {self.state.value} → {state.value}")
        self.state = state

    @property
    def num_completion(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    def is_computed(self, num_tokens: int) -> bool:
        """Whether it runs and its first num_tokens are in its pages."""
        return self.state is State.RUNNING and self.num_computed >= num_tokens

    def usage(self, keep: int | None = None) -> Usage:
        """Tokens so far; keep clips the completion (a stop string was matched earlier)."""
        produced = self.num_completion
        completion = produced if keep is None else min(max(keep, 0), produced)
        return Usage(
            self.num_prompt,
            self.cached_tokens,
            completion,
            *self.slower_tokens,
        )

    @property
    def queue_s(self) -> float:
        """From its arrival to its first step's plan."""
        return self.first_planned_at - self.arrived_at

    @property
    def slower_tokens(self) -> tuple[int, ...]:
        """Of the cached ones, what each slower tier brought."""
        return tuple(self.tier_tokens.get(tier, 0) for tier in SLOWER_TIERS)

    @property
    def slowest_tier(self) -> Tier:
        """That its cached tokens came from."""
        return next((tier for tier in reversed(SLOWER_TIERS) if tier in self.tier_tokens), "device")

    def retain_until(self, now: float) -> float:
        """Until when its pages are to be kept, if it was asked for; else 0."""
        return now + self.retention_s if self.retention_s > 0 else 0.0

    def page_keys(self, num_pages: int, page_size: int) -> list[bytes]:
        """Keys of the first num_pages full pages of the history; grown as the history grows."""
        keys = self.keys
        parent = keys[-1] if keys else self.whose.root
        for start in range(len(keys) * page_size, num_pages * page_size, page_size):
            parent = next_key(parent, pack_ids(self.tokens[start : start + page_size]))
            keys.append(parent)
        return keys[:num_pages]

    def hit_keys(self, page_size: int) -> list[bytes]:
        """Keys that a prefix hit may cover: the last token is always computed, and so is every
        prompt token that is still to be told of, and the one before it."""
        keys = self.page_keys(max_hit_pages(len(self.tokens), page_size), page_size)
        if self.num_told < self.num_prompt:
            return keys[: max_hit_pages(self.num_told, page_size)]
        return keys

    def prompt_logprobs(self, start: int, end: int) -> range | None:
        """The prompt tokens that computing [start, end) tells of, from the logits before each."""
        told = range(max(start + 1, self.num_told), min(end + 1, self.num_prompt))
        return told or None

    def admit(
        self,
        pages: list[PageId],
        generations: list[int],
        *,
        num_computed: int,
        num_sealed: int,
        state: State = State.RUNNING,
    ) -> None:
        """Start to run, or to be taken over, on these pages (maybe none); the first num_sealed are
        shared."""
        self.transition(state)
        self.page_table = (pages,)
        self.generations = (generations,)
        self.num_sealed = num_sealed
        self.num_computed = num_computed

    def take_over(self, handover: Handover) -> None:
        """Its prompt was computed elsewhere; from now on it is like any other."""
        self.role = "mixed"
        self.num_computed = self.num_prompt
        self.cached_tokens = handover.cached_tokens
        slower = (handover.host_tokens, handover.disk_tokens, handover.cluster_tokens)
        counts = zip(SLOWER_TIERS, slower, strict=True)
        self.tier_tokens = {tier: count for tier, count in counts if count}
        self.first_planned_at = self.arrived_at + handover.queue_s

    def grow(self, pages: list[PageId], generations: list[int]) -> None:
        """Add pages at the end. Rows keep the lists that they were given: new ones replace them."""
        self.page_table = (self.page_table[0] + pages,)
        self.generations = (self.generations[0] + generations,)

    def leave(self, state: State) -> list[PageId]:
        """Stop running; returns the pages given up, tail first, so that tails are evicted first."""
        self.transition(state)
        (pages,) = self.page_table
        self.page_table = ([],)
        self.generations = ([],)
        self.num_sealed = 0
        self.num_computed = 0
        self.asks = self.hoped_pages = 0
        return pages[::-1]
