"""Faults fall as planned, and whatever falls, no tier hands out a wrong byte."""

import threading
import time
from itertools import islice
from pathlib import Path

import pytest

from engine.store.fault_tier import Fault, FaultTier, seeded_faults
from engine.store.tier import Status
from tests.engine.store.tier_factories import (
    FACTORIES,
    NEVER,
    OWNERS,
    Rig,
    host,
    key_of,
    payload_of,
    record_of,
    within_faults,
)

OK, MISS = Status.OK, Status.MISS
HUNG_S = 0.03  # what a fault that hangs costs, and more than the rest takes


def put(rig: Rig, *numbers: int, deadline: float = NEVER) -> list[Status]:
    payloads = [memoryview(payload_of(key_of(number), rig.layout)) for number in numbers]
    return rig.tier.put([record_of(number) for number in numbers], payloads, deadline)


def get(rig: Rig, *numbers: int, deadline: float = NEVER) -> list[Status]:
    views = [memoryview(bytearray(rig.layout.page_bytes)) for _ in numbers]
    statuses = rig.tier.get([key_of(number) for number in numbers], views, deadline)
    for number, view, status in zip(numbers, views, statuses, strict=True):
        assert status is not OK or view == payload_of(key_of(number), rig.layout)
    return statuses


@pytest.mark.parametrize(
    ("fault", "of_put", "of_get"),
    [
        (Fault.DROP, OK, MISS),
        (Fault.DELAY, OK, OK),
        (Fault.CORRUPT, OK, Status.CORRUPT),
        (Fault.NOSPACE, Status.NOSPACE, OK),
        (Fault.UNAVAILABLE, Status.UNAVAILABLE, Status.UNAVAILABLE),
    ],
)
def test_each_fault_befalls_its_page_alone(
    fault: Fault, of_put: Status, of_get: Status, tmp_path: Path
) -> None:
    rig = host(tmp_path, 8)
    tier = within_faults(rig, [None, fault, None, None, fault, None])
    assert put(rig, 1, 2, 3) == [OK, of_put, OK]
    put_faults = dict(tier.injected)
    assert put_faults == {fault: 1}
    rig.tier = tier.inner
    expected = {Fault.DELAY: OK, Fault.CORRUPT: Status.CORRUPT}.get(fault, MISS)
    assert get(rig, 2) == [expected]  # what the put left within
    put(rig, 2)
    rig.tier = tier
    assert get(rig, 1, 2, 3) == [OK, of_get, OK]
    assert get(rig, 1, 3) == [OK, OK]
    tier.close()


def test_what_hangs_ends_at_the_deadline_or_when_released(tmp_path: Path) -> None:
    rig = host(tmp_path, 2)
    put(rig, 1)
    tier = within_faults(rig, [Fault.HANG, Fault.HANG, Fault.HANG])
    began = time.monotonic()
    assert get(rig, 1, deadline=began + 0.03) == [Status.TIMEOUT]
    assert 0.03 <= time.monotonic() - began < 5
    threading.Timer(0.03, tier.release).start()
    assert get(rig, 1, deadline=began + 20) == [OK]
    assert get(rig, 1, deadline=time.monotonic() + 20) == [OK]
    tier.close()


def test_an_overrun_outlives_the_deadline(tmp_path: Path) -> None:
    rig = host(tmp_path, 2)
    put(rig, 1)
    tier = within_faults(rig, [Fault.OVERRUN])
    began = time.monotonic()
    threading.Timer(0.05, tier.release).start()
    assert get(rig, 1, deadline=began + 0.01) == [Status.TIMEOUT]
    assert time.monotonic() - began >= 0.05
    tier.close()


def test_without_a_way_to_the_bytes_a_corrupted_page_is_answered_as_one(tmp_path: Path) -> None:
    rig = host(tmp_path, 2)
    put(rig, 1)
    rig.tier = FaultTier(rig.tier, [Fault.CORRUPT])
    assert get(rig, 1) == [Status.CORRUPT]
    assert get(rig, 1) == [OK]
    rig.tier.close()


def test_a_seed_is_a_plan() -> None:
    rates = {Fault.DROP: 0.2, Fault.CORRUPT: 0.1}
    plan = list(islice(seeded_faults(7, rates), 5000))
    assert plan == list(islice(seeded_faults(7, rates), 5000))
    assert plan != list(islice(seeded_faults(8, rates), 5000))
    assert 850 < plan.count(Fault.DROP) < 1150
    assert 400 < plan.count(Fault.CORRUPT) < 600


@pytest.mark.parametrize("faults", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(set(FACTORIES) - {"fault_tier"}))
def test_no_wrong_byte_under_any_number_of_faults(name: str, faults: int, tmp_path: Path) -> None:
    """A corrupted page that is asked for is always caught; get checks whatever is OK."""
    rig = FACTORIES[name](tmp_path, 6)
    if rig.overwrite is None:
        rig.tier.close()
        pytest.skip("what this store keeps cannot be reached from here")
    rates = dict.fromkeys(Fault, 0.07) | {Fault.HANG: 0.01, Fault.DELAY: 0.01}
    del rates[Fault.OVERRUN]
    tier = within_faults(rig, seeded_faults(faults, rates))
    caught = turn = 0
    while tier.injected.total() < faults:
        turn += 1
        numbers = [(turn * 3 + step) % 10 for step in (0, 1, 5)]
        put(rig, *numbers, deadline=time.monotonic() + HUNG_S)
        caught += get(rig, *numbers, deadline=time.monotonic() + HUNG_S).count(Status.CORRUPT)
        tier.remove([key_of(numbers[0])], NEVER)
        if turn % 50 == 0:
            assert tier.purge(OWNERS[0], NEVER) is OK
    assert set(tier.injected) == set(rates)
    assert caught > faults // 30
    assert caught <= tier.injected[Fault.CORRUPT]
    tier.close()
