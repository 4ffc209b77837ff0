"""What every tier promises (engine/store/tier.py), asked of each of them alike."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

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

from engine.store.tier import PageRecord, Status
from tests.engine.store.tier_factories import (
    FACTORIES,
    NEVER,
    OWNERS,
    Factory,
    Rig,
    key_of,
    payload_of,
    record_of,
)

CAPACITY = 6
OK, MISS = Status.OK, Status.MISS
A, B = OWNERS


@pytest.fixture(params=sorted(FACTORIES))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = FACTORIES[request.param](tmp_path, CAPACITY)
    yield rig
    rig.tier.close()


def put(rig: Rig, *records: PageRecord, deadline: float = NEVER) -> list[Status]:
    payloads = [memoryview(payload_of(record.key, rig.layout)) for record in records]
    return rig.tier.put(records, payloads, deadline)


def get(rig: Rig, *keys: bytes, deadline: float = NEVER) -> list[Status]:
    """Whatever is OK is checked to be right."""
    views = [memoryview(bytearray(rig.layout.page_bytes)) for _ in keys]
    statuses = rig.tier.get(keys, views, deadline)
    for key, view, status in zip(keys, views, statuses, strict=True):
        assert status is not OK or view == payload_of(key, rig.layout)
    return statuses


def test_what_was_put_comes_back(rig: Rig) -> None:
    assert put(rig, record_of(1), record_of(2)) == [OK, OK]
    assert get(rig, key_of(2), key_of(9), key_of(1)) == [OK, MISS, OK]
    assert (put(rig), get(rig)) == ([], [])


def test_lookup_tells_the_leading_run(rig: Rig) -> None:
    put(rig, record_of(1), record_of(2), record_of(4))
    assert rig.tier.lookup([key_of(number) for number in (1, 2, 3, 4)], NEVER) == 2
    assert rig.tier.lookup([key_of(3), key_of(1)], NEVER) == 0
    assert rig.tier.lookup([], NEVER) == 0


def test_a_key_that_is_held_stays_as_it_is(rig: Rig) -> None:
    put(rig, record_of(1))
    other = memoryview(payload_of(b"something else", rig.layout))
    assert rig.tier.put([record_of(1)], [other], NEVER) == [OK]
    assert get(rig, key_of(1)) == [OK]


def test_a_full_tier_says_so_and_evicts_nothing(rig: Rig) -> None:
    if not rig.is_exact:
        pytest.skip("this store decides itself what it keeps")
    assert rig.tier.capacity_pages == CAPACITY
    assert put(rig, *(record_of(number) for number in range(CAPACITY))) == [OK] * CAPACITY
    assert put(rig, record_of(50), record_of(0)) == [Status.NOSPACE, OK]
    assert get(rig, *map(key_of, range(CAPACITY))) == [OK] * CAPACITY
    assert rig.tier.remove([key_of(3), key_of(50)], NEVER) == [OK, MISS]
    assert put(rig, record_of(50)) == [OK]
    assert get(rig, key_of(50), key_of(3)) == [OK, MISS]


def test_records_say_what_is_held_parents_first(rig: Rig) -> None:
    if not rig.is_exact:
        pytest.skip("this store does not say what it holds")
    chain = [record_of(number, B, depth=number) for number in range(4)]
    put(rig, chain[2], chain[0], chain[3], chain[1])
    assert list(rig.tier.records()) == chain


def test_a_purge_leaves_nothing_of_its_owner_and_all_of_others(rig: Rig) -> None:
    put(rig, record_of(1, A), record_of(20, B), record_of(3, A), record_of(4, A))
    rig.tier.remove([key_of(4)], NEVER)  # its bytes may still lie there
    assert rig.tier.purge(A, NEVER) is OK
    assert get(rig, key_of(1), key_of(20), key_of(3), key_of(4)) == [MISS, OK, MISS, MISS]
    if rig.at_rest is not None:
        bytes_at_rest = rig.at_rest()
        for number in (1, 3, 4):
            payload = payload_of(key_of(number), rig.layout)
            at_rest = (payload[at : at + 64] in bytes_at_rest for at in range(0, len(payload), 64))
            assert not any(at_rest)
            assert key_of(number) not in bytes_at_rest
        assert A not in bytes_at_rest
        assert payload_of(key_of(20), rig.layout) in bytes_at_rest
    assert put(rig, record_of(1, A)) == [OK]
    assert get(rig, key_of(1)) == [OK]


def test_past_the_deadline_nothing_is_done(rig: Rig) -> None:
    put(rig, record_of(1))
    past = time.monotonic() - 1
    assert put(rig, record_of(2), record_of(3), deadline=past) == [Status.TIMEOUT] * 2
    assert get(rig, key_of(1), key_of(2), deadline=past) == [Status.TIMEOUT] * 2
    assert get(rig, key_of(1), key_of(2)) == [OK, MISS]


def test_a_closed_tier_is_unavailable(rig: Rig) -> None:
    put(rig, record_of(1))
    rig.tier.close()
    rig.tier.close()
    gone = [Status.UNAVAILABLE]
    assert (put(rig, record_of(2)), get(rig, key_of(1))) == (gone, gone)
    assert rig.tier.remove([key_of(1)], NEVER) == gone
    assert rig.tier.lookup([key_of(1)], NEVER) == 0
    assert rig.tier.purge(A, NEVER) is Status.UNAVAILABLE
    assert rig.tier.flush(NEVER) is Status.UNAVAILABLE
    assert list(rig.tier.records()) == []


@pytest.mark.parametrize("bit", [0, 12_345])
def test_a_flipped_bit_is_caught_and_its_page_dropped(rig: Rig, bit: int) -> None:
    if rig.overwrite is None:
        pytest.skip("what this store keeps cannot be reached from here")
    put(rig, record_of(1), record_of(2))
    assert rig.flip(key_of(1), bit=bit)
    assert get(rig, key_of(1), key_of(2)) == [Status.CORRUPT, OK]
    assert get(rig, key_of(1)) == [MISS]
    assert put(rig, record_of(1)) == [OK]
    assert get(rig, key_of(1)) == [OK]
    assert rig.tier.stats().corrupt == 1


def test_counts(rig: Rig) -> None:
    put(rig, record_of(1), record_of(2), record_of(1))
    get(rig, key_of(1), key_of(7))
    get(rig, key_of(1), deadline=time.monotonic() - 1)
    rig.tier.remove([key_of(2)], NEVER)
    stats = rig.tier.stats()
    assert (stats.hits, stats.misses) == (1, 1)
    assert stats.stored == 2 or not rig.is_exact  # such a store does not tell what it had already
    assert (stats.removed, stats.timeouts, stats.refused) == (1, 1, 0)
    if rig.is_exact:
        assert (stats.used_pages, stats.capacity_pages) == (1, CAPACITY)


def test_a_page_of_another_size_is_the_callers_error(rig: Rig) -> None:
    short = memoryview(bytearray(rig.layout.page_bytes - 1))
    with pytest.raises(ValueError, match="payload has"):
        rig.tier.put([record_of(1)], [short], NEVER)
    put(rig, record_of(2))
    with pytest.raises(ValueError, match="view has"):
        rig.tier.get([key_of(2)], [short], NEVER)
    assert get(rig, key_of(1), key_of(2)) == [MISS, OK]
    if rig.is_exact:
        assert rig.tier.stats().used_pages == 1


def test_a_restart_finds_what_was_held(rig: Rig) -> None:
    if rig.reopen is None:
        pytest.skip("nothing of this tier outlives it")
    put(rig, *(record_of(number, depth=number) for number in range(4)))
    assert rig.tier.flush(NEVER) is OK
    tier = rig.reopen()
    assert list(tier.records()) == [record_of(number, depth=number) for number in range(4)]
    assert get(rig, *map(key_of, range(5))) == [OK] * 4 + [MISS]


def test_threads_never_see_wrong_bytes(rig: Rig) -> None:
    """More keys than places, so that places change hands beneath gets, puts and purges."""
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(40):
                numbers = chance.sample(range(10), 3)
                get(rig, *map(key_of, numbers))
                put(rig, *(record_of(number, OWNERS[number % 2]) for number in numbers))
                get(rig, *map(key_of, numbers))
                rig.tier.remove([key_of(number) for number in numbers[:2]], NEVER)
                if chance.random() < 0.1:
                    assert rig.tier.purge(chance.choice(OWNERS), time.monotonic() + 5) is OK
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert rig.tier.stats().corrupt == 0 or not rig.is_exact  # removed beneath a read: refused
    for owner in OWNERS:
        assert rig.tier.purge(owner, NEVER) is OK
    assert not rig.is_exact or rig.tier.stats().used_pages == 0


# --- random lives against a dict ----------------------------------------------------------------

NUMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)


class TierMachine(RuleBasedStateMachine):
    """held: what must be there, by number. spoilt: of these, whose bytes were damaged."""

    factory: Factory

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.rig = type(self).factory(Path(self.folder.name), CAPACITY)
        self.held: dict[int, bytes] = {}
        self.spoilt: set[int] = set()

    def teardown(self) -> None:
        self.rig.tier.close()
        self.folder.cleanup()

    @rule(numbers=NUMBERS, owner=st.sampled_from(OWNERS))
    def put(self, numbers: list[int], owner: bytes) -> None:
        statuses = put(self.rig, *(record_of(number, owner) for number in numbers))
        room = CAPACITY - len(self.held)
        new = [number for number in numbers if number not in self.held]
        stored = [number for number, status in zip(numbers, statuses, strict=True) if status is OK]
        assert set(statuses) <= {OK, Status.NOSPACE}
        assert set(stored) >= set(numbers) - set(new)
        assert len(set(stored) & set(new)) == min(room, len(new))
        self.held |= {number: owner for number in stored if number in new}

    @rule(numbers=NUMBERS)
    def get(self, numbers: list[int]) -> None:
        expected = [
            Status.CORRUPT if number in self.spoilt else OK if number in self.held else MISS
            for number in numbers
        ]
        assert get(self.rig, *map(key_of, numbers)) == expected
        for number in self.spoilt.intersection(numbers):
            del self.held[number]
        self.spoilt -= set(numbers)

    @rule(numbers=NUMBERS)
    def remove(self, numbers: list[int]) -> None:
        expected = [OK if number in self.held else MISS for number in numbers]
        assert self.rig.tier.remove([key_of(number) for number in numbers], NEVER) == expected
        for number in numbers:
            self.held.pop(number, None)
        self.spoilt -= set(numbers)

    @rule(owner=st.sampled_from(OWNERS))
    def purge(self, owner: bytes) -> None:
        assert self.rig.tier.purge(owner, NEVER) is OK
        kept = {record.key for record in self.rig.tier.records()}
        for number, whose in list(self.held.items()):
            # It may have to read what it found at its start, and so meet what was damaged.
            is_caught = number in self.spoilt and key_of(number) not in kept
            if whose == owner or is_caught:
                del self.held[number]
        self.spoilt &= set(self.held)
        if self.rig.at_rest is not None:
            assert owner not in self.rig.at_rest()

    @rule(numbers=NUMBERS)
    def lookup(self, numbers: list[int]) -> None:
        run = next((at for at, one in enumerate(numbers) if one not in self.held), len(numbers))
        assert self.rig.tier.lookup([key_of(number) for number in numbers], NEVER) == run

    @precondition(lambda self: self.rig.overwrite is not None)
    @rule(number=st.integers(0, 9), bit=st.integers(0, 1 << 16))
    def flip(self, number: int, bit: int) -> None:
        if number in self.held and number not in self.spoilt:
            # Where it was removed before, another copy may lie there: damage them all.
            while self.rig.flip(key_of(number), bit=bit):
                self.spoilt.add(number)
            assert number in self.spoilt

    @precondition(lambda self: self.rig.reopen is not None)
    @rule()
    def reopen(self) -> None:
        """What was removed may be there again; what was purged may not."""
        assert self.rig.reopen is not None
        found = {record.key: record for record in self.rig.reopen().records()}
        assert found.keys() >= {key_of(number) for number in self.held}
        self.held = {
            number: found[key_of(number)].owner for number in range(10) if key_of(number) in found
        }
        payloads = self.rig.at_rest() if self.rig.at_rest else b""
        self.spoilt = {
            number
            for number in self.held
            if payload_of(key_of(number), self.rig.layout) not in payloads
        }

    @invariant()
    def the_books_agree(self) -> None:
        assert self.rig.tier.stats().used_pages == len(self.held)
        assert {record.key for record in self.rig.tier.records()} == set(map(key_of, self.held))


@pytest.mark.parametrize("examples", [8, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_random_lives(name: str, examples: int, tmp_path: Path) -> None:
    rig = FACTORIES[name](tmp_path, CAPACITY)
    is_exact = rig.is_exact
    rig.tier.close()
    if not is_exact:
        pytest.skip("this store decides itself what it keeps")
    machine = type("Machine", (TierMachine,), {"factory": staticmethod(FACTORIES[name])})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
