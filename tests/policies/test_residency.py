"""Residency against a plain model of sets, and the losses that must heal."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.contract.wire import (
    CacheCleared,
    PageEvent,
    PageEvents,
    PageRemoved,
    PageStored,
    Tier,
)
from policies.homes import Homes, SessionHome
from policies.residency import Residency, event_keys

TIERS: tuple[Tier, ...] = ("device", "host", "disk", "cluster")


def page_key(name: int) -> bytes:
    return sha256(name.to_bytes(4, "little")).digest()


CHAIN = [page_key(name) for name in range(8)]
EVENT_CHAIN = [key[:16] for key in CHAIN]


def hit_pages(residency: Residency, keys: list[bytes]) -> int:
    """How far any tier takes a prompt."""
    return max([depth for _, depth in residency.reach(keys)], default=0)


events = st.one_of(
    st.builds(PageStored, st.sampled_from(EVENT_CHAIN), st.sampled_from(TIERS)),
    st.builds(PageRemoved, st.sampled_from(EVENT_CHAIN), st.sampled_from(TIERS)),
    st.builds(CacheCleared, st.sampled_from(TIERS)),
)


class Model:
    def __init__(self) -> None:
        self.held: set[tuple[bytes, Tier]] = set()

    def take(self, event: PageEvent) -> None:
        match event:
            case PageStored(key, tier):
                self.held.add((key, tier))
            case PageRemoved(key, tier):
                self.held.discard((key, tier))
            case CacheCleared(tier):
                self.held = {(key, at) for key, at in self.held if at != tier}


@given(st.lists(st.lists(events, max_size=6), max_size=8))
def test_any_order_of_events_equals_the_model(frames: list[list[PageEvent]]) -> None:
    residency, model, number = Residency(100), Model(), 5
    for frame in frames:
        assert not residency.apply(PageEvents(0, number, frame))
        number += len(frame)
        for event in frame:
            model.take(event)
    for key in EVENT_CHAIN:
        assert set(residency.tiers(key)) == {tier for at, tier in model.held if at == key}
    depths = [index + 1 for index, key in enumerate(EVENT_CHAIN) if residency.tiers(key)]
    assert hit_pages(residency, event_keys(CHAIN)) == max(depths, default=0)


@given(st.lists(events, min_size=1, max_size=20), st.data())
def test_doubled_frames_change_nothing(frame: list[PageEvent], data: st.DataObject) -> None:
    once, twice = Residency(100), Residency(100)
    cut = data.draw(st.integers(0, len(frame)))
    once.apply(PageEvents(0, 0, frame))
    twice.apply(PageEvents(0, 0, frame[: cut + 1]))
    assert not twice.apply(PageEvents(0, cut, frame[cut:]))  # overlaps by one event
    assert not twice.apply(PageEvents(0, 0, frame[: cut + 1]))  # comes late and alone
    for key in EVENT_CHAIN:
        assert once.tiers(key) == twice.tiers(key)


@given(
    st.lists(events, max_size=40),
    st.lists(st.sampled_from(TIERS), min_size=1, max_size=4, unique=True),
)
def test_reach_says_which_tier_takes_the_prefix_how_far(
    told: list[PageEvent], wanted: list[Tier]
) -> None:
    """By the definition: a page is fetched from the fastest tier that reaches at least so far."""
    residency, model = Residency(100), Model()
    residency.apply(PageEvents(0, 0, told))
    for event in told:
        model.take(event)
    depth = {
        tier: max([i + 1 for i, key in enumerate(EVENT_CHAIN) if (key, tier) in model.held] or [0])
        for tier in TIERS
    }
    runs = residency.reach(event_keys(CHAIN), wanted)
    assert [tier for tier, _ in runs] == sorted([tier for tier, _ in runs], key=TIERS.index)
    for page in range(len(CHAIN)):
        by_runs = next((tier for tier, end in runs if end > page), None)
        assert by_runs == next((t for t in TIERS if t in wanted and depth[t] > page), None)


def test_prompts_of_many_pages_are_searched_to_their_root() -> None:
    residency = Residency(10_000)
    chain = [page_key(name) for name in range(1000)]
    told: list[PageEvent] = [PageStored(chain[depth - 1][:16], "disk") for depth in (1000, 700)]
    told += [PageStored(chain[depth - 1][:16], "host") for depth in (699, 400)]
    told += [PageStored(chain[0][:16])]
    residency.apply(PageEvents(0, 0, told))
    assert residency.reach(event_keys(chain)) == [("device", 1), ("host", 699), ("disk", 1000)]
    assert residency.reach(event_keys(chain[:500])) == [("device", 1), ("host", 400)]


def test_every_eighth_page_of_a_disk_proves_the_chain() -> None:
    residency = Residency(1000)
    chain = [page_key(name) for name in range(40)]
    residency.apply(PageEvents(0, 0, [PageStored(key[:16]) for key in chain[:5]]))
    residency.apply(PageEvents(0, 5, [PageStored(key[:16], "disk") for key in chain[7::8]]))
    assert residency.reach(event_keys(chain)) == [("device", 5), ("disk", 40)]
    assert residency.reach(event_keys(chain[:39])) == [("device", 5), ("disk", 32)]
    assert residency.reach(event_keys(chain), ("device", "host")) == [("device", 5)]


def test_a_lost_event_in_the_middle_does_not_shorten_the_hit() -> None:
    """A lookup of the leading run stops at the first hole: 10 % loss cost 25 % of the hits."""
    residency = Residency(100)
    residency.apply(PageEvents(0, 0, [PageStored(key) for key in EVENT_CHAIN[3:]]))
    assert hit_pages(residency, event_keys(CHAIN)) == 8
    assert hit_pages(residency, event_keys(CHAIN[:3])) == 0
    assert hit_pages(residency, []) == 0


def test_a_gap_wants_a_snapshot_and_the_snapshot_is_the_truth() -> None:
    residency = Residency(100)
    residency.apply(PageEvents(0, 0, [PageStored(EVENT_CHAIN[0])]))
    assert residency.apply(PageEvents(0, 5, [PageStored(EVENT_CHAIN[1])]))
    assert residency.gaps == 1
    whole: list[PageEvent] = [CacheCleared(), PageStored(EVENT_CHAIN[2])]
    assert not residency.apply(PageEvents(0, 6, whole, snapshot=True))
    assert (len(residency), hit_pages(residency, event_keys(CHAIN))) == (1, 3)


@pytest.mark.parametrize("following", [6, 8])
def test_the_cursor_after_a_snapshot_does_not_ask_again_for_ever(following: int) -> None:
    """Whether a snapshot's own events are numbered or not, the next frame is no gap."""
    residency = Residency(100)
    residency.apply(PageEvents(0, 0, [PageStored(b"z" * 16)]))
    residency.apply(PageEvents(0, 6, [CacheCleared(), PageStored(b"a" * 16)], snapshot=True))
    assert not residency.apply(PageEvents(0, following, [PageStored(b"b" * 16)]))
    assert not residency.apply(PageEvents(0, following + 1, [PageStored(b"c" * 16)]))
    assert len(residency) == 3


def test_a_page_that_left_one_tier_is_resident_in_the_other() -> None:
    residency = Residency(100)
    key = EVENT_CHAIN[0]
    stored: list[PageEvent] = [PageStored(key, "device"), PageStored(key, "disk")]
    residency.apply(PageEvents(0, 0, [*stored, PageRemoved(key, "device")]))
    assert residency.tiers(key) == ("disk",)
    residency.apply(PageEvents(0, 3, [CacheCleared("disk")]))
    assert len(residency) == 0


@given(st.integers(1, 10), st.lists(st.integers(0, 1000), max_size=60))
def test_memory_is_bounded_and_keeps_the_newest(most: int, names: list[int]) -> None:
    residency = Residency(most)
    for name in names:
        residency.expect(event_keys([page_key(name)]))
    assert len(residency) <= most
    if names:
        assert hit_pages(residency, event_keys([page_key(names[-1])])) in (0, 1)
        fresh = page_key(5000)
        residency.expect(event_keys([fresh]))
        assert hit_pages(residency, event_keys([fresh])) == 1


def test_an_expected_prompt_hits_and_a_removal_corrects_it() -> None:
    residency = Residency(100)
    residency.expect(event_keys(CHAIN))
    assert hit_pages(residency, event_keys(CHAIN)) == 8
    residency.apply(PageEvents(0, 0, [PageRemoved(key) for key in EVENT_CHAIN[5:]]))
    assert hit_pages(residency, event_keys(CHAIN)) == 5


def test_homes_expire_when_idle_and_are_bounded() -> None:
    homes = Homes(max_keys=2, idle_s=100.0)
    homes.settle(b"a", "n1", 0.0)
    homes.settle(b"b", "n2", 50.0)
    assert homes.find(b"a", 100.0) == "n1"
    homes.settle(b"a", "n3", 100.0)
    homes.settle(b"c", "n1", 101.0)  # b was idle longest
    assert (homes.find(b"b", 101.0), homes.find(b"a", 101.0), len(homes)) == (None, "n3", 2)
    assert homes.find(b"a", 200.1) is None
    assert len(homes) == 1


def test_a_home_keeps_since_when_it_is_one_and_where_the_last_prompt_ended() -> None:
    homes = Homes(max_keys=2, idle_s=100.0)
    homes.settle(b"a", "n1", 1.0)
    assert homes.look(b"a", 1.0) == SessionHome("n1", 1.0, 1.0, None, 0)
    homes.settle(b"a", "n1", 5.0, b"page", 3)
    assert homes.look(b"a", 6.0) == SessionHome("n1", 1.0, 5.0, b"page", 3)
    homes.settle(b"a", "n2", 9.0, b"page", 4)
    assert homes.look(b"a", 109.0) == SessionHome("n2", 9.0, 9.0, b"page", 4)
    assert homes.look(b"a", 109.1) is None
    assert homes.keys() == [b"a"]  # a look changes nothing
