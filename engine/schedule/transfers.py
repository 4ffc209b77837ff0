"""The books of a split: whose pages go to which engine, and whose come from one.

    prefill  a prompt is computed here, exported as it seals, and handed over with its first token
    decode   a prompt is imported, and runs from that token on; at its end its pages come home
             to prefill, for the next turn

Orders come out, and whoever carries them out (transfer/mover.py) brings back news, each of one
transfer; what they come to is told as an outcome, for the scheduler to act on. News that are late,
told twice or of an unknown transfer come to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.config import ScheduleConfig
from engine.schedule.exports import Exports
from engine.schedule.imports import Imports
from engine.schedule.outcomes import Outcome
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.prefix_cache import PrefixCache
from engine.schedule.rates import ImportRate
from engine.schedule.returns import Returns
from engine.schedule.sequence import Sequence
from engine.schedule.transfer_orders import Arrived, TransferNews, TransferOrder
from policies.contract.wire import Transfer


class Transfers:
    """Exports, imports and returns, over one list of orders. spare: pages that can be had beside
    what is held and what running sequences need."""

    def __init__(
        self,
        config: ScheduleConfig,
        pool: PagePool,
        cache: PrefixCache,
        *,
        spare: Callable[[], int],
    ) -> None:
        self._pool = pool
        self.import_rate = ImportRate()
        self._orders: list[TransferOrder] = []
        give, page_size = self._give, config.page_size
        self.exports = Exports(pool, cache, page_size, give)
        self.imports = Imports(
            pool, cache, page_size=page_size, vocab_size=config.vocab_size, give=give
        )
        self.returns = Returns(pool, cache, page_size=page_size, give=give, spare=spare)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, nor held; something may be expected."""
        return not (self.exports or self.imports or next(self.returns.holds(), None) is not None)

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def take_orders(self) -> list[TransferOrder]:
        """Orders since the last call, to be carried out now."""
        orders, self._orders[:] = list(self._orders), ()
        return orders

    def _give(self, order: TransferOrder) -> None:
        self._orders.append(order)

    def knows(self, transfer: Transfer) -> bool:
        """Whether one of its ids has been used: each is for one transfer."""
        ids = (transfer.transfer_id, transfer.return_id)
        return any(id in book for id in ids for book in (self.exports, self.imports, self.returns))

    def begin(self, sequence: Sequence) -> None:
        """A sequence that is computed for a peer, or that a peer computes, waits now."""
        if sequence.role == "prefill":
            self.exports.begin(sequence)
            self.returns.expect(sequence)
        else:
            self.imports.begin(sequence)

    def leave(self, sequence: Sequence, code: str, message: str) -> None:
        """A sequence is over; code and message say to its peer why, if that is too early."""
        if sequence.transfer is None:
            return
        if sequence.role == "decode":
            self.imports.leave(sequence, code, message)
        elif sequence.role == "prefill" and self.exports.leave(sequence, code, message):
            self.returns.withdraw(sequence.transfer.return_id, message)

    def take(self, news: TransferNews, now: float) -> Outcome | None:
        transfer_id = news.transfer_id
        if isinstance(news, Arrived):
            self.import_rate.record(news.num_bytes, news.seconds)
        if transfer_id in self.exports:
            return self.exports.take(news)
        if transfer_id in self.imports:
            return self.imports.take(news, now)
        if transfer_id in self.returns:
            return self.returns.take(news, now)
        return None

    def purge(self, owner: bytes) -> None:
        """Nothing of this tenant is brought home any more."""
        self.exports.forget_owner(owner)
        self.returns.forget_owner(owner)

    def holds(self) -> Iterator[PageId]:
        """Pages under transfer holds, once for each."""
        for book in (self.exports, self.imports, self.returns):
            yield from book.holds()

    def invariants(self) -> None:
        """Raise AssertionError unless every page of a transfer has its hold."""
        counts: dict[PageId, int] = {}
        for page in self.holds():
            counts[page] = counts.get(page, 0) + 1
        for page, count in counts.items():
            assert self._pool.holds(page, HoldKind.TRANSFER) >= count
        self.imports.invariants()
