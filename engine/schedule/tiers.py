"""The books of the tiers below the device: what each holds, what moves, and who waits for it.

    device ──a page seals──▶ host ──used twice, or a drain──▶ disk        (copies, root first)
       │                                                                   ▲
       └──used twice, and the host has no copy ──▶ disk                    │ values, nothing else:
       └──its sequence ended ──▶ cluster                                   │ orders out, news in
    device ◀──a prompt is queued, and fetching is quicker than computing── any of them

The scheduler says what was sealed, hit, ended and asked for; orders come out, and whoever carries
them out brings back news. A page that is read by a copy or written by a fetch keeps a hold until
the news says that it is over, whatever becomes of its sequence. Nothing here can fail a sequence:
what does not arrive is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.config import ScheduleConfig, TierConfig
from engine.schedule.orders import (
    CopyDown,
    CopyOut,
    Drop,
    Fetch,
    Flush,
    Order,
    OrderDone,
    OrderNews,
    OrderQuiet,
    PurgeTier,
)
from engine.schedule.page_events import PageEventLog
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.prefix_cache import PrefixCache, Provenance
from engine.store.tier import PageRecord, Status
from policies.contract.wire import Tier, TierReport
from policies.tiering import Resident, TierIndex, fetch_deadline_s, pages_worth_fetching

_EVENT_EVERY: dict[Tier, int] = {"disk": 8}  # pages of a chain; other tiers tell of each
_CLUSTER_KNOWN_PAGES = 1 << 16  # remembered to be there; only a get tells of others
_REST_S = 1.0  # nothing is asked of a tier for so long after it was not there
_GRACE_S = 1.0  # behind a fetch's deadline: then nobody waits for it, news or not
_RATE_WEIGHT = 0.2  # of the newest fetch
_BACKLOG_CHAINS = 64  # of a tier; what is more is not copied
_ORDER_PAGES = 16  # of one copy: what memory it may take on its way
_COPYING_SHARE = 8  # of the pool's pages may be under copies to one tier at once
_FETCHING_SHARE = 2  # of the pool's pages may be under fetches, overdue ones too


@dataclass(frozen=True, slots=True)
class Chain:
    """Pages of the device from a chain's root on."""

    keys: list[bytes]
    whose: Provenance
    retain_until: float = 0.0


@dataclass(slots=True, eq=False)
class _Shelf:
    """One slower tier. A key of its index is landing (ordered) or landed (there)."""

    config: TierConfig
    index: TierIndex
    landing: dict[bytes, int] = field(default_factory=dict)  # key → order id
    landed: dict[bytes, PageRecord] = field(default_factory=dict)  # parents before children
    undropped: list[bytes] = field(default_factory=list)  # the tier did not answer a Drop of them
    # Of a tier that others fill too: how many leading pages are there, as a look at it tells.
    peek: Callable[[Sequence[bytes]], int] | None = None
    # By last key: what is to be copied later, and from which depth on.
    backlog: dict[bytes, tuple[Chain, int]] = field(default_factory=dict)
    copying: int = 0  # pages under copies to this tier
    rests_until: float = 0.0
    bytes_per_s: float = 0.0  # measured; 0: not yet
    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    corrupt: int = 0
    timeouts: int = 0

    @property
    def name(self) -> Tier:
        return self.config.name

    @property
    def knows_all(self) -> bool:
        """Whether what is not in the index is not there."""
        return self.config.capacity_pages > 0

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many leading pages may be fetched."""
        if self.peek is not None:
            return self.peek(keys)
        if not self.knows_all:
            return len(keys)
        depth = self.index.depth(keys)
        while depth and keys[depth - 1] not in self.landed:
            depth -= 1
        return depth

    def count(self, status: Status) -> None:
        if status is Status.CORRUPT:
            self.corrupt += 1
        elif status is Status.TIMEOUT:
            self.timeouts += 1


@dataclass(slots=True, eq=False)
class _Copy:
    shelf: _Shelf
    records: tuple[PageRecord, ...]
    held: list[PageId] = field(default_factory=list)  # under a tier-copy hold: pages, and before
    source: _Shelf | None = None  # whose keys are pinned


@dataclass(slots=True, eq=False)
class _Fetch:
    shelf: _Shelf
    keys: list[bytes]  # the chain from its root to the last page fetched
    first: int  # keys[first:] are fetched
    pages: list[PageId]  # under a transfer hold
    pinned: list[bytes]  # in the shelf's index
    whose: Provenance
    deadline: float
    anchor: list[PageId] = field(default_factory=list)  # what is before them, held beside them
    statuses: tuple[Status, ...] | None = None  # arrived; the pages before it have not
    dead: bool = False  # its tenant was purged

    @property
    def parent(self) -> bytes | None:
        return self.keys[self.first - 1] if self.first else None


@dataclass(slots=True, eq=False)
class _Minor:
    """An order of which only its end matters: Drop, PurgeTier, Flush."""

    shelf: _Shelf
    order: Drop | PurgeTier | Flush
    keys: tuple[bytes, ...] = ()  # that a purge is to remove


@dataclass(frozen=True, slots=True)
class _Quarantined:
    """Pages that an overdue call may still touch, and keys that it may yet put."""

    shelf: _Shelf
    kind: HoldKind
    held: list[PageId]
    num_fetching: int = 0  # of the pages held
    keys: tuple[bytes, ...] = ()


class SlowerTiers:
    """Between the scheduler's pages and whoever moves bytes (store/tiered.py)."""

    def __init__(
        self, config: ScheduleConfig, pool: PagePool, cache: PrefixCache, events: PageEventLog
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._events = events
        self._page_tokens, self._page_bytes = config.page_size, config.page_bytes
        self._most_copying = max(1, config.num_pages // _COPYING_SHARE)
        self._most_fetching = max(1, config.num_pages // _FETCHING_SHARE)
        self._shelves = {
            tier.name: _Shelf(
                tier,
                TierIndex(
                    tier.capacity_pages or _CLUSTER_KNOWN_PAGES,
                    needs_second_use=tier.name == "disk",
                ),
            )
            for tier in config.tiers
        }
        self._orders: list[Order] = []
        self._order_id = 0
        self._under_way: dict[int, _Copy | _Fetch | _Minor] = {}
        self._quarantine: dict[int, _Quarantined] = {}
        self._arriving: dict[bytes, _Fetch] = {}
        self._fetching = 0  # device pages under fetches, quarantined ones too
        self._demoting: deque[Resident] = deque()
        self._flushes = False  # once demoting is over

    def __bool__(self) -> bool:
        return bool(self._shelves)

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, nor overdue."""
        return not self._under_way and not self._quarantine

    def take_orders(self) -> list[Order]:
        """Orders since the last call, to be carried out now."""
        orders, self._orders = self._orders, []
        return orders

    def load(self, tier: Tier, records: Iterable[PageRecord], now: float) -> None:
        """What a tier kept over a restart, parents first; what cannot be used is dropped."""
        shelf = self._shelves[tier]
        found = {record.key: record for record in records}
        lost = shelf.index.restore(map(_resident, found.values()), now)
        for key in lost:
            del found[key]
        for record in found.values():
            self._has_landed(shelf, record)
        self._drop(shelf, lost)

    def share(self, tier: Tier, peek: Callable[[Sequence[bytes]], int]) -> None:
        """Others fill this tier too: its index has only what we put there or got from there, and a
        look at it (quick, without a lock) tells what may be fetched."""
        self._shelves[tier].peek = peek

    # --- copies ---------------------------------------------------------------------------------

    def sealed(self, chain: Chain, new: range, now: float) -> None:
        """The pages `new` of this chain were computed and published."""
        for shelf in self._shelves.values():
            shelf.index.touch(chain.keys[new.start : new.stop], now)
            if shelf.name != "cluster":
                self._offer(shelf, chain, now)

    def used(self, chain: Chain, now: float) -> None:
        """A sequence begins on these pages of the device."""
        for shelf in self._shelves.values():
            shelf.index.touch(chain.keys, now)
            if shelf.name != "cluster":
                self._offer(shelf, chain, now)

    def ended(self, chain: Chain, now: float) -> None:
        """The sequence that computed or found these pages is over: its next turn may come to any
        node."""
        shelf = self._shelves.get("cluster")
        if shelf is not None:
            self._offer(shelf, chain, now)

    def demote(self, now: float) -> None:
        """Before an end: put whatever is anywhere into the tier that survives it, then flush."""
        shelf = self._shelves.get("disk")
        if shelf is None:
            return
        seen: set[bytes] = set()
        host = self._shelves.get("host")
        found = [_resident(record) for record in host.landed.values()] if host else []
        found += [
            Resident(page.key, page.parent, page.depth, page.owner)
            for page in self._cache.contents()
        ]
        for resident in sorted(found, key=lambda resident: resident.depth):
            if resident.key not in seen and resident.key not in shelf.index:
                seen.add(resident.key)
                self._demoting.append(resident)
        self._flushes = True
        self._demote_more(now)

    @property
    def is_demoting(self) -> bool:
        """Whether demote's copies or its flush are not over yet."""
        return self._flushes or any(
            isinstance(minor, _Minor) and isinstance(minor.order, Flush)
            for minor in self._under_way.values()
        )

    def _demote_more(self, now: float) -> None:
        shelf = self._shelves.get("disk")
        if shelf is None or not self._flushes:
            return
        host = self._shelves.get("host")
        while self._demoting and shelf.copying < self._most_copying:
            resident = self._demoting.popleft()
            page = self._cache.page(resident.key)
            in_host = host is not None and resident.key in host.landed
            evicted: list[bytes] = []
            is_nowhere = page is None and not in_host
            if is_nowhere or resident.key in shelf.index or now < shelf.rests_until:
                continue
            if self._admit(shelf, resident, now, proven=True, evicted=evicted):
                self._drop(shelf, evicted)
                self._copy(shelf, [resident], [] if page is None or in_host else [page])
        if not self._demoting and not shelf.copying:
            self._flushes = False
            order = Flush(self._next_id(), shelf.name)
            self._give(order, _Minor(shelf, order))

    def _offer(self, shelf: _Shelf, chain: Chain, now: float) -> None:
        """Copy what the tier lacks of this chain, root first, as far as it has room and will."""
        start = shelf.index.depth(chain.keys)
        residents: list[Resident] = []
        pages: list[PageId] = []
        evicted: list[bytes] = []
        for depth, key in enumerate(chain.keys[start:], start):
            page = self._cache.page(key)
            if page is None or now < shelf.rests_until:
                shelf.dropped += 1
                break
            if shelf.copying + len(residents) >= self._most_copying:
                self._put_off(shelf, chain, depth)
                break
            parent = chain.keys[depth - 1] if depth else chain.whose.root
            resident = Resident(key, parent, depth, chain.whose.owner)
            until = chain.retain_until
            if not self._admit(shelf, resident, now, retain_until=until, evicted=evicted):
                break
            residents.append(resident)
            pages.append(page)
        self._drop(shelf, evicted)
        if residents:
            self._copy(shelf, residents, pages)

    def _put_off(self, shelf: _Shelf, chain: Chain, depth: int) -> None:
        """Enough is under way: go on with this chain when some of it is done."""
        shelf.backlog[chain.keys[-1]] = chain, depth
        if len(shelf.backlog) > _BACKLOG_CHAINS:
            shelf.backlog.pop(next(iter(shelf.backlog)))
            shelf.dropped += 1

    def _resume(self, shelf: _Shelf, now: float) -> None:
        while shelf.backlog and shelf.copying < self._most_copying:
            chain, depth = shelf.backlog.pop(next(iter(shelf.backlog)))
            if shelf.index.depth(chain.keys) < depth:
                shelf.dropped += 1  # evicted meanwhile: two chains must not chase each other
            else:
                self._offer(shelf, chain, now)

    def _admit(
        self,
        shelf: _Shelf,
        resident: Resident,
        now: float,
        *,
        evicted: list[bytes],
        retain_until: float = 0.0,
        proven: bool = False,
    ) -> bool:
        """proven: it need not be used twice first. Whom it displaces is added to evicted."""
        if proven:
            shelf.index.touch((resident.key,), now)
            shelf.index.touch((resident.key,), now)
        gone = shelf.index.admit(resident, now, retain_until=retain_until)
        if gone is None:
            return False
        for key in gone:
            self._is_gone(shelf, key)
        shelf.evicted += len(gone)
        evicted += gone
        return True

    def _copy(self, shelf: _Shelf, residents: Sequence[Resident], pages: Sequence[PageId]) -> None:
        """From the host where it has them, so that no device page is held for a slow tier. pages:
        of the device, or none where the host has them all."""
        host = self._shelves.get("host")
        for first in range(0, len(residents), _ORDER_PAGES):
            part = slice(first, first + _ORDER_PAGES)
            keys = [resident.key for resident in residents[part]]
            order_id = self._next_id()
            if host is not None and shelf is not host and all(key in host.landed for key in keys):
                records = tuple(host.landed[key] for key in keys)
                host.index.pin(keys)
                self._give(
                    CopyDown(order_id, host.name, shelf.name, records),
                    _Copy(shelf, records, source=host),
                )
            else:
                records = tuple(
                    PageRecord(at.key, at.parent, at.depth, at.owner, self._pool.generations[page])
                    for at, page in zip(residents[part], pages[part], strict=True)
                )
                held = [*pages[part][::-1], *self._cache.pages_before(keys[0])]
                self._pool.hold(held, HoldKind.TIER_COPY)
                self._give(
                    CopyOut(order_id, shelf.name, tuple(pages[part]), records),
                    _Copy(shelf, records, held),
                )
            shelf.copying += len(keys)
            shelf.landing.update(dict.fromkeys(keys, order_id))

    def _copied(self, order_id: int, copy: _Copy, done: OrderDone, now: float) -> None:
        shelf = copy.shelf
        failed: list[bytes] = []
        for record, status in zip(copy.records, done.statuses, strict=True):
            is_mine = shelf.landing.get(record.key) == order_id  # else it was evicted meanwhile
            if is_mine:
                del shelf.landing[record.key]
            if status is Status.OK:
                if is_mine:
                    self._has_landed(shelf, record)
                    shelf.stored += 1
                continue
            shelf.dropped += 1
            shelf.count(status)
            if is_mine:
                failed.append(record.key)
        shelf.copying -= len(copy.records)
        if copy.source is not None:
            copy.source.index.unpin([record.key for record in copy.records])
            unsound = zip(copy.records, done.statuses, strict=True)
            missing = (Status.MISS, Status.CORRUPT)
            self._forget(copy.source, [at.key for at, status in unsound if status in missing])
        if Status.UNAVAILABLE in done.statuses:
            shelf.rests_until = now + _REST_S
        self._forget(shelf, failed)
        if failed:  # it would go the same way
            shelf.dropped += len(shelf.backlog)
            shelf.backlog.clear()
        self._resume(shelf, now)
        quarantined = _Quarantined(
            shelf, HoldKind.TIER_COPY, copy.held, keys=tuple(record.key for record in copy.records)
        )
        self._give_back(order_id, quarantined, is_overdue=Status.TIMEOUT in done.statuses)

    def _has_landed(self, shelf: _Shelf, record: PageRecord) -> None:
        shelf.landed[record.key] = record
        if self._is_told(shelf, record):
            self._events.stored(record.key, shelf.name)

    def _is_gone(self, shelf: _Shelf, key: bytes) -> None:
        """The index has let go of a key."""
        shelf.landing.pop(key, None)
        record = shelf.landed.pop(key, None)
        if record is not None and self._is_told(shelf, record):
            self._events.removed(key, shelf.name)

    @staticmethod
    def _is_told(shelf: _Shelf, record: PageRecord) -> bool:
        return (record.depth + 1) % _EVENT_EVERY.get(shelf.name, 1) == 0

    def _forget(self, shelf: _Shelf, keys: Iterable[bytes]) -> None:
        """These are lost, and so is what was built on them."""
        gone = shelf.index.forget([key for key in keys if key in shelf.index])
        for key in gone:
            self._is_gone(shelf, key)
        self._drop(shelf, gone)

    def _drop(self, shelf: _Shelf, keys: Sequence[bytes]) -> None:
        keys = tuple(key for key in (*shelf.undropped, *keys) if key not in shelf.index)
        if keys:
            shelf.undropped.clear()
            order = Drop(self._next_id(), shelf.name, keys)
            self._give(order, _Minor(shelf, order))

    # --- fetches --------------------------------------------------------------------------------

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
        than computing it, into at most `room` pages; returns how many leading pages there would be
        if there were room and all that is known to be there arrived."""
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
        rates = {name: self._rate(self._shelves[name]) for name in depths}
        latencies = {name: self._shelves[name].config.latency_s for name in depths}
        runs = pages_worth_fetching(
            depths,
            first,
            self._page_tokens,
            self._page_bytes,
            rates,
            latencies,
            prefill_tokens_per_s,
        )
        for name, start, stop in runs:
            room = min(room, self._most_fetching - self._fetching)
            fresh = next((at for at in range(start, stop) if keys[at] in self._arriving), stop)
            end = min(fresh, start + max(0, room))
            got = self._fetch(self._shelves[name], keys, start, end, whose, now)
            room -= got
            if start + got < stop:
                break
        # A store of unknown content promises nothing: what it did not have once is not asked again.
        return max((stop for name, _, stop in runs if self._shelves[name].knows_all), default=first)

    def is_arriving(self, keys: Sequence[bytes], now: float) -> bool:
        """Whether the page after the device's of this chain is on its way, and not overdue."""
        if not self._arriving:
            return False
        depth = self._cache.depth(keys)
        fetch = self._arriving.get(keys[depth]) if depth < len(keys) else None
        return fetch is not None and now < fetch.deadline + _GRACE_S

    def _rate(self, shelf: _Shelf) -> float:
        return shelf.bytes_per_s or shelf.config.bytes_per_s

    def _fetch(
        self,
        shelf: _Shelf,
        keys: list[bytes],
        start: int,
        end: int,
        whose: Provenance,
        now: float,
    ) -> int:
        """Order pages start … end of this chain; returns how many found a device page."""
        if end <= start:
            return 0
        anchor = self._hold_anchor(keys[start - 1] if start else None)
        pages: list[PageId] = []
        while len(pages) < end - start:
            page = self._pool.take(HoldKind.TRANSFER)
            if page is not None:
                pages.append(page)
            elif not self._cache.evict(now):
                break
        if not pages:
            self._pool.release(anchor, HoldKind.TRANSFER)
            return 0
        chain = keys[: start + len(pages)]
        wanted = chain[start:]
        pinned = [key for key in wanted if key in shelf.landed]
        shelf.index.pin(pinned)
        rate, latency = self._rate(shelf), shelf.config.latency_s
        ahead = sum(
            len(other.pages)
            for other in self._under_way.values()
            if isinstance(other, _Fetch) and other.shelf is shelf
        )
        deadline = now + fetch_deadline_s(ahead + len(pages), self._page_bytes, rate, latency)
        fetch = _Fetch(shelf, chain, start, pages, pinned, whose, deadline, anchor)
        self._fetching += len(pages)
        for key in wanted:
            self._arriving[key] = fetch
        generations = tuple(self._pool.generations[page] for page in pages)
        order_id = self._next_id()
        order = Fetch(order_id, shelf.name, tuple(wanted), tuple(pages), generations, deadline)
        self._give(order, fetch)
        return len(pages)

    def _hold_anchor(self, key: bytes | None) -> list[PageId]:
        page = None if key is None else self._cache.page(key)
        if key is None or page is None:
            return []
        held = [page, *self._cache.pages_before(key)]
        self._pool.hold(held, HoldKind.TRANSFER)
        return held

    def _fetched(self, order_id: int, fetch: _Fetch, done: OrderDone, now: float) -> None:
        shelf, statuses = fetch.shelf, done.statuses
        shelf.index.unpin(fetch.pinned)
        hits = sum(status is Status.OK for status in statuses)
        shelf.hits += hits
        shelf.misses += len(statuses) - hits
        for status in statuses:
            shelf.count(status)
        if done.seconds > 0 and hits == len(statuses):
            rate = hits * self._page_bytes / done.seconds
            weight = _RATE_WEIGHT if shelf.bytes_per_s else 1.0
            shelf.bytes_per_s += weight * (rate - shelf.bytes_per_s)
        if Status.UNAVAILABLE in statuses:
            shelf.rests_until = now + _REST_S
        lost = (Status.MISS, Status.CORRUPT, Status.STALE)
        wanted = zip(fetch.keys[fetch.first :], statuses, strict=True)
        self._forget(shelf, [key for key, status in wanted if status in lost])
        fetch.statuses = statuses
        self._arrivals(order_id, fetch, now)

    def _arrivals(self, order_id: int, fetch: _Fetch, now: float) -> None:
        """Land this fetch, and those that waited for its pages to land."""
        ready = [(order_id, fetch)]
        while ready:
            order_id, fetch = ready.pop()
            if not self._land(order_id, fetch, now):
                continue
            mine = set(fetch.keys[fetch.first :])
            for other_id, other in list(self._under_way.items()):
                if isinstance(other, _Fetch) and other.parent in mine:
                    if not other.anchor:
                        other.anchor = self._hold_anchor(other.parent)
                    if other.statuses is not None:
                        ready.append((other_id, other))
            del self._under_way[order_id]
            assert fetch.statuses is not None
            quarantined = _Quarantined(
                fetch.shelf,
                HoldKind.TRANSFER,
                [*fetch.pages[::-1], *fetch.anchor],  # tails first, so that tails are evicted first
                num_fetching=len(fetch.pages),
            )
            self._give_back(order_id, quarantined, is_overdue=Status.TIMEOUT in fetch.statuses)

    def _land(self, order_id: int, fetch: _Fetch, now: float) -> bool:
        """Publish what is right as far as the chain is whole. False: what is before it is still on
        its way, and so it stays under way too."""
        statuses, parent = fetch.statuses, fetch.parent
        assert statuses is not None
        num_right = next(
            (at for at, status in enumerate(statuses) if status is not Status.OK), len(statuses)
        )
        if parent is not None and parent not in self._cache:
            if parent in self._arriving and not fetch.dead:
                return False
            num_right = 0
        if num_right and not fetch.dead:
            self._cache.publish(
                fetch.keys[: fetch.first + num_right],
                fetch.pages[:num_right],
                first=fetch.first,
                whose=fetch.whose,
                source=fetch.shelf.name,
                now=now,
            )
            if not fetch.shelf.knows_all or fetch.shelf.peek is not None:
                self._learn(fetch, num_right, now)
        for key in fetch.keys[fetch.first :]:
            del self._arriving[key]
        return True

    def _learn(self, fetch: _Fetch, num_right: int, now: float) -> None:
        """What a store of unknown content gave need not be put there again."""
        shelf = fetch.shelf
        for depth in range(fetch.first + num_right):
            key = fetch.keys[depth]
            if key in shelf.index:
                continue
            parent = fetch.keys[depth - 1] if depth else fetch.whose.root
            resident = Resident(key, parent, depth, fetch.whose.owner)
            displaced: list[bytes] = []  # from our memory; the store keeps what it will
            if depth < fetch.first or not self._admit(shelf, resident, now, evicted=displaced):
                return  # unknown whether the pages before are there
            self._has_landed(shelf, PageRecord(key, parent, depth, fetch.whose.owner, 0))

    # --- news -----------------------------------------------------------------------------------

    def take(self, news: OrderNews, now: float) -> None:
        """How an order went. Raises KeyError on an order that is not under way."""
        match news:
            case OrderQuiet(order_id):
                quiet = self._quarantine.pop(order_id, None)
                if quiet is not None:
                    self._give_back(order_id, quiet, is_overdue=False)
                    self._drop(quiet.shelf, quiet.keys)
            case OrderDone(order_id):
                match self._under_way[order_id]:
                    case _Copy() as copy:
                        del self._under_way[order_id]
                        self._copied(order_id, copy, news, now)
                    case _Fetch() as fetch:
                        self._fetched(order_id, fetch, news, now)
                    case _Minor(shelf, order) as entry:
                        del self._under_way[order_id]
                        if isinstance(order, Drop):
                            answers = zip(order.keys, news.statuses, strict=True)
                            settled = (Status.OK, Status.MISS)
                            left = [key for key, status in answers if status not in settled]
                            shelf.undropped += left
                        elif news.statuses != (Status.OK,):
                            shelf.undropped += entry.keys
                self._demote_more(now)

    def purge(self, owner: bytes, deadline: float) -> tuple[int, dict[int, Tier]]:
        """Forget a tenant's pages; returns how many tiers' copies there were, and the orders that
        make the tiers forget them."""
        count = 0
        orders: dict[int, Tier] = {}
        for shelf in self._shelves.values():
            for key, (chain, _) in list(shelf.backlog.items()):
                if chain.whose.owner == owner:
                    del shelf.backlog[key]
            gone = shelf.index.forget(shelf.index.owned(owner))
            count += sum(key in shelf.landed for key in gone)
            for key in gone:
                self._is_gone(shelf, key)
            order = PurgeTier(self._next_id(), shelf.name, owner, deadline)
            self._give(order, _Minor(shelf, order, gone))
            orders[order.order_id] = shelf.name
        for other in self._under_way.values():
            if isinstance(other, _Fetch) and other.whose.owner == owner:
                other.dead = True
        self._demoting = deque(at for at in self._demoting if at.owner != owner)
        return count, orders

    def owned(self, owner: bytes) -> int:
        """Pages of a tenant in all tiers, ordered ones too."""
        return sum(shelf.index.num_owned(owner) for shelf in self._shelves.values())

    def report(
        self, states: Mapping[Tier, Literal["ok", "scanning", "broken"]]
    ) -> tuple[TierReport, ...]:
        return tuple(
            TierReport(
                tier=shelf.name,
                pages_total=shelf.config.capacity_pages,
                pages_used=len(shelf.landed),
                state=states.get(shelf.name, "ok"),
                hit_pages=shelf.hits,
                miss_pages=shelf.misses,
                stored_pages=shelf.stored,
                evicted_pages=shelf.evicted,
                dropped_pages=shelf.dropped,
                corrupt_pages=shelf.corrupt,
                timeouts=shelf.timeouts,
                fetch_bytes_per_s=shelf.bytes_per_s,
            )
            for shelf in self._shelves.values()
        )

    # --- small --------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._order_id += 1
        return self._order_id

    def _give(self, order: Order, entry: _Copy | _Fetch | _Minor) -> None:
        self._orders.append(order)
        self._under_way[order.order_id] = entry

    def _give_back(self, order_id: int, quarantined: _Quarantined, *, is_overdue: bool) -> None:
        """An order's pages, unless its call may still touch them."""
        if is_overdue:
            self._quarantine[order_id] = quarantined
            return
        self._pool.release(quarantined.held, quarantined.kind)
        self._fetching -= quarantined.num_fetching

    def invariants(self) -> None:
        """Raise AssertionError unless every hold of a copy or fetch is one under way."""
        if not self._shelves:
            return
        copies = [0] * self._pool.num_pages
        transfers = [0] * self._pool.num_pages
        fetching = 0
        for entry in self._under_way.values():
            if isinstance(entry, _Copy):
                for page in entry.held:
                    copies[page] += 1
            elif isinstance(entry, _Fetch):
                fetching += len(entry.pages)
                for page in (*entry.pages, *entry.anchor):
                    transfers[page] += 1
                for key in entry.keys[entry.first :]:
                    assert self._arriving[key] is entry
        for quiet in self._quarantine.values():
            counts = transfers if quiet.kind is HoldKind.TRANSFER else copies
            fetching += quiet.num_fetching
            for page in quiet.held:
                counts[page] += 1
        for page in map(PageId, range(self._pool.num_pages)):
            assert self._pool.holds(page, HoldKind.TIER_COPY) == copies[page]
            assert self._pool.holds(page, HoldKind.TRANSFER) == transfers[page]
        assert self._fetching == fetching <= self._most_fetching
        for shelf in self._shelves.values():
            shelf.index.invariants()
            assert len(shelf.index) == len(shelf.landing) + len(shelf.landed)
            assert all(key in shelf.index for key in (*shelf.landing, *shelf.landed))
            under = (e for e in self._under_way.values() if isinstance(e, _Copy))
            assert shelf.copying == sum(len(e.records) for e in under if e.shelf is shelf)


def _resident(record: PageRecord) -> Resident:
    return Resident(record.key, record.parent, record.depth, record.owner)
