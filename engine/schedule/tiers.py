"""The books of the tiers below the device: what each holds, what moves, and who waits for it.

    device ──a page seals──▶ host ──used twice, or a drain──▶ disk        (copies, root first)
       │                                                        ▲
       ├──used twice, and the host has no copy ─────────────────┘
       └──its sequence ended ──▶ cluster
    device ◀──a prompt is queued, and fetching is quicker than computing── any of them

The scheduler says what was sealed, hit, ended and asked for; orders come out, and whoever carries
them out (store/tiered.py) brings back news. A page that is read by a copy or written by a fetch
keeps a hold until the news says that it is over, whatever becomes of its sequence. Nothing here can
fail a sequence: what does not arrive is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine.config import ScheduleConfig
from engine.schedule.copies import Copies, Copy
from engine.schedule.fetches import Arrival, Fetches
from engine.schedule.ledger import Ledger, Minor
from engine.schedule.orders import Order, OrderDone, OrderNews, OrderQuiet
from engine.schedule.page_events import PageEventLog
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.prefix_cache import PrefixCache, Provenance
from engine.schedule.shelf import Chain, TierState, new_shelf, resident_of
from engine.store.tier import PageRecord
from policies.contract.wire import Tier, TierReport
from policies.tiering import quota_pages


class SlowerTiers:
    """Shelves, the copies to them and the fetches from them, over one ledger of orders."""

    def __init__(
        self, config: ScheduleConfig, pool: PagePool, cache: PrefixCache, events: PageEventLog
    ) -> None:
        self._pool = pool
        self._shelves = {tier.name: new_shelf(tier, events) for tier in config.tiers}
        self._ledger: Ledger[Any] = Ledger(pool)
        self._copies = Copies(self._shelves, pool, cache, self._ledger)
        self._fetches = Fetches(
            self._shelves,
            pool,
            cache,
            self._ledger,
            page_tokens=config.page_size,
            page_bytes=config.page_bytes,
            forget=self._copies.forget,
        )

    def __bool__(self) -> bool:
        return bool(self._shelves)

    @property
    def has_orders(self) -> bool:
        return self._ledger.has_orders

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, nor overdue."""
        return not self._ledger.under_way and not self._ledger.overdue

    def take_orders(self) -> list[Order]:
        """Orders since the last call, to be carried out now."""
        return self._ledger.take_orders()

    def load(self, tier: Tier, records: Iterable[PageRecord], now: float) -> None:
        """What a tier kept over a restart, parents first; what cannot be used is dropped."""
        shelf = self._shelves[tier]
        found = {record.key: record for record in records}
        lost = shelf.index.restore(map(resident_of, found.values()), now)
        for key in lost:
            del found[key]
        for record in found.values():
            shelf.land(record)
        self._ledger.drop(shelf, lost)

    def share(self, tier: Tier, peek: Callable[[Sequence[bytes]], int]) -> None:
        """Others fill this tier too: its index has only what we put there or got from there, and a
        look at it (quick, without a lock) tells what may be fetched."""
        self._shelves[tier].peek = peek

    def set_quotas(self, shares: Mapping[bytes, float]) -> None:
        """See Scheduler.set_quotas. What others fill too lets go by a mind of its own."""
        for shelf in self._shelves.values():
            if shelf.is_own:
                shelf.index.set_quotas(quota_pages(shares, shelf.config.capacity_pages))

    # --- what the scheduler says ----------------------------------------------------------------

    def sealed(self, chain: Chain, new: range, now: float) -> None:
        """The pages `new` of this chain were computed and published."""
        for shelf in self._shelves.values():
            shelf.index.touch(chain.keys[new.start : new.stop], now)
            if shelf.name != "cluster":
                self._copies.offer(shelf, chain, now)

    def used(self, chain: Chain, now: float) -> None:
        """A sequence begins on these pages of the device."""
        for shelf in self._shelves.values():
            if not shelf.is_own and shelf.is_known:  # what others evicted there is put again
                gone = chain.keys[shelf.depth(chain.keys) :]
                self._copies.forget(shelf, [key for key in gone if key in shelf.landed])
            shelf.index.touch(chain.keys, now)
            if shelf.name != "cluster":
                self._copies.offer(shelf, chain, now)

    def ended(self, chain: Chain, now: float) -> None:
        """The sequence that computed or found these pages is over: its next turn may come to any
        node."""
        shelf = self._shelves.get("cluster")
        if shelf is not None:
            self._copies.offer(shelf, chain, now)

    def ask(
        self,
        keys: list[bytes],
        *,
        whose: Provenance,
        room: int,
        prefill_tokens_per_s: float,
        now: float,
    ) -> int:
        """Order what slower tiers have of this chain beyond the device, where fetching is quicker
        than computing it at this rate, into at most `room` pages; returns how many leading pages
        there would be if there were room and all that is known to be there arrived."""
        return self._fetches.ask(
            keys, whose=whose, room=room, prefill_tokens_per_s=prefill_tokens_per_s, now=now
        )

    def is_arriving(self, keys: Sequence[bytes], now: float) -> bool:
        """Whether the page after the device's of this chain is on its way, and not overdue."""
        return self._fetches.is_arriving(keys, now)

    def demote(self, now: float) -> None:
        """Before an end: put whatever is anywhere into the tier that survives it, then flush."""
        self._copies.demote(now)

    @property
    def is_demoting(self) -> bool:
        return self._copies.is_demoting

    def purge(self, owner: bytes, deadline: float) -> tuple[int, dict[int, Tier]]:
        """Forget a tenant's pages; returns how many tiers' copies there were, and the orders that
        make the tiers forget them."""
        count = 0
        orders: dict[int, Tier] = {}
        self._copies.purge(owner)
        self._fetches.purge(owner)
        for shelf in self._shelves.values():
            for key, (chain, _) in list(shelf.backlog.items()):
                if chain.whose.owner == owner:
                    del shelf.backlog[key]
            gone = shelf.index.forget(shelf.index.owned(owner))
            count += sum(key in shelf.landed for key in gone)
            shelf.let_go(gone)
            orders[self._ledger.purge(shelf, owner, deadline, gone)] = shelf.name
        return count, orders

    def distrust(self, keys: Sequence[bytes]) -> None:
        """The bytes of this chain may be wrong from before they were copied, which no checksum
        tells: no tier shall bring them again."""
        self._fetches.distrust(keys)
        for shelf in self._shelves.values():
            gone = shelf.index.forget(keys)
            shelf.let_go(gone)
            # Others may have put there what the index does not know of.
            self._ledger.drop(shelf, gone if shelf.is_own else dict.fromkeys((*gone, *keys)))

    # --- what is told of orders -----------------------------------------------------------------

    def take(self, news: OrderNews, now: float) -> None:
        """How an order went. Raises KeyError on an order that is not under way."""
        match news:
            case OrderQuiet(order_id):
                entry = self._ledger.under_way.get(order_id)
                if isinstance(entry, Arrival):  # it waits for what is before it, and ends then
                    entry.is_quiet = True
                elif (held := self._ledger.quiet(order_id)) is not None:
                    self._fetches.give_back(held)
            case OrderDone(order_id):
                entry = self._ledger.under_way[order_id]
                if isinstance(entry, Arrival):
                    self._fetches.take(entry, news, now)
                else:
                    del self._ledger.under_way[order_id]
                    if isinstance(entry, Copy):
                        self._copies.take(order_id, entry, news, now)
                    else:
                        assert isinstance(entry, Minor)
                        self._ledger.end_minor(entry, news.statuses)
                self._copies.demote_more(now)

    def owned(self, owner: bytes) -> int:
        """Pages of a tenant in all tiers, ordered ones too."""
        return sum(shelf.index.num_owned(owner) for shelf in self._shelves.values())

    def report(self, states: Mapping[Tier, TierState]) -> tuple[TierReport, ...]:
        return tuple(shelf.report(states.get(name, "ok")) for name, shelf in self._shelves.items())

    def invariants(self, transferred: Iterable[PageId] = ()) -> None:
        """Raise AssertionError unless every hold of a copy or fetch is one of an order's.
        transferred: pages that others have transfer holds of, once for each."""
        if not self._shelves:
            return
        holds = {
            kind: [0] * self._pool.num_pages for kind in (HoldKind.TIER_COPY, HoldKind.TRANSFER)
        }
        for page in transferred:
            holds[HoldKind.TRANSFER][page] += 1
        copying = dict.fromkeys(self._shelves, 0)
        for entry in self._ledger.under_way.values():
            if isinstance(entry, Copy):
                copying[entry.shelf.name] += len(entry.records)
                for page in entry.held:
                    holds[HoldKind.TIER_COPY][page] += 1
            elif isinstance(entry, Arrival):
                for page in (*entry.pages, *entry.anchor):
                    holds[HoldKind.TRANSFER][page] += 1
        for kind, counts in holds.items():
            for page in self._ledger.holds(kind):
                counts[page] += 1
            for page in map(PageId, range(self._pool.num_pages)):
                assert self._pool.holds(page, kind) == counts[page]
        self._fetches.invariants()
        for name, shelf in self._shelves.items():
            shelf.index.invariants()
            assert len(shelf.index) == len(shelf.landing) + len(shelf.landed)
            assert all(key in shelf.index for key in (*shelf.landing, *shelf.landed))
            assert shelf.copying == copying[name]
