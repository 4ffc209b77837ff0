"""Pages kept for reuse, found by the content key of all tokens up to their end.

Keys form chains (policies/contract/page_keys): a page is useful only beside all pages before it. So
chains are published root first and evicted tail first, and a resident key proves its whole chain:
the deepest resident page of a prompt is found by bisection. Of the tails that could go, the one
with the lowest keep score goes first, and retained ones only when there is nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from engine.schedule.page_events import PageEventLog
from engine.schedule.pages import HoldKind, PageId, PagePool
from policies.contract.page_keys import resident_pages
from policies.contract.wire import PageEvent, Tier
from policies.tiering import HalfLife, keep_score

_STALE_ENTRIES = 4  # times the pool's pages; then the heaps are built anew


@dataclass(frozen=True, slots=True)
class Provenance:
    """Whose a chain is. root: what its first key was made from. owner: page_keys.owner_tag."""

    root: bytes = b""
    owner: bytes = b""


@dataclass(eq=False, slots=True)
class _Node:
    key: bytes
    page: PageId
    parent: _Node | None
    whose: Provenance
    source: Tier  # where it came from: computed is "device"
    since: float
    score: float
    retain_until: float
    uses: int = 1
    turn: int = 0  # when it last became idle: a counter, so that equal histories evict equally
    children: dict[bytes, _Node] = field(default_factory=dict)


_Entry = tuple[float, int, int, _Node]  # the turn at which it was pushed, and which push it was


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A page of the cache as a tier would keep it."""

    key: bytes
    page: PageId
    parent: bytes
    depth: int
    owner: bytes


class PrefixCache:
    """page_key → page over one pool. Its cache hold keeps a page until it is evicted."""

    def __init__(self, pool: PagePool, events: PageEventLog | None = None) -> None:
        self._pool = pool
        self._by_key: dict[bytes, _Node] = {}
        self._by_page: dict[PageId, _Node] = {}
        self._events = PageEventLog() if events is None else events
        self._turn = self._pushes = 0
        self._half_life = HalfLife()
        # Idle nodes without children, beside entries of what is no longer so.
        self._ripe: list[_Entry] = []  # by score
        self._retained: list[_Entry] = []  # by the end of their retention

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are resident now. Promises nothing for later: see hold_prefix."""
        return resident_pages(keys, self._by_key.__contains__)

    def hold_prefix(
        self, keys: Sequence[bytes], max_pages: int, *, kind: HoldKind = HoldKind.SEQUENCE
    ) -> list[PageId]:
        """Find and hold the resident prefix of at most max_pages pages, at once.

        One call, so that nothing can take a page between being found and being held.
        """
        depth = self.depth(keys[:max_pages])
        pages = [self._by_key[key].page for key in keys[:depth]]
        self._pool.hold(pages, kind)
        return pages

    def use(self, keys: Sequence[bytes], now: float, *, retain_until: float = 0.0) -> None:
        """A sequence begins on these resident pages, which it holds."""
        nodes = [self._by_key[key] for key in keys]
        if nodes and nodes[-1].uses == 1:
            self._half_life.learn(nodes[-1].score, now)
        half_life_s = self._half_life.seconds
        for node in nodes:
            node.score = keep_score(now, node.score, half_life_s)
            node.uses += 1
            node.retain_until = max(node.retain_until, retain_until)

    def page(self, key: bytes) -> PageId | None:
        """Where a key is now, held by nobody for it: see depth."""
        node = self._by_key.get(key)
        return None if node is None else node.page

    def pages_before(self, key: bytes) -> list[PageId]:
        """The pages that a resident key's chain has before it, its root last: while the key's page
        is held they cannot be evicted, so whoever holds it alone holds these too, to be counted."""
        node = self._by_key.get(key)
        pages: list[PageId] = []
        while node is not None and node.parent is not None:
            node = node.parent
            pages.append(node.page)
        return pages

    def count_sources(self, keys: Iterable[bytes], since: float) -> dict[Tier, int]:
        """Of resident keys: how many slower tiers brought at `since` or later, by tier."""
        counts: dict[Tier, int] = {}
        for key in keys:
            node = self._by_key[key]
            if node.source != "device" and node.since >= since:
                counts[node.source] = counts.get(node.source, 0) + 1
        return counts

    def publish(
        self,
        keys: Sequence[bytes],
        pages: Sequence[PageId],
        *,
        first: int = 0,
        whose: Provenance = Provenance(),  # frozen
        source: Tier = "device",
        now: float = 0.0,
        retain_until: float = 0.0,
    ) -> range:
        """Make pages findable; returns which of the chain are new.

        keys are a chain from its root, pages those of keys[first:]; keys[first - 1] is resident.
        The first mapping of a key stays: a page computed twice remains private to its sequence.
        What was evicted from under the chain is published again, so that no page lacks a parent.
        """
        start = len(keys)
        while start > first and keys[start - 1] not in self._by_key:
            start -= 1
        parent = self._by_key[keys[start - 1]] if start else None
        for key, page in zip(keys[start:], pages[start - first :], strict=True):
            node = _Node(key, page, parent, whose, source, now, keep_score(now), retain_until)
            self._pool.hold((page,), HoldKind.CACHE)
            self._by_key[key] = self._by_page[page] = node
            if parent is not None:
                parent.children[key] = node
            self._events.stored(key)
            parent = node
        return range(start, len(keys))

    def evict(self, now: float = 0.0) -> bool:
        """Free the idle page without a child that is worth least; False when there is none."""
        self._take_idled()
        while self._retained and self._retained[0][0] <= now:
            _, turn, _, node = heappop(self._retained)
            if self._is_ripe(node, turn):
                self._push(self._ripe, node.score, node)
        victim = self._pop(self._ripe) or self._pop(self._retained)
        if victim is None:
            return False
        self._drop(victim)
        return True

    def take(self, num_pages: int, kind: HoldKind, now: float = 0.0) -> list[PageId]:
        """Assign pages, evicting for them what is idle; fewer where there are no more."""
        pages: list[PageId] = []
        while len(pages) < num_pages:
            page = self._pool.take(kind)
            if page is not None:
                pages.append(page)
            elif not self.evict(now):
                break
        return pages

    def forget(self, pages: Iterable[PageId]) -> None:
        """Unpublish pages whose bytes are in doubt, and all that was built on them."""
        for page in pages:
            root = self._by_page.get(page)
            if root is None:
                continue
            doomed = [root]
            for node in doomed:  # grows while it is walked: parents before children
                doomed.extend(node.children.values())
            for node in reversed(doomed):
                self._drop(node)

    def forget_owner(self, owner: bytes) -> int:
        """Unpublish all pages of a tenant; returns how many there were."""
        mine = [node.page for node in self._by_key.values() if node.whose.owner == owner]
        self.forget(mine)
        return len(mine)

    def contents(self) -> Iterator[CachedPage]:
        """Every page, parents before children."""
        depths: dict[bytes, int] = {}
        for key, node in self._by_key.items():  # in order of publication
            depth = 0 if node.parent is None else depths[node.parent.key] + 1
            depths[key] = depth
            parent = node.whose.root if node.parent is None else node.parent.key
            yield CachedPage(key, node.page, parent, depth, node.whose.owner)

    def take_events(self) -> tuple[int, list[PageEvent]]:
        """(sequence number of the first, the events since the last call)."""
        return self._events.take()

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def _drop(self, node: _Node) -> None:
        del self._by_key[node.key], self._by_page[node.page]
        parent = node.parent
        if parent is not None:
            del parent.children[node.key]
            if self._is_ripe(parent, parent.turn):
                self._ripen(parent)
        self._events.removed(node.key)
        self._pool.release((node.page,), HoldKind.CACHE)

    # --- which goes first -----------------------------------------------------------------------

    def _take_idled(self) -> None:
        """Whatever became idle has its turn from now; what has no child may go."""
        for page in self._pool.take_idled():
            node = self._by_page.get(page)
            if node is not None:
                self._turn += 1
                node.turn = self._turn
                if self._is_ripe(node, node.turn):
                    self._ripen(node)
        if len(self._ripe) + len(self._retained) > _STALE_ENTRIES * self._pool.num_pages:
            for heap in (self._ripe, self._retained):
                heap[:] = [entry for entry in heap if self._is_ripe(entry[3], entry[1])]
                heapify(heap)

    def _is_ripe(self, node: _Node, turn: int) -> bool:
        return (
            not node.children
            and node.turn == turn
            and self._by_page.get(node.page) is node
            and node.page in self._pool.idle
        )

    def _ripen(self, node: _Node) -> None:
        if node.retain_until > 0:
            self._push(self._retained, node.retain_until, node)
        else:
            self._push(self._ripe, node.score, node)

    def _push(self, heap: list[_Entry], order: float, node: _Node) -> None:
        self._pushes += 1
        heappush(heap, (order, node.turn, self._pushes, node))

    def _pop(self, heap: list[_Entry]) -> _Node | None:
        while heap:
            _, turn, _, node = heappop(heap)
            if self._is_ripe(node, turn):
                return node
        return None

    def invariants(self) -> None:
        """Raise AssertionError unless maps, holds and chains agree."""
        assert len(self._by_key) == len(self._by_page)
        for key, node in self._by_key.items():
            assert node.key == key
            assert self._by_page[node.page] is node
            assert self._pool.holds(node.page, HoldKind.CACHE) == 1
            assert node.parent is None or self._by_key.get(node.parent.key) is node.parent
            assert node.parent is None or node.parent.children[key] is node
        children = sum(len(node.children) for node in self._by_key.values())
        assert children == sum(node.parent is not None for node in self._by_key.values())
        num_cached = sum(
            self._pool.holds(PageId(page), HoldKind.CACHE) for page in range(self._pool.num_pages)
        )
        assert num_cached == len(self._by_page)
