"""TierIndex against a plain model that looks at everything, and fetch plans by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2
from time import process_time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies import tiering
from policies.contract.wire import Tier
from policies.tiering import (
    FETCH_BASE_S,
    FETCH_CAP_S,
    FETCH_SLACK,
    FIRST_PAUSE_S,
    PAUSES,
    RETAINED_SHARE,
    Resident,
    TierIndex,
    fetch_deadline_s,
    keep_score,
    pages_worth_fetching,
    quota_pages,
)

HALF_LIFE_S = PAUSES * FIRST_PAUSE_S
A, B, C = b"tenant a", b"tenant b", b"tenant c"


def chain(owner: bytes, name: str) -> list[Resident]:
    """One page for each letter of name; equal beginnings are the same pages."""
    keys = [owner + name[:end].encode() for end in range(len(name) + 1)]
    return [
        Resident(key, parent, depth, owner) for depth, (parent, key) in enumerate(pairwise(keys))
    ]


def keys_of(pages: list[Resident]) -> list[bytes]:
    return [page.key for page in pages]


def use(index: TierIndex, pages: list[Resident], now: float) -> list[bytes]:
    """A request for this chain: what was evicted for it."""
    index.touch(keys_of(pages), now)
    evicted: list[bytes] = []
    for page in pages:
        gone = index.admit(page, now)
        if gone is None:
            break
        evicted += gone
    index.invariants()
    return evicted


def test_chains_go_tail_first_and_the_longest_unused_first() -> None:
    index = TierIndex(5)
    old, new = chain(A, "old"), chain(A, "ne")
    assert use(index, old, 1.0) == []
    assert use(index, new, 2.0) == []
    assert use(index, chain(A, "x"), 3.0) == [old[2].key]
    assert use(index, chain(A, "y"), 4.0) == [old[1].key]
    assert index.depth(keys_of(old)) == 1
    assert index.depth(keys_of(new)) == 2


def test_frequency_outweighs_a_little_recency_and_fades() -> None:
    for later, first in ((HALF_LIFE_S * 0.9, b"once"), (HALF_LIFE_S * 2.0, b"often")):
        index = TierIndex(2)
        often, once = Resident(b"often", b"", 0, A), Resident(b"once", b"", 0, A)
        for now in (0.0, 0.0):
            use(index, [often], now)
        use(index, [once], later)
        assert use(index, chain(A, "x"), later) == [first]


def test_a_root_that_many_share_makes_no_tail_frequent() -> None:
    index = TierIndex(5)
    for now, name in enumerate(("ra", "rb", "rc", "ra")):
        use(index, chain(A, name), float(now))
    use(index, chain(A, "x"), 4.0)
    gone = [use(index, chain(A, name), 5.0)[0] for name in "yz"]
    assert gone == [chain(A, name)[1].key for name in ("rb", "rc")]
    use(index, chain(A, "x"), 100.0)
    index.pin(keys_of(chain(A, "y") + chain(A, "z")))
    assert use(index, chain(A, "w"), 101.0) == [chain(A, "ra")[1].key]  # x was later


def test_an_evicted_page_keeps_its_history() -> None:
    index = TierIndex(2)
    back = chain(A, "b")
    use(index, back, 1000.0)
    use(index, chain(A, "x"), 1001.0)
    assert use(index, chain(A, "y"), 1002.0) == [back[0].key]
    assert use(index, back, 1003.0) == [chain(A, "x")[0].key]
    assert use(index, chain(A, "z"), 1100.0) == [chain(A, "y")[0].key]
    assert use(index, chain(A, "w"), 1101.0) == [chain(A, "z")[0].key]  # later, but once


def test_a_score_equals_the_sum_of_decayed_uses() -> None:
    score = keep_score(50.0, keep_score(20.0, keep_score(0.0)))
    uses = sum(2.0 ** ((used - 50.0) / HALF_LIFE_S) for used in (0.0, 20.0, 50.0))
    assert score == pytest.approx(50.0 + HALF_LIFE_S * log2(uses))


@pytest.mark.parametrize("ahead_s", [-1e6, 1e6], ids=["long ago", "far ahead"])
def test_a_score_of_many_half_lives_from_now_is_a_number(ahead_s: float) -> None:
    """A half life that shrinks leaves scores far ahead of the clock."""
    assert keep_score(10.0, 10.0 + ahead_s, 0.18) == pytest.approx(max(10.0, 10.0 + ahead_s))


def test_the_half_life_follows_the_pauses_of_sessions() -> None:
    index = TierIndex(100)
    assert index.half_life_s == pytest.approx(HALF_LIFE_S)
    for turn in range(400):  # one session, a page longer each time, in a cache that loses it
        index.touch([b"%d" % page for page in range(turn)], 12.0 * turn)
    assert index.half_life_s == pytest.approx(PAUSES * 12.0, rel=0.02)


def test_a_preamble_that_many_sessions_share_tells_nothing_of_their_pauses() -> None:
    index = TierIndex(100)
    for number in range(400):
        index.touch([b"preamble", b"%d" % number], 0.5 * number)
    assert index.half_life_s == pytest.approx(HALF_LIFE_S, rel=0.1)  # its second use was taken in


def test_a_second_use_opens_the_disk_root_first() -> None:
    index = TierIndex(4, needs_second_use=True)
    pages = chain(A, "ab")
    index.touch(keys_of(pages), 1.0)
    assert index.admit(pages[0], 1.0) is None
    index.touch(keys_of(pages), 2.0)
    assert index.admit(pages[1], 2.0) is None  # its parent is not there
    assert index.admit(pages[0], 2.0) == ()
    assert index.admit(pages[1], 2.0) == ()
    retained = chain(A, "r")
    assert index.admit(retained[0], 2.0, retain_until=3.0) == ()


def test_a_tenant_over_its_quota_evicts_its_own_pages() -> None:
    index = TierIndex(4, quotas={A: 2, B: 2})
    first, second = chain(A, "aa"), chain(B, "bb")
    use(index, first, 1.0)
    use(index, second, 2.0)
    assert use(index, chain(B, "c"), 3.0) == [second[1].key]  # not A's, though it is older
    assert use(index, chain(A, "c"), 4.0) == [first[1].key]


def test_room_that_nobody_claims_is_free_and_comes_back_from_the_borrower() -> None:
    index = TierIndex(4, quotas={A: 2, B: 1})
    use(index, chain(B, "bbbb"), 1.0)
    assert index.num_owned(B) == 4
    assert use(index, chain(A, "aa"), 2.0) == keys_of(chain(B, "bbbb"))[:1:-1]
    assert use(index, chain(C, "c"), 3.0) == [chain(B, "bb")[1].key]
    assert use(index, chain(C, "d"), 4.0) == [chain(C, "c")[0].key]  # all others are in quota


def test_who_was_evicted_for_being_over_a_quota_is_counted() -> None:
    index = TierIndex(2, quotas={A: 1})
    use(index, chain(A, "aa"), 1.0)
    use(index, chain(A, "b"), 2.0)
    use(index, chain(C, "c"), 3.0)
    assert (index.charged_pages, index.num_owned(A)) == (1, 1)


def test_shares_come_to_whole_pages_and_never_to_more_than_the_tier() -> None:
    shares = {b"a": 0.25, b"b": 0.3, b"c": -1.0, b"d": 7.0, b"e": float("nan")}
    assert quota_pages(shares, 10) == {b"a": 2, b"b": 3, b"c": 0, b"d": 10, b"e": 0}


def test_pinned_pages_stay_until_the_last_unpin() -> None:
    index = TierIndex(1)
    page, other = chain(A, "p"), chain(A, "o")
    use(index, page, 1.0)
    index.pin(keys_of(page))
    index.pin(keys_of(page))
    index.unpin(keys_of(page))
    assert index.admit(other[0], 2.0) is None
    index.unpin(keys_of(page))
    assert index.admit(other[0], 3.0) == (page[0].key,)


def test_a_pin_outlives_the_page_that_it_was_for() -> None:
    """Else the unpin of who pinned the lost page would open one that somebody else has pinned."""
    index = TierIndex(1)
    page, other = chain(A, "p"), chain(A, "o")
    use(index, page, 1.0)
    index.pin(keys_of(page))
    index.forget(keys_of(page))
    use(index, page, 2.0)
    index.pin(keys_of(page))
    index.unpin(keys_of(page))
    assert index.admit(other[0], 3.0) is None


def test_retained_pages_go_last_for_their_owner_alone_and_expire() -> None:
    index = TierIndex(2)
    kept = chain(A, "k")
    assert index.admit(kept[0], 0.0, retain_until=100.0) == ()
    use(index, chain(B, "b"), 1.0)
    assert use(index, chain(A, "n"), 2.0) == [chain(B, "b")[0].key]
    index.pin(keys_of(chain(A, "n")))
    assert index.admit(chain(B, "c")[0], 3.0) is None
    assert index.admit(chain(A, "m")[0], 3.0) == (kept[0].key,)
    index.unpin(keys_of(chain(A, "n")))
    assert index.admit(kept[0], 4.0, retain_until=100.0) is not None
    index.invariants()
    index.touch(keys_of(chain(A, "m")), 99.0)
    index.touch(keys_of(chain(A, "n")), 99.0)
    assert index.admit(chain(B, "c")[0], 101.0) == (kept[0].key,)


def test_a_hint_counts_though_it_ends_at_the_number_of_the_score() -> None:
    index = TierIndex(2)
    kept, other = chain(A, "k"), chain(A, "o")
    index.touch(keys_of(kept), 0.0)
    use(index, kept, 0.0)
    index.retain(keys_of(kept), keep_score(0.0, 0.0))
    use(index, other, 1.0)
    index.touch(keys_of(other), 2.0)
    assert use(index, chain(A, "x"), 3.0) == keys_of(other)


def test_hints_cannot_close_a_tier() -> None:
    index = TierIndex(10)
    for name in "abcdefghij":
        index.admit(chain(A, name)[0], 0.0, retain_until=1e9)
    index.invariants()
    admitted = [index.admit(chain(B, name)[0], 1.0) for name in "abcde"]
    assert None not in admitted
    assert index.num_owned(A) == int(RETAINED_SHARE * 10)


def test_forgetting_takes_all_that_was_built_on_a_page() -> None:
    index = TierIndex(8)
    one, two = chain(A, "abc"), chain(A, "abd")
    use(index, one, 1.0)
    use(index, two, 1.0)
    gone = index.forget([one[1].key])
    assert set(gone) == {one[1].key, one[2].key, two[2].key}
    assert gone[-1] == one[1].key
    assert index.owned(A) == (one[0].key,)
    index.invariants()


def test_what_survived_a_restart_is_held_as_far_as_it_joins() -> None:
    index = TierIndex(3, needs_second_use=True)
    whole, orphan = chain(A, "abcd"), chain(A, "xyz")
    assert index.restore([orphan[1], *whole], 0.0) == [orphan[1].key, whole[3].key]
    assert index.owned(A) == tuple(keys_of(whole)[:3])
    index.invariants()


def test_a_page_of_another_tenant_is_no_parent() -> None:
    index = TierIndex(3)
    parent = chain(A, "a")[0]
    index.admit(parent, 0.0)
    with pytest.raises(ValueError, match="cannot follow"):
        index.admit(Resident(b"child", parent.key, 1, B), 0.0)


def test_quotas_must_fit() -> None:
    with pytest.raises(ValueError, match="4 at most together"):
        TierIndex(4, quotas={A: 3, B: 2})
    with pytest.raises(ValueError, match="want at least 1"):
        TierIndex(0)


@dataclass
class ModelPage:
    page: Resident
    score: float
    retain_until: float = 0.0


@dataclass
class Model:
    """The rules, by looking at every page each time."""

    capacity: int
    quotas: dict[bytes, int]
    pages: dict[bytes, ModelPage] = field(default_factory=dict)
    pins: Counter[bytes] = field(default_factory=Counter)

    def owned(self, owner: bytes) -> int:
        return sum(one.page.owner == owner for one in self.pages.values())

    def is_over(self, owner: bytes, more: int = 0) -> bool:
        return owner in self.quotas and self.owned(owner) + more > self.quotas[owner]

    def tails(self, parent: bytes) -> list[ModelPage]:
        parents = {one.page.parent for one in self.pages.values()} | {parent}
        return [one for key, one in self.pages.items() if key not in parents and not self.pins[key]]

    def may_go(self, page: Resident, now: float) -> list[ModelPage]:
        """From which the one with the least score, or the soonest to expire, goes."""
        owner = page.owner
        tails = self.tails(page.parent)
        free = [one for one in tails if one.retain_until <= now]
        own = [one for one in free if one.page.owner == owner]
        if self.is_over(owner, 1) and own:
            return own
        others = [
            one
            for one in free
            if one.page.owner not in self.quotas
            or self.is_over(one.page.owner)
            or (one.page.owner == owner)
        ]
        return others or [one for one in tails if one.page.owner == owner]


chains = st.builds(chain, st.sampled_from([A, B, C]), st.text("ab", min_size=1, max_size=3))


class TierIndexMachine(RuleBasedStateMachine):
    """Three tenants, one of them without a quota, in a tier of seven pages."""

    def __init__(self) -> None:
        super().__init__()
        quotas = {A: 3, B: 2}
        self.index = TierIndex(7, quotas=quotas)
        self.model = Model(7, quotas)
        self.scores: dict[bytes, float] = {}  # of all pages that were ever used
        self.now = 0.0

    @rule(pages=chains, later=st.sampled_from([0.0, 1.0, 50.0, 400.0]))
    def use(self, pages: list[Resident], later: float) -> None:
        self.now += later
        self.index.touch(keys_of(pages), self.now)
        for page in pages:
            before = self.scores.get(page.key)
            score = keep_score(self.now, before, self.index.half_life_s)
            self.scores[page.key] = score
            if page.key in self.model.pages:
                self.model.pages[page.key].score = score

    @rule(pages=chains, retain_s=st.sampled_from([0.0, 0.0, 0.0, 60.0, 1000.0]))
    def store(self, pages: list[Resident], retain_s: float) -> None:
        for page in pages:
            self.admit(page, self.now + retain_s if retain_s else 0.0)

    def admit(self, page: Resident, retain_until: float) -> None:
        held = self.model.pages
        for one in held.values():
            one.retain_until *= one.retain_until > self.now
        retained = sum(one.retain_until > 0 for one in held.values())
        is_held, is_rooted = page.key in held, not page.depth or page.parent in held
        may_go = self.model.may_go(page, self.now)
        evicted = self.index.admit(page, self.now, retain_until=retain_until)
        if is_held:
            assert evicted == ()
        elif not is_rooted:
            assert evicted is None
            return
        elif len(held) < self.model.capacity:
            assert evicted == ()
        elif not may_go:
            assert evicted is None
            return
        else:
            assert evicted is not None
            (gone,) = evicted
            assert gone in {one.page.key for one in may_go}
            if held[gone].retain_until > self.now:
                assert held[gone].retain_until == min(one.retain_until for one in may_go)
            else:
                assert held[gone].score <= min(one.score for one in may_go) + 1e-6
            retained -= held[gone].retain_until > 0
            del held[gone]
        if not is_held:
            held[page.key] = ModelPage(page, self.scores.setdefault(page.key, self.now))
        one = held[page.key]
        is_allowed = one.retain_until or retained < int(RETAINED_SHARE * self.model.capacity)
        if is_allowed and retain_until > self.now:
            one.retain_until = max(retain_until, one.retain_until)

    @rule(pages=chains)
    def pin(self, pages: list[Resident]) -> None:
        self.index.pin([pages[-1].key])
        self.model.pins[pages[-1].key] += 1

    @rule(data=st.data(), other=chains)
    def unpin(self, data: st.DataObject, other: list[Resident]) -> None:
        key = data.draw(st.sampled_from([other[-1].key, *self.model.pins]))
        self.index.unpin([key])
        self.model.pins -= Counter([key])  # never under 0

    @rule(quotas=st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 4)))
    def set_quotas(self, quotas: dict[bytes, int]) -> None:
        self.index.set_quotas(quotas)
        self.model.quotas = quotas

    @rule(pages=chains)
    def forget(self, pages: list[Resident]) -> None:
        root = pages[-1].key
        gone = self.index.forget([root])
        expected = {key for key in self.model.pages if key.startswith(root)}
        assert len(gone) == len(set(gone))
        assert set(gone) == expected
        for key in gone:
            del self.model.pages[key], self.scores[key]

    @invariant()
    def the_books_agree(self) -> None:
        self.index.invariants()
        assert len(self.index) == len(self.model.pages) <= self.model.capacity
        for owner in (A, B, C):
            expected = {k for k, one in self.model.pages.items() if one.page.owner == owner}
            assert set(self.index.owned(owner)) == expected


TestTierIndexMachine = TierIndexMachine.TestCase
TestTierIndexMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_ghosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    index = TierIndex(2)
    for number in range(1000):
        index.touch([b"%d" % number], float(number))
        index.invariants()  # asserts the bound
    monkeypatch.setattr(tiering, "MAX_GHOSTS", 3)
    small = TierIndex(100, needs_second_use=True)
    for number in range(10):
        small.touch([b"%d" % number], float(number))
    small.invariants()
    small.touch([b"0"], 11.0)
    assert small.admit(Resident(b"0", b"", 0, A), 11.0) is None  # its first use is forgotten
    long = chain(A, "long")
    small.touch(keys_of(long), 12.0)
    small.touch(keys_of(long), 13.0)
    admitted = [small.admit(page, 13.0) for page in long]
    assert admitted == [(), (), (), None]  # the tail is forgotten first


def test_queues_are_bounded() -> None:
    index = TierIndex(4)
    page = chain(A, "p")
    for number in range(500):
        use(index, page, float(number))  # asserts the bounds
        index.retain(keys_of(page), 1000.0 + number)
        if number % 3:
            index.forget(keys_of(page))


def test_a_full_tier_of_a_hundred_thousand_pages_stays_quick() -> None:
    """7 µs a page were measured; a walk over all pages for each would take milliseconds."""
    index = TierIndex(100_000)
    chains_of_100 = [
        [Resident(b"%d/%d" % (name, at), b"%d/%d" % (name, at - 1), at, A) for at in range(100)]
        for name in range(1_200)
    ]
    spent = 0.0
    for number, pages in enumerate(chains_of_100):
        started = process_time()
        index.touch(keys_of(pages), float(number))
        for page in pages:
            index.admit(page, float(number))
        if number >= 1_000:
            spent += process_time() - started
    assert len(index) == 100_000
    assert spent / 20_000 < 200e-6


def plan(
    depths: dict[Tier, int],
    device: int = 0,
    rates: dict[Tier, float] | None = None,
    latency_s: dict[Tier, float] | None = None,
    prefill: float = 1600.0,
) -> list[tuple[Tier, int, int]]:
    """Computing a page takes 10 ms; from DRAM 1 ms, from disk 2 ms and from the cluster 4 ms."""
    default: dict[Tier, float] = {"host": 1e9, "disk": 5e8, "cluster": 2.5e8}
    return pages_worth_fetching(
        depths, device, 16, 1_000_000, rates or default, latency_s or {}, prefill
    )


def test_a_later_tier_supplies_what_an_earlier_one_lacks() -> None:
    assert plan({"host": 3, "disk": 8, "cluster": 5}) == [("host", 0, 3), ("disk", 3, 8)]
    assert plan({"host": 3, "disk": 8}, device=4) == [("disk", 4, 8)]
    assert plan({"host": 3, "disk": 4}, device=4) == []


def test_only_a_fetch_that_beats_computing_is_planned() -> None:
    assert plan({"cluster": 8}, prefill=3999.0) == [("cluster", 0, 8)]
    assert plan({"cluster": 8}, prefill=4001.0) == []
    assert plan({"host": 4, "cluster": 8}, prefill=4001.0) == [("host", 0, 4)]
    assert plan({"host": 8}, rates={"host": 0.0}) == []
    assert plan({"cluster": 8}, rates={"cluster": 1.0}, prefill=0.0) == [("cluster", 0, 8)]


def test_latency_is_paid_once_for_a_run() -> None:
    assert plan({"disk": 8}, latency_s={"disk": 0.063}) == [("disk", 0, 8)]
    assert plan({"disk": 8}, latency_s={"disk": 0.065}) == []
    # Three pages from DRAM would save 3 ms over the disk, which is asked in any case: not 5 ms.
    slow_start: dict[Tier, float] = {"host": 0.005, "disk": 0.001}
    assert plan({"host": 3, "disk": 8}, latency_s=slow_start) == [("disk", 0, 8)]


def test_a_fetch_has_a_deadline_that_grows_with_its_pages_up_to_a_cap() -> None:
    assert fetch_deadline_s(100, 1_000_000, 1e9, 0.1) == pytest.approx(
        FETCH_BASE_S + FETCH_SLACK * 0.2
    )
    assert fetch_deadline_s(10**6, 1_000_000, 1e9, 0.0) == FETCH_CAP_S
    assert fetch_deadline_s(1, 1, 0.0, 0.0) == FETCH_CAP_S
