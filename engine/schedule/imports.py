"""What other engines bring: prompts that a peer computes for a sequence of this one.

    begin ─▶ take_room ─▶ Arrived: its pages are published as they come … ─▶ Received: it runs

A sequence gets pages for its whole prompt or none, so that no two can wait for each other's. All of
them keep a transfer hold until nobody writes to them any more, whatever becomes of the sequence.

Where a page that it lacks is being brought for another, it waits for that before it takes room, as
long as that one gets on: so of one prefix most is brought once. Only what has its room is waited
for, and that waits for nobody here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.schedule.outcomes import OVER, Grown, Lost, Outcome, TakenOver
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.prefix_cache import PrefixCache
from engine.schedule.sequence import Sequence, State
from engine.schedule.transfer_orders import (
    Arrived,
    Expect,
    Handover,
    Import,
    Received,
    TransferFailed,
    TransferNews,
    TransferOrder,
    TransferQuiet,
    Withdraw,
)

GETS_ON_S = 1.0  # without a page, and nobody waits for it: a step or two of most engines


@dataclass(slots=True, eq=False)
class _Import:
    sequence: Sequence | None  # that waits for it; None: it has what it needs, or is over
    held: list[PageId] = field(default_factory=list)  # of the whole prompt; none: no room yet
    arrived: int = 0  # leading pages that are in place
    keys: list[bytes] = field(default_factory=list)  # of full pages, once there is room
    moved_at: float = 0.0  # when it last got on


class Imports:
    """Books by transfer id. give: takes an order."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        *,
        page_size: int,
        vocab_size: int,
        give: Callable[[TransferOrder], None],
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._give = give
        self._imports: dict[bytes, _Import] = {}
        self._moving: set[bytes] = set()
        self._coming: dict[bytes, _Import] = {}  # by key of a page that is brought, or is to be

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._imports

    def __len__(self) -> int:
        return len(self._imports)

    @property
    def num_moving(self) -> int:
        """Sequences that have their pages and will run when these are written."""
        return len(self._moving)

    def begin(self, sequence: Sequence) -> None:
        """A peer will offer this prompt; it may wait until there is room."""
        transfer = sequence.transfer
        assert transfer is not None
        self._imports[transfer.transfer_id] = _Import(sequence)
        deadline = sequence.deadline
        self._give(Expect(transfer.transfer_id, transfer.secret, deadline, is_asked=True))

    def is_coming(self, key: bytes, now: float) -> bool:
        """Whether this page is being brought for a sequence, and not for nothing."""
        entry = self._coming.get(key)
        return entry is not None and now - entry.moved_at < GETS_ON_S

    def take_room(self, sequence: Sequence, spare: Callable[[], int], now: float) -> bool:
        """Let a sequence have pages for its prompt, those found in the cache first; False: they do
        not fit. spare: how many may be had beside those that are held."""
        transfer = sequence.transfer
        assert transfer is not None
        keys = sequence.hit_keys(self._page_size)
        pages = self._cache.hold_prefix(keys, len(keys))
        num_found, num_pages = len(pages), -(-sequence.num_prompt // self._page_size)
        if num_pages - num_found <= spare():
            lacks, owner = num_pages - num_found, sequence.whose.owner
            pages += self._cache.take(lacks, HoldKind.SEQUENCE, now, owner)
        if len(pages) < num_pages:
            self._pool.release(reversed(pages), HoldKind.SEQUENCE)
            return False
        self._pool.hold(pages, HoldKind.TRANSFER)
        entry = self._imports[transfer.transfer_id]
        entry.held, entry.arrived, entry.moved_at = list(pages), num_found, now
        entry.keys = sequence.page_keys(sequence.num_prompt // self._page_size, self._page_size)
        # Over those of one that has stood still: others wait for the one that gets on.
        self._coming.update(dict.fromkeys(entry.keys[num_found:], entry))
        self._moving.add(transfer.transfer_id)
        generations = [self._pool.generations[page] for page in pages]
        num_computed = num_found * self._page_size
        sequence.admit(
            pages, generations, num_computed=num_computed, num_sealed=num_found, state=State.MOVING
        )
        self._give(
            Import(
                transfer.transfer_id,
                transfer.secret,
                tuple(entry.keys),
                sequence.num_prompt,
                num_found,
                tuple(pages[num_found:]),
                tuple(generations[num_found:]),
                sequence.deadline,
            )
        )
        return True

    def leave(self, sequence: Sequence, code: str, message: str) -> None:
        """A sequence is over; its pages stay held as long as they may be written."""
        assert sequence.transfer is not None
        transfer_id = sequence.transfer.transfer_id
        entry = self._imports.get(transfer_id)
        if entry is not None and entry.sequence is sequence:
            self._part(transfer_id)
            self._give(Withdraw(transfer_id, code, message))

    def take(self, news: TransferNews, now: float) -> Outcome | None:
        transfer_id = news.transfer_id
        entry = self._imports[transfer_id]
        sequence = entry.sequence
        match news:
            case TransferQuiet():
                self._part(transfer_id)
                del self._imports[transfer_id]
                self._pool.release(reversed(entry.held), HoldKind.TRANSFER)
                if sequence is not None:
                    return Lost(sequence, "transfer_lost", OVER)
            case Arrived(first=first, count=count) if (
                sequence and entry.held and first == entry.arrived
            ):
                self._come(entry, entry.arrived, entry.arrived + count)
                entry.arrived, entry.moved_at = entry.arrived + count, now
                return Grown(sequence, entry.arrived)
            case Received(handover=handover) if sequence:
                fault = self._fault(entry, sequence, handover)
                self._part(transfer_id)
                if fault is None:
                    assert handover is not None
                    return TakenOver(sequence, handover)
                self._give(Withdraw(transfer_id, "transfer_corrupt", fault))
                return Lost(sequence, "transfer_corrupt", fault)
            case TransferFailed(code=code, message=message) if sequence:
                self._part(transfer_id)
                return Lost(sequence, code, message)
        return None  # an offer that waits for room, or something told twice or too late

    def _part(self, transfer_id: bytes) -> None:
        """Its sequence has what it needs, or will not get it."""
        entry = self._imports[transfer_id]
        entry.sequence = None
        self._moving.discard(transfer_id)
        self._come(entry, entry.arrived, len(entry.keys))

    def _come(self, entry: _Import, first: int, stop: int) -> None:
        """These of its pages are there, or will not be."""
        for key in entry.keys[first:stop]:
            if self._coming.get(key) is entry:
                del self._coming[key]

    def _fault(self, entry: _Import, sequence: Sequence, handover: Handover | None) -> str | None:
        """What a handover cannot be."""
        if handover is None:
            return "handover: found none, allowed one with the first token"
        num_pages = len(entry.held)
        if not num_pages or entry.arrived < num_pages:
            return f"pages: found {entry.arrived}, allowed all {num_pages}"
        if not 0 <= handover.token < self._vocab_size:
            return f"token: found {handover.token}, allowed below {self._vocab_size}"
        slower = (handover.host_tokens, handover.disk_tokens, handover.cluster_tokens)
        cached = handover.cached_tokens
        if min(slower) < 0 or not sum(slower) <= cached < sequence.num_prompt:
            return (
                f"cached_tokens: found {cached}, of them {slower} of slower tiers, allowed below "
                f"{sequence.num_prompt} and no less than its parts"
            )
        if not 0.0 <= handover.queue_s < math.inf:
            return f"queue_s: found {handover.queue_s}, allowed seconds from 0"
        if (handover.logprob is None) != (sequence.sampling.logprobs is None):
            return "logprob: found one that was not asked for, or none that was"
        return None

    def holds(self) -> Iterator[PageId]:
        """Pages under transfer holds, once for each."""
        for entry in self._imports.values():
            yield from entry.held

    def invariants(self) -> None:
        """Raise AssertionError unless what is said to come is brought for somebody."""
        moving = [self._imports[transfer_id] for transfer_id in self._moving]
        assert all(entry.sequence is not None and entry.held for entry in moving)
        for key, entry in self._coming.items():
            assert entry in moving
            assert key in entry.keys[entry.arrived :]
