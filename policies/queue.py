"""The gateway's queue before one engine: how much the engine is given, and whose turn it is next.

An engine holds at most two token budgets of uncached work, so that what waits longer than that can
still be ordered, moved to another engine or given up here. Between tenants turns go by deficit
round robin (Shreedhar and Varghese, 1995) in uncached tokens, all weights equal; among a tenant's
own the shortest comes first, where waiting counts as work done at the engine's measured rate, so
nobody who came long enough later is ever put before another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from policies.backlog import Backlog, Credit

BUDGETS = 2  # of uncached work that an engine is given

What = TypeVar("What")


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Of one engine's queue. One that holds so many tokens takes no more, however short."""

    requests: int = 256
    tokens: int = 2_000_000


class Window:
    """What one engine may be given now, by its backlog as we know it.

    A prompt of more than the whole window is large: it enters when nothing else is outstanding.
    The engine computes at most one budget of it at a time and takes shorter ones in between, so
    that beside it one budget of others may enter, and no second large one.
    """

    def __init__(self, backlog: Backlog, budget_tokens: int) -> None:
        self.budget_tokens = max(1, budget_tokens)
        self.tokens = BUDGETS * self.budget_tokens
        self._backlog = backlog
        self._reported_at = 0.0
        self._large: Credit | None = None  # the one that was sent last
        # While nothing of ours is there and somebody waits: since when, and for how much of others.
        self._waits_since: float | None = None
        self._waits_for = 0

    @property
    def has_large(self) -> bool:
        return self._large is not None and self._large.tokens > 0

    def is_large(self, tokens: int) -> bool:
        return tokens > self.tokens

    def reported(self, now: float) -> None:
        """The backlog took a report in."""
        self._reported_at = now

    def outstanding(self, now: float, tokens_per_s: float) -> float:
        """Uncached tokens at the engine. While none is ours it computes those of others, so they
        are believed less as the report grows old."""
        backlog = self._backlog
        if backlog.sent > 0:
            return backlog.sent + backlog.others
        computed = tokens_per_s * max(0.0, now - self._reported_at)
        return max(0.0, backlog.others - computed)

    def fits(self, tokens: int, now: float, tokens_per_s: float) -> bool:
        """Whether a prompt with so many uncached tokens may be sent now."""
        if tokens + self._backlog.tokens <= self.tokens:  # whatever of it is here or there
            return True
        outstanding = self.outstanding(now, tokens_per_s)
        if self._backlog.sent == 0:
            outstanding = min(outstanding, self._owed(now, tokens_per_s))
        if self.is_large(tokens):
            return outstanding <= 0
        if self._large is not None:
            outstanding -= max(0, self._large.tokens - self.budget_tokens)
        return outstanding + tokens <= self.tokens

    def sent(self, credit: Credit) -> None:
        """A prompt was given to the engine."""
        self._waits_since = None
        if self.is_large(credit.tokens):
            self._large = credit

    def nobody_waits(self) -> None:
        """Whoever did not fit has left."""
        self._waits_since = None

    def _owed(self, now: float, tokens_per_s: float) -> float:
        """Of others' work, what was before who waits here now. What they ask for meanwhile is
        behind it, however often reports tell of more: gateways take turns, too."""
        if self._waits_since is None:
            self._waits_since, self._waits_for = now, self._backlog.others
        return max(0.0, self._waits_for - tokens_per_s * (now - self._waits_since))


@dataclass(slots=True, eq=False)
class Entry(Generic[What]):
    """One that waits. at: since when, on the clock of `now`."""

    what: What
    tenant: str
    tokens: int
    at: float


@dataclass(slots=True, eq=False)
class _Tenant(Generic[What]):
    name: str
    entries: list[Entry[What]] = field(default_factory=list)
    deficit: int = 0  # tokens that it may still send in this turn
    is_in_turn: bool = False  # it got its quantum

    @property
    def tokens(self) -> int:
        return sum([entry.tokens for entry in self.entries])

    def first(self, tokens_per_s: float, most: int | None = None) -> Entry[What] | None:
        """The one to be sent next, of those with at most so many tokens."""
        entries = self.entries
        if most is not None:
            entries = [entry for entry in entries if entry.tokens <= most]
        if not entries:
            return None
        return min(entries, key=lambda entry: entry.tokens + tokens_per_s * entry.at)


class FairQueue(Generic[What]):
    """Entries by tenant. `add` and `remove` as they come and leave, `take` as there is room."""

    def __init__(self, quantum_tokens: int, bounds: QueueBounds) -> None:
        self.tokens = 0
        self._quantum_tokens = max(1, quantum_tokens)
        self._bounds = bounds
        self._tenants: dict[str, _Tenant[What]] = {}
        self._turns: deque[_Tenant[What]] = deque()  # all of them, whose turn it is in front
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    @property
    def is_full(self) -> bool:
        return self._num_entries >= self._bounds.requests or self.tokens >= self._bounds.tokens

    @property
    def deficits(self) -> dict[str, int]:
        """Of the tenants that have something here."""
        return {tenant.name: tenant.deficit for tenant in self._turns}

    def entries(self) -> Iterable[Entry[What]]:
        for tenant in self._turns:
            yield from tenant.entries

    def add(self, entry: Entry[What]) -> None:
        """Ask is_full before: what must not be refused, because it was let in, is always taken."""
        tenant = self._tenants.get(entry.tenant)
        if tenant is None:
            tenant = self._tenants[entry.tenant] = _Tenant(entry.tenant)
            self._turns.append(tenant)
        tenant.entries.append(entry)
        self.tokens += entry.tokens
        self._num_entries += 1

    def remove(self, entry: Entry[What]) -> None:
        """It leaves by itself."""
        tenant = self._tenants[entry.tenant]
        tenant.entries.remove(entry)
        self.tokens -= entry.tokens
        self._num_entries -= 1
        if not tenant.entries:  # who has nothing here saves nothing up
            del self._tenants[tenant.name]
            self._turns.remove(tenant)

    def take(
        self,
        fits: Callable[[Entry[What]], bool],
        measure: Callable[[Entry[What]], int],
        tokens_per_s: float,
        *,
        most: int | None = None,
    ) -> Entry[What] | None:
        """Remove and return the entry whose turn it is; None if it does not fit now, for then
        nobody else may enter in its place either.

        measure: an entry's tokens as they are known now; those that came before may have computed
        a part of them. most: larger ones stand aside.
        """
        quantum = self._quantum_tokens
        while self._turns:
            nearest: int | None = None  # rounds until somebody may send
            for _ in range(len(self._turns)):
                tenant = self._turns[0]
                entry = self._first(tenant, measure, tokens_per_s, most)
                if entry is None:  # all stand aside; what it would be given is kept for the first
                    enough = max(tenant.deficit, min([one.tokens for one in tenant.entries]))
                    tenant.deficit = min(tenant.deficit + quantum, enough)
                else:
                    if not tenant.is_in_turn:
                        tenant.is_in_turn = True
                        tenant.deficit += quantum
                    if entry.tokens <= tenant.deficit:
                        if not fits(entry):
                            return None
                        tenant.deficit -= entry.tokens
                        self.remove(entry)
                        return entry
                    rounds = -(-(entry.tokens - tenant.deficit) // quantum)
                    nearest = rounds if nearest is None else min(nearest, rounds)
                tenant.is_in_turn = False
                self._turns.rotate(-1)
            if nearest is None:
                return None
            for tenant in self._turns:  # the rounds in which nobody may send, at once
                if tenant.first(tokens_per_s, most) is not None:
                    tenant.deficit += (nearest - 1) * quantum
        return None

    def before(self, entry: Entry[What], tokens_per_s: float) -> int:
        """Queued tokens that would be sent before it, be it here or yet to come: what ranks before
        it of its own tenant's, and of each other tenant's no more than its turns bring until then.
        """
        own, others = 0, 0
        rank = entry.tokens + tokens_per_s * entry.at
        mine = self._tenants.get(entry.tenant)
        if mine is not None:
            is_behind = False  # of equal ones who came first goes first
            for one in mine.entries:
                if one is entry:
                    is_behind = True
                    continue
                its_rank = one.tokens + tokens_per_s * one.at
                if its_rank < rank or (its_rank == rank and not is_behind):
                    own += one.tokens
        turns = own + entry.tokens + self._quantum_tokens
        for tenant in self._turns:
            if tenant is not mine:
                others += min(tenant.tokens, turns)
        return own + others

    def _first(
        self,
        tenant: _Tenant[What],
        measure: Callable[[Entry[What]], int],
        tokens_per_s: float,
        most: int | None,
    ) -> Entry[What] | None:
        entry = tenant.first(tokens_per_s)
        if entry is not None:
            self._resize(entry, measure(entry))
            if most is not None and entry.tokens > most:
                entry = tenant.first(tokens_per_s, most)
        return entry

    def _resize(self, entry: Entry[What], tokens: int) -> None:
        self.tokens += tokens - entry.tokens
        entry.tokens = tokens
