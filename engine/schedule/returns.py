"""Chains that come home: what a peer decoded behind a prompt that was computed here is kept for the
conversation's next turn, where there is room that nobody else needs.

    expect ─▶ Offered ─▶ Import of what is lacking, or Withdraw ─▶ Arrived: published …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.schedule.outcomes import Outcome, Returned
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.prefix_cache import PrefixCache, Provenance
from engine.schedule.sequence import Sequence
from engine.schedule.shelf import Chain
from engine.schedule.transfer_orders import (
    Arrived,
    Expect,
    Import,
    Offered,
    TransferFailed,
    TransferNews,
    TransferOrder,
    TransferQuiet,
    Withdraw,
)

GRACE_S = 60.0  # behind a request's deadline: then nobody brings anything of it
_MOST_EXPECTED = 512  # chains that have not come
_RETURNING_SHARE = 2  # of the pool's pages may be held for them


@dataclass(slots=True, eq=False)
class _Return:
    secret: bytes
    prompt_keys: list[bytes]
    whose: Provenance
    retain_s: float
    deadline: float
    is_wanted: bool = True
    keys: list[bytes] = field(default_factory=list)  # of what was offered, as far as it is taken
    held: list[PageId] = field(default_factory=list)  # theirs; those found in the cache first
    arrived: int = 0  # leading pages that are in place


class Returns:
    """Books by transfer id. give: takes an order. spare: pages that nobody needs, beside those that
    are held."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        *,
        page_size: int,
        give: Callable[[TransferOrder], None],
        spare: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._give = give
        self._spare = spare
        self._most_held = pool.num_pages // _RETURNING_SHARE
        self._returns: dict[bytes, _Return] = {}

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._returns

    def expect(self, sequence: Sequence) -> None:
        """Its peer may bring the whole conversation when it has answered."""
        transfer = sequence.transfer
        assert transfer is not None
        if not transfer.return_id:
            return
        waiting = [
            key for key, entry in self._returns.items() if entry.is_wanted and not entry.keys
        ]
        if len(waiting) >= _MOST_EXPECTED:
            self.withdraw(waiting[0], "there are too many")
        deadline = sequence.deadline + GRACE_S
        self._returns[transfer.return_id] = _Return(
            transfer.return_secret,
            sequence.page_keys(sequence.num_prompt // self._page_size, self._page_size),
            sequence.whose,
            sequence.retention_s,
            deadline,
        )
        self._give(Expect(transfer.return_id, transfer.return_secret, deadline))

    def withdraw(self, transfer_id: bytes, message: str) -> None:
        """Nothing is wanted of it, or nothing more."""
        entry = self._returns.get(transfer_id)
        if entry is not None and entry.is_wanted:
            entry.is_wanted = False
            self._give(Withdraw(transfer_id, "aborted", message))

    def forget_owner(self, owner: bytes) -> None:
        """A tenant is purged."""
        for transfer_id, entry in self._returns.items():
            if entry.whose.owner == owner:
                self.withdraw(transfer_id, "its tenant was purged")

    def take(self, news: TransferNews, now: float) -> Outcome | None:
        entry = self._returns[news.transfer_id]
        match news:
            case Offered(keys=keys) if entry.is_wanted and not entry.keys:
                if not self._take_room(entry, news.transfer_id, list(keys), now):
                    self.withdraw(news.transfer_id, "nothing of it is lacking, or there is no room")
            case Arrived(first=first, count=count) if entry.is_wanted and first == entry.arrived:
                entry.arrived = end = min(first + count, len(entry.keys))
                until = now + entry.retain_s if entry.retain_s > 0 else 0.0
                chain = Chain(entry.keys[:end], entry.whose, until)
                return Returned(chain, entry.held[first:end])
            case TransferFailed():
                entry.is_wanted = False
            case TransferQuiet():
                del self._returns[news.transfer_id]
                self._pool.release(reversed(entry.held), HoldKind.TRANSFER)
        return None

    def _take_room(self, entry: _Return, transfer_id: bytes, keys: list[bytes], now: float) -> bool:
        """Pages for what is lacking of this chain, as many as there is room for from the first one
        on; nobody is preempted for them."""
        shared = min(len(keys), len(entry.prompt_keys))
        if keys[:shared] != entry.prompt_keys[:shared]:
            return False
        pages = self._cache.hold_prefix(keys, len(keys), kind=HoldKind.TRANSFER)
        first, held = len(pages), sum(len(other.held) for other in self._returns.values())
        end = min(len(keys), first + self._spare(), self._most_held - held)
        pages += self._cache.take(end - first, HoldKind.TRANSFER, now)
        if len(pages) == first:
            self._pool.release(reversed(pages), HoldKind.TRANSFER)
            return False
        entry.keys, entry.held, entry.arrived = keys[: len(pages)], pages, first
        self._give(
            Import(
                transfer_id,
                entry.secret,
                tuple(entry.keys),
                len(pages) * self._page_size,
                first,
                tuple(pages[first:]),
                tuple(self._pool.generations[page] for page in pages[first:]),
                entry.deadline,
            )
        )
        return True

    def holds(self) -> Iterator[PageId]:
        """Pages under transfer holds, once for each."""
        for entry in self._returns.values():
            yield from entry.held
