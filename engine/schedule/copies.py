"""Copies of pages into slower tiers: which, when, and from where; root first, a bounded number."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.schedule.ledger import Held, Ledger
from engine.schedule.orders import CopyDown, CopyOut, OrderDone
from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.prefix_cache import PrefixCache
from engine.schedule.shelf import Chain, Shelf, resident_of
from engine.store.tier import PageRecord, Status
from policies.contract.wire import Tier
from policies.tiering import Resident

_BACKLOG_CHAINS = 64  # of a tier; what is more is not copied
_ORDER_PAGES = 16  # of one copy: what memory it may take on its way
_COPYING_SHARE = 8  # of the pool's pages may be under copies to one tier at once


@dataclass(slots=True, eq=False)
class Copy:
    shelf: Shelf
    records: tuple[PageRecord, ...]
    held: list[PageId] = field(default_factory=list)  # under a tier-copy hold: pages, and before
    source: Shelf | None = None  # whose keys are pinned


class Copies:
    """Books of what is copied; shelves by name, fastest first."""

    def __init__(
        self,
        shelves: Mapping[Tier, Shelf],
        pool: PagePool,
        cache: PrefixCache,
        ledger: Ledger[object],
    ) -> None:
        self._host = shelves.get("host")
        self._disk = shelves.get("disk")
        self._pool = pool
        self._cache = cache
        self._ledger = ledger
        self._most = max(1, pool.num_pages // _COPYING_SHARE)
        self._demoting: deque[Resident] = deque()
        self._flushes = False  # once demoting is over

    def offer(self, shelf: Shelf, chain: Chain, now: float) -> None:
        """Copy what the tier lacks of this chain, root first, as far as it has room and will."""
        start = shelf.index.depth(chain.keys)
        residents: list[Resident] = []
        pages: list[PageId] = []
        evicted: list[bytes] = []
        for depth, key in enumerate(islice(chain.keys, start, None), start):
            page = self._cache.page(key)
            if page is None or now < shelf.rests_until:
                shelf.dropped += 1
                break
            if shelf.copying + len(residents) >= self._most:
                self._put_off(shelf, chain, depth)
                break
            parent = chain.keys[depth - 1] if depth else chain.whose.root
            resident = Resident(key, parent, depth, chain.whose.owner)
            gone = shelf.admit(resident, now, retain_until=chain.retain_until)
            if gone is None:
                break
            evicted += gone
            residents.append(resident)
            pages.append(page)
        self._ledger.drop(shelf, evicted)
        self._copy(shelf, residents, pages)

    def _put_off(self, shelf: Shelf, chain: Chain, depth: int) -> None:
        """Enough is under way: go on with this chain when some of it is done."""
        shelf.backlog[chain.keys[-1]] = chain, depth
        if len(shelf.backlog) > _BACKLOG_CHAINS:
            shelf.backlog.pop(next(iter(shelf.backlog)))
            shelf.dropped += 1

    def _resume(self, shelf: Shelf, now: float) -> None:
        while shelf.backlog and shelf.copying < self._most:
            chain, depth = shelf.backlog.pop(next(iter(shelf.backlog)))
            if shelf.index.depth(chain.keys) < depth:
                shelf.dropped += 1  # evicted meanwhile: two chains must not chase each other
            else:
                self.offer(shelf, chain, now)

    def _copy(self, shelf: Shelf, residents: Sequence[Resident], pages: Sequence[PageId]) -> None:
        """From the host where it has them, so that no device page is held for a slow tier. pages:
        of the device, or none where the host has them all."""
        host = self._host
        for first in range(0, len(residents), _ORDER_PAGES):
            part = slice(first, first + _ORDER_PAGES)
            keys = [resident.key for resident in residents[part]]
            order_id = self._ledger.next_id()
            if host is not None and shelf is not host and all(key in host.landed for key in keys):
                records = tuple(host.landed[key] for key in keys)
                host.index.pin(keys)
                self._ledger.give(
                    CopyDown(order_id, host.name, shelf.name, records),
                    Copy(shelf, records, source=host),
                )
            else:
                records = tuple(
                    PageRecord(at.key, at.parent, at.depth, at.owner, self._pool.generations[page])
                    for at, page in zip(residents[part], pages[part], strict=True)
                )
                held = list(pages[part][::-1])
                for at in residents[part]:
                    if at.parent not in keys:  # else its chain goes on in this order
                        held += self._cache.pages_before(at.key)
                self._pool.hold(held, HoldKind.TIER_COPY)
                self._ledger.give(
                    CopyOut(order_id, shelf.name, tuple(pages[part]), records),
                    Copy(shelf, records, held),
                )
            shelf.copying += len(keys)
            shelf.landing.update(dict.fromkeys(keys, order_id))

    def take(self, order_id: int, copy: Copy, done: OrderDone, now: float) -> None:
        """How a copy went."""
        shelf = copy.shelf
        failed: list[bytes] = []
        for record, status in zip(copy.records, done.statuses, strict=True):
            is_mine = shelf.landing.get(record.key) == order_id  # else it was evicted meanwhile
            if is_mine:
                del shelf.landing[record.key]
            if status is not Status.OK:
                shelf.dropped += 1
                if is_mine:
                    failed.append(record.key)
            elif is_mine:
                shelf.land(record)
                shelf.stored += 1
        shelf.copying -= len(copy.records)
        shelf.take_answers(done.statuses, now)
        if copy.source is not None:
            copy.source.index.unpin([record.key for record in copy.records])
            answers = zip(copy.records, done.statuses, strict=True)
            missing = (Status.MISS, Status.CORRUPT)
            self.forget(copy.source, [at.key for at, status in answers if status in missing])
        self.forget(shelf, failed)
        if failed:  # it would go the same way
            shelf.dropped += len(shelf.backlog)
            shelf.backlog.clear()
        self._resume(shelf, now)
        keys = tuple(record.key for record in copy.records)
        held = Held(shelf, HoldKind.TIER_COPY, copy.held, keys)
        self._ledger.give_back(order_id, held, is_overdue=Status.TIMEOUT in done.statuses)

    def forget(self, shelf: Shelf, keys: Sequence[bytes]) -> None:
        """These are lost, and so is what was built on them."""
        gone = shelf.index.forget([key for key in keys if key in shelf.index])
        shelf.let_go(gone)
        if shelf.is_own:  # others may still use what is left of it
            self._ledger.drop(shelf, gone)

    # --- before an end --------------------------------------------------------------------------

    def demote(self, now: float) -> None:
        """Put whatever is anywhere into the tier that survives this process, then flush it."""
        disk, host = self._disk, self._host
        if disk is None:
            return
        found = [] if host is None else [resident_of(record) for record in host.landed.values()]
        found += [
            Resident(page.key, page.parent, page.depth, page.owner)
            for page in self._cache.contents()
        ]
        by_key = {resident.key: resident for resident in found}  # parents before children
        self._demoting = deque(at for at in by_key.values() if at.key not in disk.index)
        self._flushes = True
        self.demote_more(now)

    @property
    def is_demoting(self) -> bool:
        """Whether demote's copies or its flush are not over yet."""
        return self._flushes or self._ledger.is_flushing

    def demote_more(self, now: float) -> None:
        """Go on with what demote began, as far as copies are over."""
        disk, host = self._disk, self._host
        if disk is None or not self._flushes:
            return
        while self._demoting and disk.copying < self._most:
            in_host: list[Resident] = []
            on_device: list[Resident] = []
            pages: list[PageId] = []
            evicted: list[bytes] = []
            while self._demoting and len(in_host) + len(on_device) < _ORDER_PAGES:
                resident = self._demoting.popleft()
                page = self._cache.page(resident.key)
                is_in_host = host is not None and resident.key in host.landed
                is_nowhere = page is None and not is_in_host
                if is_nowhere or resident.key in disk.index or now < disk.rests_until:
                    continue
                gone = disk.admit(resident, now, is_proven=True)
                if gone is None:
                    continue
                evicted += gone
                if is_in_host:
                    in_host.append(resident)
                elif page is not None:
                    on_device.append(resident)
                    pages.append(page)
            self._ledger.drop(disk, evicted)
            # What was evicted for a later one of this batch is not copied.
            held = [at for at, one in enumerate(on_device) if one.key in disk.index]
            self._copy(disk, [one for one in in_host if one.key in disk.index], [])
            self._copy(disk, [on_device[at] for at in held], [pages[at] for at in held])
        if not self._demoting and not disk.copying:
            self._flushes = False
            self._ledger.flush(disk)

    def purge(self, owner: bytes) -> None:
        """Nothing of this tenant is copied any more."""
        self._demoting = deque(at for at in self._demoting if at.owner != owner)
