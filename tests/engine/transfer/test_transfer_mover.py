"""Two real movers over loopback: what is told, in what order, and what lies where afterwards."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from engine.schedule.transfer_orders import (
    Accepted,
    Acked,
    Arrived,
    Expect,
    HandedOver,
    HandOver,
    Import,
    Offered,
    Received,
    Send,
    TransferQuiet,
    Withdraw,
)
from engine.store.quantise import convert
from engine.transfer import outgoing, rooms
from engine.transfer.incoming import Incoming
from engine.transfer.mover import TransferMover
from engine.transfer.seal import Session
from engine.transfer.shared_room import OwnSharedRoom, SharedRooms
from tests.engine.transfer.movers import (
    HANDOVER,
    LAYOUT,
    PATIENCE_S,
    Pages,
    Split,
    Station,
    chain,
    until,
)
from tests.engine.transfer.relay import Deed, Frame, Relay

WAYS = pytest.mark.parametrize("ways", [rooms.WAYS["tcp"], rooms.WAYS["auto"]], ids=["tcp", "shm"])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr("engine.transfer.channel.SILENT_S", 60.0)
    monkeypatch.setattr("engine.transfer.side.DRAIN_S", 60.0)
    monkeypatch.setattr("engine.transfer.outgoing.RETRY_S", 30.0)
    monkeypatch.setattr("engine.transfer.doorstep.STRANGER_S", 60.0)


@pytest.fixture
def sides() -> Iterator[list[Station]]:
    """Movers that the test makes, closed at its end."""
    made: list[Station] = []
    yield made
    for side in made:
        side.mover.close(1.0)
        side.mover._mover.join(PATIENCE_S)
        assert not side.mover._mover.is_alive()


def pair(sides: list[Station], **how: object) -> tuple[Station, Station]:
    sides += [Station(seed=1, **how), Station(seed=2, **how)]  # type: ignore[arg-type]
    return sides[-2], sides[-1]


@WAYS
@pytest.mark.parametrize(
    ("num_tokens", "first"), [(70, 1), (64, 0), (17, 0), (1, 0), (70, 4), (500, 3)]
)
def test_pages_and_the_rest_arrive(
    sides: list[Station], ways: tuple[rooms.Way, ...], num_tokens: int, first: int
) -> None:
    sender, receiver = pair(sides, ways=ways, num_pages=40)
    split = Split(sender, receiver, num_tokens=num_tokens, first=first)
    split.run()
    lacked = list(range(first, split.num_pages))
    assert split.positions(receiver, Arrived) == lacked
    assert split.positions(sender, Acked) == lacked
    split.arrived_right()
    assert Received(split.id, HANDOVER) in receiver.news
    assert sender.news[-2:] == [HandedOver(split.id), TransferQuiet(split.id)]
    told = sum(news.num_bytes for news in receiver.news if isinstance(news, Arrived))
    assert told == len(lacked) * LAYOUT.page_bytes


@pytest.mark.parametrize("older", ["neither", "sender", "receiver"])
def test_pages_are_proven_by_the_best_digest_that_both_know(
    sides: list[Station], monkeypatch: pytest.MonkeyPatch, older: str
) -> None:
    if older != "neither":
        place = {"sender": "sender", "receiver": "incoming"}[older]
        monkeypatch.setattr(f"engine.transfer.{place}.DIGESTS", ())
    keyed: list[int] = []
    digest = Session._keyed_digest

    def counted(self: Session, page: memoryview) -> bytes:
        keyed.append(len(page))
        return digest(self, page)

    monkeypatch.setattr(Session, "_keyed_digest", counted)
    split = Split(*pair(sides, ways=()))
    split.run()
    split.arrived_right()
    assert HandedOver(split.id) in split.sender.news
    assert len(keyed) == (2 * 4 if older == "neither" else 0)


def test_a_digest_that_was_not_offered_is_a_fault(
    sides: list[Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Incoming, "_choose_digest", lambda self: "md5")
    split = Split(*pair(sides, ways=()))
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    split.wait_quiet()
    failure = split.sender.failure(split.id)
    assert failure is not None
    assert (failure.code, "'md5'" in failure.message) == ("transfer_corrupt", True)


def rooms_of(side: Station) -> SharedRooms:
    return side.mover._site.shared_rooms


def test_shared_memory_carries_the_pages_and_serves_again(sides: list[Station]) -> None:
    sender, receiver = pair(sides)
    for _ in range(3):
        Split(sender, receiver).run()
        until(lambda: rooms_of(receiver)._idle)
        (made,) = rooms_of(receiver)._idle
        assert list(rooms_of(sender)._peers) == [made.told]
    page = sender.pages.page(4)  # the tail, which was put last
    assert page in [made.place(at) for at in range(made.told.places)]


def test_memory_of_a_sender_that_was_cut_serves_nobody_again(sides: list[Station]) -> None:
    """It may be stopped in the middle of a page, and go on whenever it likes."""
    sender, receiver = pair(sides)
    split = Split(sender, receiver)
    receiver.give(split.imported)
    sender.give(split.export)
    until(lambda: Accepted(split.id, 1) in sender.poll())
    (channel,) = sender.mover._watched
    channel.socket.shutdown(socket.SHUT_RDWR)
    split.wait_quiet()
    assert rooms_of(receiver)._idle == []
    Split(sender, receiver).run()
    until(lambda: rooms_of(receiver)._idle)
    assert len(rooms_of(sender)._peers) == 2


@pytest.mark.parametrize(
    "change",
    [{"name": "kagari-another"}, {"nonce": bytes(32)}, {"pid": 1 << 30}, {"fd": 0}, {"places": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_room_that_is_not_the_peers_is_done_without(
    sides: list[Station], monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    """Another machine's or container's processes have the same numbers."""
    make = SharedRooms.make

    def make_for_another(self: SharedRooms, **how: int) -> OwnSharedRoom:
        room = make(self, **how)
        room.told = msgspec.structs.replace(room.told, **change)
        return room

    monkeypatch.setattr(SharedRooms, "make", make_for_another)
    split = Split(*pair(sides))
    split.run()
    split.arrived_right()
    assert HandedOver(split.id) in split.sender.news
    assert not rooms_of(split.sender)._peers


def test_the_receiver_may_hear_of_it_later(sides: list[Station]) -> None:
    split = Split(*pair(sides))
    split.sender.give(split.export)
    time.sleep(0.2)
    split.receiver.give(split.imported)
    split.send_all()
    split.wait_quiet()
    assert Received(split.id, HANDOVER) in split.receiver.news


def test_nobody_there_is_found_out_soon(
    sides: list[Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "RETRY_S", 0.2)
    split = Split(*pair(sides))
    split.sender.give(split.export)
    split.wait_quiet(split.sender)
    failure = split.sender.failure(split.id)
    assert failure is not None
    assert failure.code == "transfer_refused"
    nowhere = replace(split.export, transfer_id=os.urandom(16), peer="127.0.0.1:9")
    split.sender.give(nowhere)
    until(lambda: split.sender.failure(nowhere.transfer_id))
    failure = split.sender.failure(nowhere.transfer_id)
    assert failure is not None
    assert failure.code == "transfer_lost"
    named = replace(split.export, transfer_id=os.urandom(16), peer="localhost:80")
    split.sender.give(named)
    until(lambda: split.sender.failure(named.transfer_id))
    failure = split.sender.failure(named.transfer_id)
    assert failure is not None
    assert "allowed ADDRESS:PORT" in failure.message


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_peer_that_was_asked_and_never_comes_is_given_up(
    sides: list[Station], monkeypatch: pytest.MonkeyPatch, is_prepared: bool
) -> None:
    """It may have died before its mover heard of anything, and nobody else tells."""
    monkeypatch.setattr("engine.transfer.channel.CONNECT_S", 0.1)
    split = Split(*pair(sides))
    receiver = split.receiver
    receiver.give(Expect(split.id, split.secret, split.deadline, is_asked=True))
    if is_prepared:
        receiver.give(split.imported)
    split.wait_quiet(receiver)
    failure = receiver.failure(split.id)
    assert failure is not None
    assert (failure.code, "not connected" in failure.message) == ("transfer_timeout", True)
    monkeypatch.setattr(outgoing, "RETRY_S", 0.2)
    split.sender.give(split.export)  # it comes too late
    split.wait_quiet(split.sender)
    failure = split.sender.failure(split.id)
    assert failure is not None
    assert failure.code == "transfer_refused"


def test_who_has_connected_or_comes_when_it_will_is_not_given_up(
    sides: list[Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.transfer.channel.CONNECT_S", 0.6)
    sender, receiver = pair(sides)
    met, home = Split(sender, receiver), Split(sender, receiver, into=16)
    receiver.give(Expect(home.id, home.secret, home.deadline))
    receiver.give(Expect(met.id, met.secret, met.deadline, is_asked=True))
    sender.give(met.export)
    until(lambda: Offered(met.id, met.keys) in receiver.poll())
    time.sleep(1.2)  # a mover that only expects looks every half second
    for split in (met, home):
        split.run() if split is home else receiver.give(split.imported)
    met.send_all()
    met.wait_quiet()
    for split in (met, home):
        assert HandedOver(split.id) in sender.of(split.id)


def test_an_offer_waits_for_room(sides: list[Station]) -> None:
    split = Split(*pair(sides))
    split.receiver.give(Expect(split.id, split.secret, split.deadline))
    split.sender.give(split.export)
    until(lambda: Offered(split.id, split.keys) in split.receiver.poll())
    time.sleep(0.05)
    assert split.sender.poll() == []
    split.receiver.give(split.imported)
    split.send_all()
    split.wait_quiet()
    split.arrived_right()
    assert HandedOver(split.id) in split.sender.news


@WAYS
def test_a_chain_comes_home_as_far_as_there_is_room(
    sides: list[Station], ways: tuple[rooms.Way, ...]
) -> None:
    sender, receiver = pair(sides, ways=ways)
    split = Split(sender, receiver, num_tokens=96)  # six pages
    receiver.give(Expect(split.id, split.secret, split.deadline))
    sender.give(split.export)
    until(lambda: Offered(split.id, split.keys) in receiver.poll())
    part = replace(
        split.imported,
        keys=split.keys[:4],
        num_tokens=64,
        page_ids=(8, 9, 10),
        generations=(9, 9, 9),
    )
    receiver.give(part)
    until(lambda: Accepted(split.id, 1) in sender.poll())
    sender.give(split.send(1, 6), HandOver(split.id, (), (), None))
    split.wait_quiet()
    assert split.positions(receiver, Arrived) == [1, 2, 3]
    split.arrived_right()
    assert Received(split.id, None) in receiver.news
    assert HandedOver(split.id) in sender.news


def test_nothing_is_lacking(sides: list[Station]) -> None:
    split = Split(*pair(sides), num_tokens=64, first=4)
    split.run()
    assert split.positions(split.receiver, Arrived) == []
    assert Received(split.id, HANDOVER) in split.receiver.news


@WAYS
@pytest.mark.parametrize(
    ("sent", "kept"),
    [("bf16", "int8"), ("bf16", "fp8"), ("int8", "bf16"), ("fp32", "bf16"), ("bf16", "fp32")],
)
def test_another_precision_is_converted_where_that_makes_fewer_bytes(
    sides: list[Station], ways: tuple[rooms.Way, ...], sent: str, kept: str
) -> None:
    ours, theirs = replace(LAYOUT, precision=sent), replace(LAYOUT, precision=kept)
    sides += [Station(ours, ways=ways, seed=1), Station(theirs, ways=ways, seed=2)]
    sender, receiver = sides
    if sent == "int8":  # scales that are numbers
        for at in range(32):
            sender.pages.page(at)[:] = convert(Pages(LAYOUT, 1, at).page(0), LAYOUT, ours)
    split = Split(sender, receiver)
    split.run()
    for at in split.positions(receiver, Arrived):
        expected = convert(sender.pages.page(at), ours, theirs)
        assert receiver.pages.page(split.into + at - split.first) == expected
    assert len(split.positions(receiver, Arrived)) == 4
    num_bytes = sum(news.num_bytes for news in receiver.news if isinstance(news, Arrived))
    assert num_bytes == 4 * min(ours.page_bytes, theirs.page_bytes)


@pytest.mark.parametrize(
    "other",
    [{"num_layers": 3}, {"num_kv_heads": 1}, {"page_size": 32}, {"head_dim": 16}],
    ids=lambda change: next(iter(change)),
)
def test_another_shape_is_refused_and_both_are_named(
    sides: list[Station], other: dict[str, int]
) -> None:
    theirs = replace(LAYOUT, **other)  # type: ignore[arg-type]
    sides += [Station(), Station(theirs)]
    split = Split(*sides)
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    split.wait_quiet()
    for side in sides:
        failure = side.failure(split.id)
        assert failure is not None
        assert failure.code == "transfer_layout"
        assert LAYOUT.layout_id in failure.message
        assert theirs.layout_id in failure.message


def test_another_chain_is_refused(sides: list[Station]) -> None:
    split = Split(*pair(sides))
    split.receiver.give(replace(split.imported, keys=chain(4, seed=1)))
    split.sender.give(split.export)
    split.wait_quiet()
    for side in sides:
        failure = side.failure(split.id)
        assert failure is not None
        assert failure.code == "transfer_refused"
    assert split.positions(split.receiver, Arrived) == []


def test_an_id_is_used_once(sides: list[Station]) -> None:
    split = Split(*pair(sides))
    split.run()
    for side, order in ((split.sender, split.export), (split.receiver, split.imported)):
        side.of(split.id).clear()
        side.give(order)
        until(lambda side=side: TransferQuiet(split.id) in side.of(split.id))  # type: ignore[misc]
        failure = side.failure(split.id)
        assert failure is not None
        assert failure.code == "transfer_refused"


def test_an_import_that_crosses_the_end_of_its_expectation_is_answered_by_that_end(
    sides: list[Station],
) -> None:
    split = Split(*pair(sides))
    split.receiver.give(Expect(split.id, split.secret, time.monotonic()))
    until(lambda: split.receiver.mover._news)  # it has ended, and nobody has looked
    split.receiver.give(split.imported)
    split.wait_quiet(split.receiver)
    time.sleep(0.1)
    split.wait_quiet(split.receiver)


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("when", ["alone", "offered", "accepted", "sending", "ended"])
def test_either_side_may_withdraw_at_any_time(sides: list[Station], who: str, when: str) -> None:
    split = Split(*pair(sides))
    sender, receiver = split.sender, split.receiver
    leaves = sender if who == "sender" else receiver
    if when == "alone":
        leaves.give(split.export if who == "sender" else split.imported)
    elif when == "offered":
        receiver.give(Expect(split.id, split.secret, split.deadline))
        sender.give(split.export)
        until(lambda: receiver.poll())
    else:
        receiver.give(split.imported)
        sender.give(split.export)
        until(lambda: Accepted(split.id, 1) in sender.poll())
        if when != "accepted":
            sender.give(split.send(1, 4))
            until(lambda: split.positions(receiver, Arrived) == [1, 2, 3])
        if when == "ended":
            sender.give(split.last)
            split.wait_quiet()
    leaves.give(Withdraw(split.id, "aborted", "its client left"))
    if when == "alone":
        split.wait_quiet(leaves)
        return
    split.wait_quiet()
    split.arrived_right()
    assert leaves.failure(split.id) is None
    other = receiver if who == "sender" else sender
    failure = other.failure(split.id)
    if when == "ended":
        assert failure is None
    else:
        assert failure is not None
        assert (failure.code, failure.message) == ("aborted", "its client left")


def test_a_page_is_not_written_once_its_transfer_was_withdrawn(sides: list[Station]) -> None:
    """Trap 17: the rest of what is on the way is read and thrown away."""
    layout = replace(LAYOUT, num_layers=256)  # pages of 256 kB
    sides += [Station(layout, seed=1, ways=()), Station(layout, seed=2, ways=())]
    sender, receiver = sides
    split = Split(sender, receiver, num_tokens=320)
    relay, is_withdrawn = Relay(split.address, layout.page_bytes), threading.Event()

    def hold_all_but_the_first(frame: Frame) -> Deed:
        if frame.name == "Pages" and frame.nth:
            is_withdrawn.wait(PATIENCE_S)
        return "pass"

    relay.judges[split.id] = hold_all_but_the_first
    receiver.give(split.imported)
    sender.give(replace(split.export, peer=relay.address))
    until(lambda: Accepted(split.id, 1) in sender.poll())
    sender.give(split.send(1, 20))
    until(lambda: split.positions(receiver, Arrived))
    receiver.give(Withdraw(split.id))
    until(lambda: TransferQuiet(split.id) in receiver.poll())
    before = bytes(receiver.pages.bytes)
    is_withdrawn.set()
    split.wait_quiet()
    time.sleep(0.1)
    relay.close()
    assert receiver.pages.bytes == before
    assert len(split.positions(receiver, Arrived)) < 19


def test_a_deadline_ends_both_sides(sides: list[Station]) -> None:
    split = Split(*pair(sides), within_s=0.3)
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    split.wait_quiet()
    codes = {failure.code for side in sides if (failure := side.failure(split.id))}
    assert codes == {"transfer_timeout"}


def test_a_page_that_was_given_to_another_is_not_sent(sides: list[Station]) -> None:
    split = Split(*pair(sides))
    split.sender.pages.tags[3] = 2
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    split.send_all()
    split.wait_quiet()
    for side in sides:
        failure = side.failure(split.id)
        assert failure is not None
        assert failure.code == "transfer_corrupt"
    assert 3 not in split.positions(split.receiver, Arrived)
    split.arrived_right()


def test_orders_that_do_not_follow_each_other_are_a_fault(sides: list[Station]) -> None:
    split = Split(*pair(sides))
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    until(lambda: Accepted(split.id, 1) in split.sender.poll())
    split.sender.give(split.send(2, 4))
    split.wait_quiet()
    failure = split.sender.failure(split.id)
    assert failure is not None
    assert "found 2, allowed 1" in failure.message


def test_many_transfers_at_once_disturb_none(sides: list[Station]) -> None:
    sender, receiver = pair(sides, num_pages=200)
    splits = [Split(sender, receiver, into=8 + 4 * at) for at in range(40)]
    receiver.give(*(split.imported for split in splits))
    sender.give(*(split.export for split in splits))
    for at, split in enumerate(splits):
        if at % 4 == 3:
            (sender if at % 8 == 3 else receiver).give(Withdraw(split.id))
        else:
            split.send_all()
    for at, split in enumerate(splits):
        until(lambda split=split: TransferQuiet(split.id) in sender.of(split.id))  # type: ignore[misc]
        until(lambda split=split: TransferQuiet(split.id) in receiver.of(split.id))  # type: ignore[misc]
        split.arrived_right()
        if at % 4 != 3:
            assert split.positions(receiver, Arrived) == [1, 2, 3, 4]
            assert HandedOver(split.id) in sender.of(split.id)
    assert sender.pages.lent == receiver.pages.lent == 0


def test_a_mover_that_closes_tells_its_peer(sides: list[Station]) -> None:
    split = Split(*pair(sides))
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    until(lambda: Accepted(split.id, 1) in split.sender.poll())
    began = time.monotonic()
    split.receiver.mover.close(30.0)
    assert time.monotonic() - began < 15.0
    split.wait_quiet()
    failure = split.sender.failure(split.id)
    assert failure is not None
    assert failure.code == "draining"


def test_tags_are_written_by_who_takes_the_news(sides: list[Station]) -> None:
    split = Split(*pair(sides))
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    split.send_all()
    until(lambda: HandedOver(split.id) in split.sender.poll())
    assert split.receiver.pages.tags[8] == 1
    split.wait_quiet()
    assert split.receiver.pages.tags[8:12] == [9, 9, 9, 9]


def test_a_mover_that_does_not_listen_still_sends(sides: list[Station]) -> None:
    sides += [Station(seed=1, listen=None), Station(seed=2)]
    assert sides[0].mover.address == ""
    split = Split(*sides)
    split.run()
    split.arrived_right()


def test_an_address_in_use_is_refused_at_once(sides: list[Station]) -> None:
    sides.append(Station())
    port = int(sides[0].mover.address.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        TransferMover(Pages(LAYOUT, 1), LAYOUT, listen=("127.0.0.1", port))


def test_orders_of_unknown_transfers_are_no_error(sides: list[Station]) -> None:
    sides.append(Station())
    unknown = os.urandom(16)
    sides[0].give(Withdraw(unknown), Send(unknown, 0, (1,), (1,)), HandOver(unknown, (), (), None))
    sides[0].give(Import(unknown, b"", (), 1, 0, (), (), 0.0))
    until(lambda: TransferQuiet(unknown) in sides[0].poll())
    assert len(sides[0].news) == 2


def test_small_pages_go_in_messages_of_a_bounded_size(sides: list[Station]) -> None:
    layout = replace(LAYOUT, num_layers=1, num_kv_heads=1, head_dim=1)  # of 64 bytes
    sides += [Station(layout, num_pages=3000, seed=1, ways=()) for _ in range(2)]
    split = Split(*sides, num_tokens=16 * 2500, first=0, into=0)
    split.run()
    split.arrived_right()
    assert HandedOver(split.id) in split.sender.news
