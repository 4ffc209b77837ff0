"""The prefix cache: chains stay whole, first mappings stay, and its events retell its content."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.schedule.pages import HoldKind, PageId, PagePool
from engine.schedule.prefix_cache import PrefixCache, Provenance
from policies.contract.page_keys import next_key
from policies.contract.wire import CacheCleared, PageEvent, PageRemoved, PageStored

NUM_PAGES = 10
WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


def chain(word: list[int]) -> list[bytes]:
    keys, parent = [], b"root"
    for letter in word:
        parent = next_key(parent, bytes([letter]))
        keys.append(parent)
    return keys


def take(pool: PagePool, count: int) -> list[PageId]:
    pages = [pool.take(HoldKind.SEQUENCE) for _ in range(count)]
    assert None not in pages
    return [page for page in pages if page is not None]


def replay(events: list[PageEvent], resident: set[bytes]) -> None:
    for event in events:
        match event:
            case CacheCleared():
                resident.clear()
            case PageStored(page_key=key):
                assert key not in resident
                resident.add(key)
            case PageRemoved(page_key=key):
                resident.remove(key)


class PrefixCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.cache = PrefixCache(self.pool)
        self.tables: list[tuple[list[bytes], list[PageId]]] = []  # sequences that hold pages
        self.resident: set[bytes] = set()
        self.next_event = 0

    @rule(word=WORDS)
    def begin(self, word: list[int]) -> None:
        """A sequence takes its hit and fresh pages for the rest; nothing is published yet."""
        keys = chain(word)
        before = self.cache.depth(keys)
        pages = self.cache.hold_prefix(keys, len(keys) - 1)
        assert len(pages) == min(before, len(keys) - 1)
        while len(pages) < len(keys):
            page = self.pool.take(HoldKind.SEQUENCE)
            if page is None and self.cache.evict():
                page = self.pool.take(HoldKind.SEQUENCE)
            if page is None:
                self.pool.release(reversed(pages), HoldKind.SEQUENCE)
                return
            pages.append(page)
        self.tables.append((keys, pages))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        keys, pages = data.draw(st.sampled_from(self.tables))
        sealed = data.draw(st.integers(1, len(keys)))
        before = {key: self.cache.hold_prefix([key], 1) for key in keys[:sealed]}
        self.cache.publish(keys[:sealed], pages[:sealed])
        assert self.cache.depth(keys) >= sealed
        for key, (*first,) in before.items():
            after = self.cache.hold_prefix([key], 1)
            assert not first or after == first, "the first mapping of a key stays"
            self.pool.release([*first, *after], HoldKind.SEQUENCE)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(reversed(table[1]), HoldKind.SEQUENCE)

    @rule()
    def evict(self) -> None:
        held = {page for _, pages in self.tables for page in pages}
        kept = [page for page in held if self.pool.holds(page, HoldKind.CACHE)]
        size = len(self.cache)
        assert self.cache.evict() == (len(self.cache) < size)
        assert all(self.pool.holds(page, HoldKind.CACHE) for page in kept), "a held page went"

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        _, pages = data.draw(st.sampled_from(self.tables))
        self.cache.forget(pages[-1:])
        assert not self.pool.holds(pages[-1], HoldKind.CACHE)

    @invariant()
    def chains_are_whole_and_told(self) -> None:
        self.pool.invariants()
        self.cache.invariants()
        first, events = self.cache.take_events()
        assert first == self.next_event
        self.next_event += len(events)
        replay(events, self.resident)
        assert len(self.resident) == len(self.cache)


SMALL = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_prefix_cache_machine() -> None:
    run_state_machine_as_test(PrefixCacheMachine, settings=SMALL)


@pytest.mark.slow
def test_prefix_cache_machine_at_length() -> None:
    run_state_machine_as_test(
        PrefixCacheMachine, settings=settings(SMALL, max_examples=5000, stateful_step_count=80)
    )


def published(words: list[list[int]]) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(16)
    cache = PrefixCache(pool)
    for word in words:
        keys = chain(word)
        pages = cache.hold_prefix(keys, len(keys))
        pages += take(pool, len(keys) - len(pages))
        cache.publish(keys, pages)
        pool.release(reversed(pages), HoldKind.SEQUENCE)
    return pool, cache


def test_tails_go_before_roots_and_old_chains_before_new() -> None:
    _, cache = published([[0, 0, 0], [1, 1, 1]])
    assert cache.hold_prefix(chain([0, 0]), 2)  # in use again: only its tail may go
    sizes = []
    while cache.evict():
        sizes.append((cache.depth(chain([0, 0, 0])), cache.depth(chain([1, 1, 1]))))
    assert sizes == [(2, 3), (2, 2), (2, 1), (2, 0)]


def test_a_page_recycled_has_lost_its_key() -> None:
    pool, cache = published([[0, 1]])
    while cache.evict():
        pass
    assert pool.num_free == 16
    take(pool, 16)
    assert cache.hold_prefix(chain([0, 1]), 2) == []


def test_a_page_found_is_held_by_the_same_call() -> None:
    _, cache = published([[0, 1]])
    (root,) = cache.hold_prefix(chain([0]), 1)
    while cache.evict():
        pass
    assert cache.hold_prefix(chain([0, 1]), 2) == [root]


def test_a_pinned_tail_keeps_its_parents() -> None:
    pool, cache = published([[0, 1, 0]])
    pages = cache.hold_prefix(chain([0, 1, 0]), 3)
    pool.hold(pages[2:], HoldKind.PIN)
    pool.release(reversed(pages), HoldKind.SEQUENCE)
    assert not cache.evict()
    pool.release(pages[2:], HoldKind.PIN)
    assert cache.evict()
    assert cache.depth(chain([0, 1, 0])) == 2


def test_events_begin_with_cleared_and_carry_sixteen_bytes() -> None:
    _, cache = published([[0, 1]])
    first, events = cache.take_events()
    assert first == 0
    assert events == [CacheCleared(), *(PageStored(key[:16]) for key in chain([0, 1]))]
    cache.evict()
    assert cache.take_events() == (3, [PageRemoved(chain([0, 1])[1][:16])])


def test_the_deepest_resident_page_is_found_at_any_depth() -> None:
    word = [random.Random(5).randrange(2) for _ in range(12)]
    for depth in range(13):
        _, cache = published([word[:depth]] if depth else [])
        assert cache.depth(chain(word)) == depth


def test_what_was_used_often_outlives_what_was_used_last() -> None:
    pool, cache = published([])
    for now, word in ((0.0, [0, 0]), (10.0, [1, 1])):
        pages = take(pool, 2)
        cache.publish(chain(word), pages, now=now)
        pool.release(reversed(pages), HoldKind.SEQUENCE)
    for now in (1.0, 2.0, 3.0):
        pages = cache.hold_prefix(chain([0, 0]), 2)
        cache.use(chain([0, 0]), now)
        pool.release(reversed(pages), HoldKind.SEQUENCE)
    sizes = []
    while cache.evict(11.0):
        sizes.append((cache.depth(chain([0, 0])), cache.depth(chain([1, 1]))))
    assert sizes == [(2, 1), (2, 0), (1, 0), (0, 0)]


def test_retained_pages_go_last_and_only_while_they_are_retained() -> None:
    for now, expected in ((50.0, [(2, 1), (2, 0), (1, 0), (0, 0)]), (70.0, [(1, 2), (0, 2)])):
        pool, cache = published([])
        for at, word, until in ((0.0, [0, 0], 60.0), (10.0, [1, 1], 0.0)):
            pages = take(pool, 2)
            cache.publish(chain(word), pages, now=at, retain_until=until)
            pool.release(reversed(pages), HoldKind.SEQUENCE)
        sizes = []
        while cache.evict(now):
            sizes.append((cache.depth(chain([0, 0])), cache.depth(chain([1, 1]))))
        assert sizes[: len(expected)] == expected


def test_a_hit_prolongs_a_retention_and_never_shortens_it() -> None:
    pool, cache = published([])
    pages = take(pool, 1)
    cache.publish(chain([0]), pages, now=0.0, retain_until=60.0)
    pool.release(pages, HoldKind.SEQUENCE)
    for until in (100.0, 0.0):
        pages = cache.hold_prefix(chain([0]), 1)
        cache.use(chain([0]), 5.0, retain_until=until)
        pool.release(pages, HoldKind.SEQUENCE)
    other = take(pool, 1)
    cache.publish(chain([1]), other, now=80.0)
    pool.release(other, HoldKind.SEQUENCE)
    assert cache.evict(90.0)
    assert (cache.depth(chain([0])), cache.depth(chain([1]))) == (1, 0)


def test_the_heaps_stay_small_however_often_a_page_is_used() -> None:
    pool, cache = published([[0], [1]])
    for _ in range(1000):
        pages = cache.hold_prefix(chain([0]), 1)
        pool.release(pages, HoldKind.SEQUENCE)
        cache._take_idled()
    assert len(cache._shared) <= 4 * pool.num_pages + 1
    assert cache.evict()
    assert cache.evict()
    assert not cache.evict()


def test_sources_are_counted_for_who_waited_for_them() -> None:
    pool, cache = published([[0]])
    pages = take(pool, 2)
    cache.publish(chain([0, 1, 1]), pages, first=1, source="disk", now=50.0)
    assert cache.count_sources(chain([0, 1, 1]), since=40.0) == {"disk": 2}
    assert cache.count_sources(chain([0, 1, 1]), since=51.0) == {}


def test_a_tenants_pages_are_forgotten_and_no_others() -> None:
    pool, cache = published([])
    for word, owner in (([0, 0], b"a"), ([1, 1], b"b")):
        pages = take(pool, 2)
        cache.publish(chain(word), pages, whose=Provenance(b"root", owner))
        pool.release(reversed(pages), HoldKind.SEQUENCE)
    assert cache.forget_owner(b"a") == 2
    assert [(page.parent, page.depth) for page in cache.contents()] == [
        (b"root", 0),
        (chain([1])[0], 1),
    ]
    assert all(page.owner == b"b" for page in cache.contents())


def idle(pool: PagePool, cache: PrefixCache, owner: bytes, word: list[int], now: float) -> None:
    pages = take(pool, len(word))
    cache.publish(chain(word), pages, whose=Provenance(b"root", owner), now=now)
    pool.release(reversed(pages), HoldKind.SEQUENCE)


def owners(cache: PrefixCache) -> list[bytes]:
    return sorted(page.owner for page in cache.contents())


def test_a_tenant_over_its_quota_pays_with_its_own_pages() -> None:
    pool, cache = published([])
    idle(pool, cache, b"a", [0, 0, 0], now=1.0)
    idle(pool, cache, b"b", [1, 1, 1], now=2.0)
    cache.set_quotas({b"a": 3, b"b": 2})
    assert cache.evict(3.0, b"b"), "a's are older"
    assert cache.evict(3.0, b"b")
    assert owners(cache) == [b"a", b"a", b"a", b"b"]
    assert (cache.charged_pages, cache.quota_breaches) == (2, 0)
    cache.invariants()


def test_others_take_what_is_beyond_a_quota_and_leave_what_is_within() -> None:
    pool, cache = published([])
    idle(pool, cache, b"a", [0, 0, 0], now=1.0)
    idle(pool, cache, b"c", [1, 1], now=2.0)
    cache.set_quotas({b"a": 2})
    for left in ([b"a", b"a", b"c", b"c"], [b"a", b"a", b"c"], [b"a", b"a"]):
        assert cache.evict(3.0, b"c")
        assert owners(cache) == left
    assert (cache.charged_pages, cache.quota_breaches) == (0, 0)
    assert cache.evict(3.0, b"c"), "a sequence that runs must have its pages"
    assert (owners(cache), cache.quota_breaches) == ([b"a"], 1)


def test_what_is_retained_goes_before_what_is_within_the_quota_of_another() -> None:
    pool, cache = published([])
    idle(pool, cache, b"a", [0], now=1.0)
    pages = take(pool, 1)
    cache.publish(chain([1]), pages, whose=Provenance(b"root", b"c"), retain_until=99.0)
    pool.release(pages, HoldKind.SEQUENCE)
    cache.set_quotas({b"a": 1})
    assert cache.evict(3.0, b"d")
    assert owners(cache) == [b"a"]


def test_quotas_that_are_taken_back_hold_nothing_any_more() -> None:
    pool, cache = published([])
    idle(pool, cache, b"a", [0], now=1.0)
    idle(pool, cache, b"c", [1], now=2.0)
    cache.set_quotas({b"a": 1})
    cache.set_quotas({})
    assert cache.evict(3.0, b"c")
    assert (owners(cache), cache.quota_breaches) == ([b"c"], 0)
