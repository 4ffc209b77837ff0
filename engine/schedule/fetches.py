"""Fetches of pages from slower tiers into the device's, for prompts that wait: ordered where they
are quicker than computing, published root first, and shared by all who wait for the same pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.schedule.ledger import Held, Ledger
from engine.schedule.orders import Fetch, OrderDone
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.prefix_cache import PrefixCache, Provenance
from engine.schedule.shelf import Shelf
from engine.store.tier import PageRecord, Status
from policies.contract.wire import Tier
from policies.tiering import Resident, fetch_deadline_s, pages_worth_fetching

_GRACE_S = 1.0  # behind a fetch's deadline: then nobody waits for it, news or not
_RATE_WEIGHT = 0.2  # of the newest fetch
_FETCHING_SHARE = 2  # of the pool's pages may be under fetches, overdue ones too


@dataclass(slots=True, eq=False)
class Arrival:
    """One fetch and what is to become of it."""

    order_id: int
    shelf: Shelf
    keys: list[bytes]  # the chain from its root to the last page fetched
    first: int  # keys[first:] are fetched
    pages: list[PageId]  # under a transfer hold
    pinned: list[bytes]  # in the shelf's index
    whose: Provenance
    deadline: float
    anchor: list[PageId] = field(default_factory=list)  # what is before them, held beside them
    statuses: tuple[Status, ...] | None = None  # arrived; the pages before it have not
    is_quiet: bool = False  # its call was overdue and has returned, before those pages arrived
    is_dead: bool = False  # its tenant was purged, or its bytes are in doubt

    @property
    def parent(self) -> bytes | None:
        return self.keys[self.first - 1] if self.first else None


class Fetches:
    """Books of what is fetched. forget: what a tier has lost (Copies.forget)."""

    def __init__(
        self,
        shelves: Mapping[Tier, Shelf],
        pool: PagePool,
        cache: PrefixCache,
        ledger: Ledger[object],
        *,
        page_tokens: int,
        page_bytes: int,
        forget: Callable[[Shelf, Sequence[bytes]], None],
    ) -> None:
        self._shelves = shelves
        self._pool = pool
        self._cache = cache
        self._ledger = ledger
        self._page_tokens, self._page_bytes = page_tokens, page_bytes
        self._forget = forget
        self._most = max(1, pool.num_pages // _FETCHING_SHARE)
        self._fetching = 0  # device pages under fetches, overdue ones too
        self._arrivals: dict[int, Arrival] = {}  # by order id
        self._arriving: dict[bytes, Arrival] = {}  # by page key

    def ask(
        self,
        keys: list[bytes],
        *,
        whose: Provenance,
        room: int,
        prefill_tokens_per_s: float,
        now: float,
    ) -> int:
        """See SlowerTiers.ask."""
        first = self._cache.depth(keys)
        while first < len(keys) and keys[first] in self._arriving:
            first += 1
        depths = {
            shelf.name: depth
            for shelf in self._shelves.values()
            if now >= shelf.rests_until and (depth := shelf.depth(keys)) > first
        }
        if not depths:
            return first
        runs = pages_worth_fetching(
            depths,
            first,
            self._page_tokens,
            self._page_bytes,
            {name: self._shelves[name].rate for name in depths},
            {name: self._shelves[name].config.latency_s for name in depths},
            prefill_tokens_per_s,
        )
        for name, start, stop in runs:
            room = min(room, self._most - self._fetching)
            fresh = next((at for at in range(start, stop) if keys[at] in self._arriving), stop)
            end = min(fresh, start + max(0, room))
            got = self._begin(self._shelves[name], keys, start, end, whose, now)
            room -= got
            if start + got < stop:
                break
        # A store of unknown content promises nothing: what it did not have once is not asked again.
        return max((stop for name, _, stop in runs if self._shelves[name].is_known), default=first)

    def is_arriving(self, keys: Sequence[bytes], now: float) -> bool:
        """Whether the page after the device's of this chain is on its way, and not overdue."""
        if not self._arriving:
            return False
        depth = self._cache.depth(keys)
        arrival = self._arriving.get(keys[depth]) if depth < len(keys) else None
        return arrival is not None and now < arrival.deadline + _GRACE_S

    def _begin(
        self,
        shelf: Shelf,
        keys: list[bytes],
        start: int,
        end: int,
        whose: Provenance,
        now: float,
    ) -> int:
        """Order pages start … end of this chain; returns how many found a device page."""
        if end <= start:
            return 0
        # First, or our own pages could be evicted for those that are to follow them.
        anchor = self._hold_anchor(keys[start - 1] if start else None)
        pages = self._cache.take(end - start, HoldKind.TRANSFER, now)
        if not pages:
            self._pool.release(anchor, HoldKind.TRANSFER)
            return 0
        chain = keys[: start + len(pages)]
        wanted = chain[start:]
        pinned = [key for key in wanted if key in shelf.landed]
        shelf.index.pin(pinned)
        ahead = sum(len(at.pages) for at in self._arrivals.values() if at.shelf is shelf)
        deadline = now + fetch_deadline_s(
            ahead + len(pages), self._page_bytes, shelf.rate, shelf.config.latency_s
        )
        order_id = self._ledger.next_id()
        arrival = Arrival(order_id, shelf, chain, start, pages, pinned, whose, deadline, anchor)
        self._fetching += len(pages)
        self._arrivals[order_id] = arrival
        self._arriving.update(dict.fromkeys(wanted, arrival))
        generations = tuple(self._pool.generations[page] for page in pages)
        self._ledger.give(
            Fetch(order_id, shelf.name, tuple(wanted), tuple(pages), generations, deadline), arrival
        )
        return len(pages)

    def _hold_anchor(self, key: bytes | None) -> list[PageId]:
        page = None if key is None else self._cache.page(key)
        if key is None or page is None:
            return []
        held = [page, *self._cache.pages_before(key)]
        self._pool.hold(held, HoldKind.TRANSFER)
        return held

    def take(self, arrival: Arrival, done: OrderDone, now: float) -> None:
        """How a fetch went: land it, and those that waited for its pages to land."""
        shelf, statuses = arrival.shelf, done.statuses
        shelf.index.unpin(arrival.pinned)
        hits = statuses.count(Status.OK)
        shelf.hits += hits
        shelf.misses += len(statuses) - hits
        shelf.take_answers(statuses, now)
        if done.seconds > 0 and hits == len(statuses):
            rate = hits * self._page_bytes / done.seconds
            weight = _RATE_WEIGHT if shelf.bytes_per_s else 1.0
            shelf.bytes_per_s += weight * (rate - shelf.bytes_per_s)
        lost = (Status.MISS, Status.CORRUPT, Status.STALE)
        answers = zip(arrival.keys[arrival.first :], statuses, strict=True)
        self._forget(shelf, [key for key, status in answers if status in lost])
        arrival.statuses = statuses
        ready = [arrival]
        while ready:
            landed = ready.pop()
            if self._land(landed, now):
                ready += self._followers(landed)
                self._end(landed)

    def _land(self, arrival: Arrival, now: float) -> bool:
        """Publish what is right as far as the chain is whole. False: what is before it is still on
        its way, and so it stays under way too."""
        statuses, parent = arrival.statuses, arrival.parent
        assert statuses is not None
        num_right = next(
            (at for at, status in enumerate(statuses) if status is not Status.OK), len(statuses)
        )
        if parent is not None and parent not in self._cache:
            if parent in self._arriving and not arrival.is_dead:
                return False
            num_right = 0
        if num_right and not arrival.is_dead:
            self._cache.publish(
                arrival.keys[: arrival.first + num_right],
                arrival.pages[:num_right],
                first=arrival.first,
                whose=arrival.whose,
                source=arrival.shelf.name,
                now=now,
            )
            if not arrival.shelf.is_own:
                self._learn(arrival, num_right, now)
        for key in arrival.keys[arrival.first :]:
            del self._arriving[key]
        return True

    def _followers(self, arrival: Arrival) -> list[Arrival]:
        """Those that waited for this one; what follows it later finds its pages held."""
        mine = set(arrival.keys[arrival.first :])
        followers = [other for other in self._arrivals.values() if other.parent in mine]
        for other in followers:
            if not other.anchor:
                other.anchor = self._hold_anchor(other.parent)
        return [other for other in followers if other.statuses is not None]

    def _end(self, arrival: Arrival) -> None:
        statuses, order_id = arrival.statuses, arrival.order_id
        assert statuses is not None
        del self._arrivals[order_id], self._ledger.under_way[order_id]
        # Tails first, so that tails are evicted first.
        pages = [*arrival.pages[::-1], *arrival.anchor]
        held = Held(arrival.shelf, HoldKind.TRANSFER, pages, num_fetching=len(arrival.pages))
        is_overdue = Status.TIMEOUT in statuses and not arrival.is_quiet
        self._ledger.give_back(order_id, held, is_overdue=is_overdue)
        if not is_overdue:
            self.give_back(held)

    def give_back(self, held: Held) -> None:
        """An order's pages were released."""
        self._fetching -= held.num_fetching

    def _learn(self, arrival: Arrival, num_right: int, now: float) -> None:
        """What a tier of unknown content gave need not be put there again."""
        shelf, whose = arrival.shelf, arrival.whose
        for depth in range(arrival.first + num_right):
            key = arrival.keys[depth]
            if key in shelf.index:
                continue
            parent = arrival.keys[depth - 1] if depth else whose.root
            if depth < arrival.first:
                return  # whether the pages before are there is unknown
            if shelf.admit(Resident(key, parent, depth, whose.owner), now) is None:
                return
            shelf.land(PageRecord(key, parent, depth, whose.owner, 0))

    def purge(self, owner: bytes) -> None:
        """What arrives for this tenant is not published any more."""
        for arrival in self._arrivals.values():
            if arrival.whose.owner == owner:
                arrival.is_dead = True

    def distrust(self, keys: Sequence[bytes]) -> None:
        """What arrives of these is not published."""
        for arrival in {id(at): at for key in keys if (at := self._arriving.get(key))}.values():
            arrival.is_dead = True

    def invariants(self) -> None:
        for arrival in self._arrivals.values():
            assert self._ledger.under_way[arrival.order_id] is arrival
            assert all(self._arriving[key] is arrival for key in arrival.keys[arrival.first :])
        under = sum(len(arrival.pages) for arrival in self._arrivals.values())
        overdue = sum(held.num_fetching for held in self._ledger.overdue.values())
        assert self._fetching == under + overdue <= self._most
