"""A place changes hands only when no copy runs over it any more."""

import threading
import time

from engine.store.places import Places
from engine.store.tier import PageRecord, Status
from tests.engine.store.tier_factories import NEVER, OWNERS, key_of, record_of

A, B = OWNERS


def publish(places: Places, record: PageRecord) -> int:
    place = places.claim(record)
    assert isinstance(place, int)
    places.publish(record, place, b"")
    return place


def never_called(place: int) -> Status:
    raise AssertionError(f"place {place} is not to be wiped")


def test_a_forgotten_page_keeps_its_place_until_its_last_reader_has_left() -> None:
    places = Places(1)
    place = publish(places, record_of(1))
    first, second = places.hold(key_of(1)), places.hold(key_of(1))
    assert first is not None
    assert second is not None
    assert places.forget(key_of(1))
    assert places.hold(key_of(1)) is None
    assert places.claim(record_of(2)) is Status.NOSPACE
    places.release(first)
    assert places.claim(record_of(2)) is Status.NOSPACE
    places.release(second)
    assert places.claim(record_of(2)) == place


def test_a_distrusted_page_forgotten_meanwhile_frees_its_place_once() -> None:
    places = Places(2)
    publish(places, record_of(1))
    held = places.hold(key_of(1))
    assert held is not None
    places.forget(key_of(1))
    places.distrust(held)
    places.release(held)
    assert {places.claim(record_of(2)), places.claim(record_of(3))} == {0, 1}
    assert places.claim(record_of(4)) is Status.NOSPACE


def test_the_slower_of_two_writers_of_a_page_gives_its_place_back() -> None:
    places = Places(2)
    first, second = places.claim(record_of(1)), places.claim(record_of(1))
    assert isinstance(first, int)
    assert isinstance(second, int)
    places.publish(record_of(1), second, b"")
    places.publish(record_of(1), first, b"")
    assert places.stats().used_pages == places.stats().stored == 1
    assert places.claim(record_of(1)) is Status.OK
    assert places.claim(record_of(2)) == first


def test_a_purge_waits_for_readers_and_writers() -> None:
    places, wiped = Places(3), []
    publish(places, record_of(1, A))
    held = places.hold(key_of(1))
    writing = places.claim(record_of(2, A))
    assert held is not None
    assert isinstance(writing, int)
    assert places.purge(A, never_called, time.monotonic() + 0.02) is Status.TIMEOUT
    assert places.hold(key_of(1)) is None

    def leave() -> None:
        places.release(held)
        places.publish(record_of(2, A), writing, b"")

    def wipe(place: int) -> Status:
        wiped.append(place)
        return Status.OK

    later = threading.Timer(0.05, leave)
    later.start()
    assert places.purge(A, wipe, time.monotonic() + 10) is Status.OK
    later.join()
    assert sorted(wiped) == [0, 1]
    assert places.records() == []
    assert places.stats().used_pages == 0


def test_a_purge_wipes_what_no_one_knows_and_nothing_of_others() -> None:
    places, wiped = Places(4), []
    publish(places, record_of(1, B))
    torn = places.claim(record_of(2, B))
    assert isinstance(torn, int)
    places.abandon(torn)
    damaged = publish(places, record_of(3, B))
    held = places.hold(key_of(3))
    assert held is not None
    places.distrust(held)
    places.prove(held)  # another reader had found it good, just before
    places.release(held)
    assert places.doubts()

    def wipe(place: int) -> Status:
        wiped.append(place)
        return Status.OK

    assert places.purge(A, wipe, NEVER) is Status.OK
    assert sorted(wiped) == [torn, damaged]
    assert not places.doubts()
    assert places.purge(A, never_called, NEVER) is Status.OK


def test_what_a_purge_cannot_wipe_it_says_and_remembers() -> None:
    places = Places(2)
    publish(places, record_of(1, A))
    publish(places, record_of(2, A))
    assert places.purge(A, lambda place: Status.UNAVAILABLE, NEVER) is Status.UNAVAILABLE
    assert places.stats().used_pages == 0
    wiped: set[int] = set()

    def wipe(place: int) -> Status:
        wiped.add(place)
        return Status.OK

    assert places.purge(A, wipe, NEVER) is Status.OK
    assert wiped == {0, 1}


def test_closing_waits_for_the_calls_that_run() -> None:
    places = Places(1)
    with places.call() as is_open:
        assert is_open
        assert not places.close(time.monotonic() + 0.01)
        with places.call() as is_still_open:
            assert not is_still_open
    assert places.close(time.monotonic())
