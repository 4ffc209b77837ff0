"""Pages by Mooncake's Transfer Engine, over TCP, in a network with nothing but loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.schedule.transfer_orders import Accepted, Acked, Arrived, HandedOver, Withdraw
from engine.transfer.staging import TransferEngine
from tests.engine.store.mooncake_cluster import network
from tests.engine.transfer.movers import LAYOUT, Split, Station, until

WAYS = ("mooncake",)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Station, Station]]:
    monkeypatch.setattr("engine.transfer.side.DRAIN_S", 60.0)  # however busy the machine is
    monkeypatch.setattr("engine.transfer.channel.SILENT_S", 60.0)
    monkeypatch.setattr("engine.transfer.doorstep.STRANGER_S", 60.0)
    with network().inside():
        made = Station(seed=1, ways=WAYS), Station(seed=2, ways=WAYS)
    yield made
    for side in made:
        side.mover.close(1.0)


def engine_of(side: Station) -> TransferEngine:
    engine = side.mover._site.engine
    assert engine is not None
    return engine


@pytest.mark.parametrize("kept", ["bf16", "int8"])
def test_pages_arrive_through_staging_memory(sides: tuple[Station, Station], kept: str) -> None:
    sender, receiver = sides
    if kept != "bf16":
        with network().inside():
            receiver = Station(replace(LAYOUT, precision=kept), seed=2, ways=WAYS)
    split = Split(sender, receiver)
    split.run()
    assert split.positions(receiver, Arrived) == split.positions(sender, Acked) == [1, 2, 3, 4]
    assert HandedOver(split.id) in sender.news
    if kept == "bf16":
        split.arrived_right()
    until(lambda: len(engine_of(sender)._idle) == len(engine_of(receiver)._idle) == 1)
    receiver.mover.close(1.0)


def test_what_others_write_into_staging_memory_is_found(
    sides: tuple[Station, Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake's ports ask nobody who they are."""
    write = TransferEngine.write

    def write_and_be_followed(self: TransferEngine, peer: str, *where: object) -> bool:
        done = write(self, peer, *where)  # type: ignore[arg-type]
        sources, targets, _ = where
        return done and write(self, peer, sources[:1], [targets[0] + 1], 8)  # type: ignore[index]

    monkeypatch.setattr(TransferEngine, "write", write_and_be_followed)
    split = Split(*sides)
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    split.send_all()
    split.wait_quiet()
    for side in sides:
        failure = side.failure(split.id)
        assert failure is not None
        assert failure.code == "transfer_corrupt"
    split.arrived_right()


def test_a_peer_out_of_the_engines_reach_is_a_failure(
    sides: tuple[Station, Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_of(sides[1]), "name", "127.0.0.1:1")
    split = Split(*sides)
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    split.send_all()
    split.wait_quiet()
    failure = split.sender.failure(split.id)
    assert failure is not None
    assert failure.code == "transfer_lost"


def test_no_page_waits_for_a_write_that_hangs(
    sides: tuple[Station, Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its staging memory does, and serves nobody else until it has returned."""
    sender, receiver = sides
    write = TransferEngine.write
    hangs, may_return = threading.Event(), threading.Event()

    def hang(self: TransferEngine, *where: object) -> bool:
        hangs.set()
        assert may_return.wait(60.0)
        return write(self, *where)  # type: ignore[arg-type]

    monkeypatch.setattr(TransferEngine, "write", hang)
    split = Split(sender, receiver)
    receiver.give(split.imported)
    sender.give(split.export)
    until(lambda: Accepted(split.id, 1) in sender.poll())
    sender.give(split.send(1, 4))
    assert hangs.wait(10.0)
    receiver.mover.close(0.0)  # it waits for no answer
    split.wait_quiet(sender)
    assert engine_of(sender)._idle == []
    until(lambda: engine_of(receiver)._idle)
    (left,) = engine_of(receiver)._idle
    assert left.rests_until > time.monotonic()  # a late write may still come
    may_return.set()
    until(lambda: len(engine_of(sender)._idle) == 1)


def test_who_has_no_engine_takes_the_connection(sides: tuple[Station, Station]) -> None:
    with network().inside():
        plain = Station(seed=2, ways=("shm",))
    split = Split(sides[0], plain)
    split.run()
    split.arrived_right()
    assert HandedOver(split.id) in sides[0].news
    plain.mover.close(1.0)


def test_a_withdrawal_gives_clean_memory_back(sides: tuple[Station, Station]) -> None:
    split = Split(*sides)
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    until(lambda: Accepted(split.id, 1) in split.sender.poll())
    split.sender.give(split.send(1, 3))
    split.receiver.give(Withdraw(split.id))
    split.wait_quiet()
    (left,) = engine_of(split.receiver)._idle
    assert left.rests_until <= time.monotonic()
