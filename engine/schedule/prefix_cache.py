"""Pages kept for reuse, found by the content key of all tokens up to their end.

Keys form chains (policies/contract/page_keys): a page is useful only beside all pages before it. So
chains are published root first and evicted tail first, and a resident key proves its whole chain:
the deepest resident page of a prompt is found by bisection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.schedule.pages import HoldKind, PageId, PagePool
from policies.contract.page_keys import EVENT_KEY_BYTES
from policies.contract.wire import CacheCleared, PageEvent, PageRemoved, PageStored


@dataclass(eq=False, slots=True)
class _Node:
    key: bytes
    page: PageId
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixCache:
    """page_key → page over one pool. Its cache hold keeps a page until it is evicted."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._by_key: dict[bytes, _Node] = {}
        self._by_page: dict[PageId, _Node] = {}
        # The log begins with Cleared: whatever an engine before this one published is gone.
        self._events: list[PageEvent] = [CacheCleared()]
        self._first_event = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are resident now. Promises nothing for later: see hold_prefix."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._by_key:
                low = middle + 1
            else:
                high = middle
        return low

    def hold_prefix(self, keys: Sequence[bytes], max_pages: int) -> list[PageId]:
        """Find and hold (kind sequence) the resident prefix of at most max_pages pages, at once.

        One call, so that nothing can take a page between being found and being held.
        """
        depth = self.depth(keys[:max_pages])
        pages = [self._by_key[key].page for key in keys[:depth]]
        self._pool.hold(pages, HoldKind.SEQUENCE)
        return pages

    def publish(self, keys: Sequence[bytes], pages: Sequence[PageId]) -> None:
        """Make computed pages findable; keys and pages are a sequence's chain from its root.

        The first mapping of a key stays: a page computed twice remains private to its sequence.
        What was evicted from under the chain is published again, so that no page lacks a parent.
        """
        start = len(keys)
        while start and keys[start - 1] not in self._by_key:
            start -= 1
        parent = self._by_key[keys[start - 1]] if start else None
        for key, page in zip(keys[start:], pages[start:], strict=True):
            node = _Node(key, page, parent)
            self._pool.hold((page,), HoldKind.CACHE)
            self._by_key[key] = self._by_page[page] = node
            if parent is not None:
                parent.children[key] = node
            self._events.append(PageStored(key[:EVENT_KEY_BYTES]))
            parent = node

    def evict(self) -> bool:
        """Free the longest idle page that has no child; False when there is none.

        Sequences release their tail first, so this is nearly always the first idle page.
        """
        for page in self._pool.idle:
            node = self._by_page[page]
            if not node.children:
                self._drop(node)
                return True
        return False

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

    def take_events(self) -> tuple[int, list[PageEvent]]:
        """(sequence number of the first, the events since the last call)."""
        first, events = self._first_event, self._events
        self._first_event += len(events)
        self._events = []
        return first, events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def _drop(self, node: _Node) -> None:
        del self._by_key[node.key], self._by_page[node.page]
        if node.parent is not None:
            del node.parent.children[node.key]
        self._events.append(PageRemoved(node.key[:EVENT_KEY_BYTES]))
        self._pool.release((node.page,), HoldKind.CACHE)

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
