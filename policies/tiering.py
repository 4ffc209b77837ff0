"""Which pages a tier keeps, which go first, and when fetching one beats computing it.

Keys form chains (contract/page_keys), so pages are admitted root first and evicted tail first: a
page with a resident child never goes. Among the tails the one with the least score goes: recency
and frequency in one number (LRFU; Lee et al., IEEE Transactions on Computers, 2001), kept also for
pages that are not resident, in a bounded list of ghosts (as ARC does; Megiddo and Modha, 2003).
Pure: time is an argument, and a clock that steps back only makes a use count for less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import product
from math import exp, log, log2

from policies.contract.page_keys import resident_pages
from policies.contract.wire import Tier

# A count's half life is so many times the usual pause of a session, which is learned: 300 s for
# people who chat, 30 s for agents. Fixed, either does badly with the other (docs/decisions.md).
PAUSES = 2.5
FIRST_PAUSE_S = 120.0
PAUSE_WEIGHT = 1 / 64  # of each new pause in the mean of their logarithms

GHOSTS_PER_PAGE = 4
MAX_GHOSTS = 1 << 18
RETAINED_SHARE = 0.5  # of a tier at most, so that hints cannot close it to everybody else

FETCH_BASE_S = 0.25
FETCH_SLACK = 4.0  # a fetch may take so many times what the measured rate promises
FETCH_CAP_S = 10.0


def keep_score(
    now: float, before: float | None = None, half_life_s: float = PAUSES * FIRST_PAUSE_S
) -> float:
    """A page's score after a use now, from its score before; the greater one is kept longer.

    now + half life × log2(the number of its uses, each decayed to now): seconds on the clock of
    now, so scores of different ages compare without being brought up to date.
    """
    if before is None:
        return now
    # From the later of the two, so that nothing overflows: a score may lie a thousand half lives
    # ahead, of the time when they were longer.
    half_lives = abs(before - now) / half_life_s
    return max(before, now) + half_life_s * log2(1.0 + 2.0**-half_lives)


class HalfLife:
    """That of a page's uses, learned from the pauses between a session's turns."""

    def __init__(self) -> None:
        self._log_pause = log(FIRST_PAUSE_S)

    @property
    def seconds(self) -> float:
        return PAUSES * exp(self._log_pause)

    def learn(self, used_at: float, now: float) -> None:
        """A prompt came whose deepest known page was used once before, then: so a session goes on
        where it ended. A page of more uses is one that sessions share, it tells nothing."""
        if now > used_at:
            self._log_pause += PAUSE_WEIGHT * (log(now - used_at) - self._log_pause)


@dataclass(frozen=True, slots=True)
class Resident:
    """A page that a tier holds. parent: the key before it, or the chain's root at depth 0. owner:
    page_keys.owner_tag of the tenant's salt."""

    key: bytes
    parent: bytes
    depth: int
    owner: bytes


@dataclass(eq=False, slots=True)
class _Node:
    page: Resident
    parent: _Node | None
    score: float
    uses: int
    retain_until: float = 0.0  # 0: not retained
    children: dict[bytes, _Node] | None = None
    entry: int = 0  # serial number of its one valid entry in a queue; 0: it has none


# (score or retain_until, serial number, node). Both only rise, so an entry may lag behind its node:
# it is put right when it comes first.
_Entry = tuple[float, int, _Node]


@dataclass(eq=False, slots=True)
class _Queue:
    """Pages without children; retained ones go by when that ends, others by score."""

    heap: list[_Entry] = field(default_factory=list)
    limit: int = 64  # at which entries that are no longer valid are swept out

    def push(self, rank: float, serial: int, node: _Node) -> None:
        if len(self.heap) >= self.limit:
            self.heap = [entry for entry in self.heap if entry[2].entry == entry[1]]
            heapify(self.heap)
            self.limit = 2 * len(self.heap) + 64
        heappush(self.heap, (rank, serial, node))


@dataclass(slots=True)
class _Ghost:
    score: float
    uses: int


def quota_pages(shares: Mapping[bytes, float], num_pages: int) -> dict[bytes, int]:
    """What owners' shares of a tier come to; a share is taken as 0 to 1."""
    return {owner: int(min(1.0, max(0.0, share)) * num_pages) for owner, share in shares.items()}


class TierIndex:
    """Which pages one tier holds, and which go first: tail first, by recency and frequency.

    quotas: pages that are an owner's own. An owner over its quota evicts its own pages first,
    and nobody evicts those of another that is not over its quota; owners without one share the
    rest. needs_second_use: a page is admitted only when touch has seen it twice, or retained.

    One call to touch is one use: call it once for a request, before its pages are admitted.
    Every call takes O(1) or O(log pages) for each key, plus the number of quotas where it evicts.
    """

    def __init__(
        self,
        capacity_pages: int,
        *,
        quotas: Mapping[bytes, int] | None = None,
        needs_second_use: bool = False,
    ) -> None:
        quotas = dict(quotas or {})
        if capacity_pages < 1:
            raise ValueError(f"capacity_pages is {capacity_pages}, want at least 1")
        if min(quotas.values(), default=0) < 0 or sum(quotas.values()) > capacity_pages:
            raise ValueError(
                f"quotas are {sorted(quotas.values())}, want 0 or more each and"
                f" {capacity_pages} at most together, as the tier has"
            )
        self.capacity_pages = capacity_pages
        self.needs_second_use = needs_second_use
        self.charged_pages = 0  # evicted from an owner over its quota, for another of its own
        self._max_ghosts = min(GHOSTS_PER_PAGE * capacity_pages, MAX_GHOSTS)
        self._max_retained = int(RETAINED_SHARE * capacity_pages)
        self._nodes: dict[bytes, _Node] = {}
        self._ghosts: OrderedDict[bytes, _Ghost] = OrderedDict()  # longest unused first
        self._quotas: dict[bytes, int] = {}
        self._owned: dict[bytes, int] = {}
        self._pins: dict[bytes, int] = {}
        # Pages without children, by score: each quota's owner has a queue, all others share one.
        self._shared = _Queue()
        self._queues: dict[bytes, _Queue] = {}
        self._retained: dict[bytes, _Queue] = {}  # those of them that are retained, by owner
        self._expiries: list[tuple[float, int, _Node]] = []  # of all retained pages
        self._num_retained = 0
        self._serial = 0
        self._half_life = HalfLife()
        self.set_quotas(quotas)

    def set_quotas(self, quotas: Mapping[bytes, int]) -> None:
        """These, and no others, from now on. Walks all pages where they differ from before."""
        if quotas == self._quotas:
            return
        self._quotas = dict(quotas)
        self._shared, self._queues = _Queue(), {owner: _Queue() for owner in quotas}
        for node in self._nodes.values():
            if not node.retain_until:
                self._requeue(node)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are resident."""
        return resident_pages(keys, self._nodes.__contains__)

    def touch(self, keys: Sequence[bytes], now: float) -> None:
        """A use of this chain, whether its pages were found here or had to be computed."""
        depth = self.depth(keys)
        self._learn_pause(keys, depth, now)
        half_life_s = self.half_life_s
        before = after = None  # neighbours mostly have one history: compute it once
        for key in keys[:depth]:
            node = self._nodes[key]
            if after is None or node.score != before:
                before, after = node.score, keep_score(now, node.score, half_life_s)
            node.score = after
            node.uses += 1
        ghosts = self._ghosts
        for key in reversed(keys[depth:]):  # tails are forgotten before what they are built on
            ghost = ghosts.get(key)
            if ghost is None:
                ghosts[key] = _Ghost(now, 1)
            else:
                ghost.score = keep_score(now, ghost.score, half_life_s)
                ghost.uses += 1
                ghosts.move_to_end(key)
        self._forget_oldest_ghosts()

    @property
    def half_life_s(self) -> float:
        return self._half_life.seconds

    def _learn_pause(self, keys: Sequence[bytes], depth: int, now: float) -> None:
        known: _Node | _Ghost | None = self._nodes[keys[depth - 1]] if depth else None
        for key in keys[depth:]:
            ghost = self._ghosts.get(key)
            if ghost is None:
                break
            known = ghost
        if known is not None and known.uses == 1:
            self._half_life.learn(known.score, now)  # the score of one use is its time

    def admit(
        self, page: Resident, now: float, *, retain_until: float = 0.0
    ) -> tuple[bytes, ...] | None:
        """Keys to evict for this page, which counts as held from now on; None: it is not admitted.

        Refused: a page whose parent is not held, one that lacks its second use, and one for which
        nothing may go (pinned, retained, or within the quotas of others). A page that is held
        already is only retained. Retained pages go last, only for pages of their own owner.
        Raises ValueError for a page whose parent has another owner or is not the depth before it.
        """
        self._expire(now)
        if page.key in self._nodes:
            self.retain((page.key,), retain_until)
            return ()
        parent = None
        if page.depth:
            parent = self._nodes.get(page.parent)
            if parent is None:
                return None
            if parent.page.owner != page.owner or parent.page.depth != page.depth - 1:
                raise ValueError(f"{page} cannot follow {parent.page}")
        ghost = self._ghosts.get(page.key)
        is_second_use = ghost is not None and ghost.uses > 1
        if self.needs_second_use and not is_second_use and retain_until <= now:
            return None
        evicted: tuple[bytes, ...] = ()
        if len(self._nodes) >= self.capacity_pages:
            victim = self._choose_victim(page.owner, parent)
            if victim is None:
                return None
            evicted = (victim.page.key,)
            self._remember(victim)
            self._drop(victim)
        self._hold(page, parent, ghost or _Ghost(now, 1))
        if retain_until > now:
            self.retain((page.key,), retain_until)
        return evicted

    def restore(self, pages: Iterable[Resident], now: float) -> list[bytes]:
        """Hold what a tier found in itself at its start, parents first, without a second use.

        Returns the keys that are not held, for want of a parent or of room: the tier drops them.
        """
        left: list[bytes] = []
        for page in pages:
            parent = self._nodes.get(page.parent) if page.depth else None
            is_orphan = page.depth > 0 and (parent is None or parent.page.owner != page.owner)
            if page.key in self._nodes:
                continue
            if is_orphan or len(self._nodes) >= self.capacity_pages:
                left.append(page.key)
            else:
                self._hold(page, parent, _Ghost(now, 1))
        return left

    def retain(self, keys: Iterable[bytes], retain_until: float) -> None:
        """Keep those of these pages that are held until then at least, by an explicit hint only.

        Beyond RETAINED_SHARE of the tier the hint is not taken: the page is kept like any other.
        """
        for key in keys:
            node = self._nodes.get(key)
            if node is None or retain_until <= node.retain_until:
                continue
            is_new = not node.retain_until
            if is_new and self._num_retained >= self._max_retained:
                continue
            node.retain_until = retain_until
            if is_new:
                self._num_retained += 1
                self._requeue(node)
            self._serial += 1
            heappush(self._expiries, (retain_until, self._serial, node))
            if len(self._expiries) > 2 * self._num_retained + 64:
                self._expiries = [one for one in self._expiries if one[2].retain_until == one[0]]
                heapify(self._expiries)

    def forget(self, keys: Iterable[bytes]) -> tuple[bytes, ...]:
        """Drop these pages (removed, corrupt, failed) and all that was built on them: the keys that
        are held no more, tails first, pinned ones too."""
        gone: list[bytes] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                continue
            doomed = [node]
            for one in doomed:  # grows while it is walked: parents before children
                if one.children:
                    doomed.extend(one.children.values())
            for one in reversed(doomed):
                self._drop(one)
                gone.append(one.page.key)
        return tuple(gone)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Nothing evicts these pages until each pin has had its unpin. Counts are by key: whether a
        page is held now, was forgotten or comes back makes no difference to them."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            pins = self._pins.get(key, 0)
            if pins > 1:
                self._pins[key] = pins - 1
            elif pins:
                del self._pins[key]
                node = self._nodes.get(key)
                if node is not None:
                    self._enqueue(node)

    def owned(self, owner: bytes) -> tuple[bytes, ...]:
        """The pages of one owner, parents before children. Walks all pages."""
        nodes = [node.page for node in self._nodes.values() if node.page.owner == owner]
        return tuple(page.key for page in sorted(nodes, key=lambda page: page.depth))

    def num_owned(self, owner: bytes) -> int:
        return self._owned.get(owner, 0)

    def _hold(self, page: Resident, parent: _Node | None, history: _Ghost) -> None:
        node = _Node(page, parent, history.score, history.uses)
        self._nodes[page.key] = node
        self._owned[page.owner] = self._owned.get(page.owner, 0) + 1
        self._ghosts.pop(page.key, None)
        if parent is not None:
            if parent.children is None:
                parent.children = {}
            parent.children[page.key] = node
        self._enqueue(node)

    def _drop(self, node: _Node) -> None:
        page = node.page
        del self._nodes[page.key]
        self._owned[page.owner] -= 1
        if not self._owned[page.owner]:
            del self._owned[page.owner]
            self._retained.pop(page.owner, None)
        if node.retain_until:
            node.retain_until = 0.0
            self._num_retained -= 1
        node.entry = 0
        if node.parent is not None:
            assert node.parent.children is not None
            del node.parent.children[page.key]
            self._enqueue(node.parent)

    def _remember(self, node: _Node) -> None:
        self._ghosts[node.page.key] = _Ghost(node.score, node.uses)
        self._forget_oldest_ghosts()

    def _forget_oldest_ghosts(self) -> None:
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def _choose_victim(self, owner: bytes, parent: _Node | None) -> _Node | None:
        """The page that goes for one of this owner's; never the parent that it will stand on."""
        spared = () if parent is None else (parent.page.key,)
        self.pin(spared)
        victim = None
        if self._is_over(owner, 1):
            victim = self._least(self._queues[owner])
            self.charged_pages += victim is not None
        if victim is None:
            victim = self._least(self._shared)
            for one, queue in self._queues.items():
                if one == owner or self._is_over(one):
                    tail = self._least(queue)
                    if tail is not None and (victim is None or tail.score < victim.score):
                        victim = tail
        if victim is None and owner in self._retained:
            victim = self._least(self._retained[owner])
        self.unpin(spared)
        return victim

    def _is_over(self, owner: bytes, more: int = 0) -> bool:
        """Has this owner more pages than its quota, with so many more? Without one it has not."""
        quota = self._quotas.get(owner)
        return quota is not None and self._owned.get(owner, 0) + more > quota

    def _least(self, queue: _Queue) -> _Node | None:
        """The first page of a queue that may go; entries that lag behind are put right."""
        while queue.heap:
            rank, serial, node = queue.heap[0]
            is_valid = node.entry == serial
            is_free = not node.children and node.page.key not in self._pins
            if is_valid and is_free and rank == (node.retain_until or node.score):
                return node
            heappop(queue.heap)
            if is_valid:
                self._requeue(node)
        return None

    def _requeue(self, node: _Node) -> None:
        node.entry = 0
        self._enqueue(node)

    def _enqueue(self, node: _Node) -> None:
        """Into the queue that it belongs to, unless it has an entry or may not go now."""
        key, owner = node.page.key, node.page.owner
        if node.entry or node.children or key in self._pins or self._nodes.get(key) is not node:
            return
        self._serial += 1
        node.entry = self._serial
        if node.retain_until:
            queue = self._retained.setdefault(owner, _Queue())
            queue.push(node.retain_until, node.entry, node)
        else:
            self._queues.get(owner, self._shared).push(node.score, node.entry, node)

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            until, _, node = heappop(self._expiries)
            if node.retain_until == until:
                node.retain_until = 0.0
                self._num_retained -= 1
                self._requeue(node)

    def invariants(self) -> None:
        """Raise AssertionError unless pages, chains, owners, queues and bounds agree."""
        nodes = self._nodes
        assert len(nodes) <= self.capacity_pages
        assert len(self._ghosts) <= self._max_ghosts
        assert not self._ghosts.keys() & nodes.keys()
        queues = [self._shared, *self._queues.values(), *self._retained.values()]
        entries = [entry for queue in queues for entry in queue.heap if entry[1] == entry[2].entry]
        queued = {entry[2].page.key for entry in entries}
        assert len(queued) == len(entries)
        assert max(len(queue.heap) for queue in queues) <= 2 * self.capacity_pages + 64
        assert queued <= nodes.keys()
        owned: dict[bytes, int] = {}
        for key, node in nodes.items():
            assert node.page.key == key
            assert (node.parent is None) == (node.page.depth == 0)
            if node.parent is not None:
                assert nodes.get(node.page.parent) is node.parent
                assert (node.parent.children or {}).get(key) is node
            assert node.children or key in self._pins or key in queued
            owned[node.page.owner] = owned.get(node.page.owner, 0) + 1
        assert owned == self._owned
        assert min(self._pins.values(), default=1) > 0
        assert self._retained.keys() <= owned.keys()
        assert self._num_retained == sum(node.retain_until > 0 for node in nodes.values())
        assert self._num_retained <= self._max_retained
        assert len(self._expiries) <= 2 * self._max_retained + 64
        children = sum(len(node.children or ()) for node in nodes.values())
        assert children == sum(node.parent is not None for node in nodes.values())


def pages_worth_fetching(
    depth_by_tier: Mapping[Tier, int],
    device_pages: int,
    page_tokens: int,
    page_bytes: int,
    rates: Mapping[Tier, float],
    latency_s: Mapping[Tier, float],
    prefill_tokens_per_s: float,
) -> list[tuple[Tier, int, int]]:
    """Runs (tier, first page, page after the last) whose fetch is quicker than computing them.

    They join, from device_pages on: what is behind a gap is of no use. depth_by_tier: leading pages
    that each tier holds; rates: bytes/s, 0: not usable; a prefill rate of 0 is not known yet, and
    any fetch beats it. Of all ways to split the pages among tiers the one that saves most time is
    taken; [] when computing is the quickest.
    """
    usable = [tier for tier in depth_by_tier if rates.get(tier, 0.0) > 0.0]
    bounds = sorted({depth_by_tier[tier] for tier in usable if depth_by_tier[tier] > device_pages})
    compute_s = page_tokens / max(prefill_tokens_per_s, 1e-9)
    best_s, best = 0.0, list[tuple[Tier, int, int]]()
    for count in range(1, len(bounds) + 1):
        for choice in product(usable, repeat=count):
            runs: list[tuple[Tier, int, int]] = []
            first = device_pages
            for tier, stop in zip(choice, bounds[:count], strict=True):
                if runs and runs[-1][0] == tier:
                    runs[-1] = (tier, runs[-1][1], stop)
                else:
                    runs.append((tier, first, stop))
                first = stop
            if any(stop > depth_by_tier[tier] for tier, _, stop in runs):
                continue
            saved_s = sum(
                (stop - start) * (compute_s - page_bytes / rates[tier]) - latency_s.get(tier, 0.0)
                for tier, start, stop in runs
            )
            if saved_s > best_s:
                best_s, best = saved_s, runs
    return best


def fetch_deadline_s(pages: int, page_bytes: int, rate: float, latency: float) -> float:
    """Seconds after which a fetch of so many pages is given up. rate: bytes/s, 0: not known."""
    if rate <= 0.0:
        return FETCH_CAP_S
    expected_s = latency + pages * page_bytes / rate
    return min(FETCH_CAP_S, FETCH_BASE_S + FETCH_SLACK * expected_s)
