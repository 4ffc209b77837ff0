"""Strangers at the peer port: they get no page, keep nothing, and disturb no transfer."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from engine.schedule.transfer_orders import Accepted, Arrived, HandedOver
from engine.transfer.forms import form_of
from engine.transfer.messages import (
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    VERSION,
    Challenge,
    Hello,
    Offer,
    Pages,
    Unknown,
    decode_greeting,
    encode,
)
from engine.transfer.mover import MAX_STRANGERS
from engine.transfer.seal import Session, page_digest
from tests.engine.transfer.movers import LAYOUT, PATIENCE_S, Split, Station, until
from tests.engine.transfer.relay import Frame, Relay

NONCE = bytes(32)


@pytest.fixture
def sides() -> Iterator[tuple[Station, Station]]:
    made = Station(seed=1, ways=()), Station(seed=2, ways=())
    yield made
    for side in made:
        side.mover.close(1.0)


class Dialler:
    """One that makes its frames itself."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 10.0)

    def __enter__(self) -> Dialler:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def frame(self, body: bytes, mac: bytes = b"") -> None:
        self.socket.sendall(struct.pack("<I", len(body)) + body + mac)

    def hello(self, split: Split, *, version: int = VERSION) -> Challenge | Unknown:
        self.frame(encode(Hello(version, split.id, NONCE)))
        size = struct.unpack("<I", self.socket.recv(4))[0]
        greeting = decode_greeting(self.socket.recv(size, socket.MSG_WAITALL))
        assert not isinstance(greeting, Hello)
        return greeting

    def is_closed(self) -> bool:
        """By the other end, before it says anything more of use."""
        with suppress(ConnectionResetError):
            while self.socket.recv(1 << 16):
                pass
        return True


def offer_of(split: Split) -> Offer:
    return Offer(split.keys, split.num_tokens, form_of(LAYOUT))


def still_goes_well(split: Split) -> None:
    split.sender.give(split.export)
    split.send_all()
    split.wait_quiet()
    split.arrived_right()
    assert HandedOver(split.id) in split.sender.news


def test_who_has_not_the_secret_is_shown_the_door_and_takes_no_place(
    sides: tuple[Station, Station],
) -> None:
    split = Split(*sides)
    split.receiver.give(split.imported)
    with Dialler(split.address) as dialler:
        until_known(dialler, split)
        forged = Session(bytes(32), split.id, dialler_nonce=NONCE, listener_nonce=NONCE)
        body = encode(offer_of(split))
        dialler.frame(body, forged.from_dialler.mac(body))
        assert dialler.is_closed()
    assert split.receiver.poll() == []
    still_goes_well(split)


def until_known(dialler: Dialler, split: Split) -> Challenge:
    """The mover may still have to read its order."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        greeting = dialler.hello(split)
        if isinstance(greeting, Challenge):
            return greeting
        dialler.socket.close()
        time.sleep(0.01)
        dialler.__init__(split.address)  # type: ignore[misc]
    raise AssertionError("nobody waits for it")


def test_a_listener_without_the_secret_is_told_nothing(
    sides: tuple[Station, Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would learn the chain's keys from an Offer."""
    monkeypatch.setattr("engine.transfer.outgoing.RETRY_S", 0.5)
    split = Split(*sides)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10.0)
        split.address = f"127.0.0.1:{server.getsockname()[1]}"
        split.sender.give(split.export)
        heard: list[bytes] = []
        while split.sender.failure(split.id) is None:
            server.settimeout(0.1)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(2.0)
                heard.append(connection.recv(1 << 16))
                body = encode(Challenge(VERSION, NONCE, bytes(32)))
                connection.sendall(struct.pack("<I", len(body)) + body)
                with suppress(ConnectionResetError):
                    heard.append(connection.recv(1 << 16))
    assert len(heard) > 1  # it tried again
    assert all(isinstance(decode_greeting(data[4:]), Hello) for data in heard if data)
    failure = split.sender.failure(split.id)
    assert failure is not None
    assert failure.code == "transfer_refused"


def test_a_recording_is_worth_nothing(sides: tuple[Station, Station]) -> None:
    split = Split(*sides)
    relay = Relay(split.address, LAYOUT.page_bytes)
    said: list[bytes] = []

    def record(frame: Frame) -> str:
        if frame.name in ("Hello", "Offer", "Pages", "HandOver"):
            said.append(frame.data)
        return "pass"

    relay.judges[split.id] = record  # type: ignore[assignment]
    split.receiver.give(split.imported)
    split.sender.give(replace(split.export, peer=relay.address))
    split.send_all()
    split.wait_quiet()
    relay.close()
    before = bytes(split.receiver.pages.bytes)
    with Dialler(split.address) as dialler:  # of the same transfer, which is over
        dialler.socket.sendall(b"".join(said))
        assert dialler.is_closed()
    other = Split(*sides, into=20)
    other.receiver.give(other.imported)
    with Dialler(split.address) as dialler:  # behind the handshake of another
        until_known(dialler, other)
        dialler.socket.sendall(b"".join(said[1:]))
        assert dialler.is_closed()
    assert split.receiver.pages.bytes == before
    still_goes_well(other)


def test_a_second_peer_with_the_secret_is_too_late(sides: tuple[Station, Station]) -> None:
    split = Split(*sides)
    split.receiver.give(split.imported)
    split.sender.give(split.export)
    until(lambda: Accepted(split.id, 1) in split.sender.poll())
    with Dialler(split.address) as dialler:
        assert isinstance(dialler.hello(split), Unknown)
        assert dialler.is_closed()
    split.sender.give(split.send(1, 4), split.last)
    split.wait_quiet()
    assert HandedOver(split.id) in split.sender.news


def test_pages_that_do_not_fit_are_a_fault_and_are_not_written(
    sides: tuple[Station, Station],
) -> None:
    """Of a peer that knows the secret: positions, digests and messages out of turn."""
    page = bytes(LAYOUT.page_bytes)
    wrong = [
        Pages(0, (page_digest(page),)),  # a page that is there
        Pages(2, (page_digest(page),)),  # not the next
        Pages(1, (page_digest(page),) * 9),  # more than there are
        Pages(1, (b"not its digest",)),
        Pages(1, (page_digest(page),), (0,)),  # in a room that there is not
        offer_of(Split(*sides)),
    ]
    for message in wrong:
        split = Split(*sides)
        before = bytes(split.receiver.pages.page(8 + 1))
        split.receiver.give(split.imported)
        with Dialler(split.address) as dialler:
            challenge = until_known(dialler, split)
            session = Session(
                split.secret, split.id, dialler_nonce=NONCE, listener_nonce=challenge.nonce
            )
            assert session.is_proof(challenge.proof)
            for said in (offer_of(split), message):
                body = encode(said)
                dialler.frame(body, session.from_dialler.mac(body))
            if isinstance(message, Pages) and not message.places:
                dialler.socket.sendall(page * len(message.digests))
            until(lambda split=split: split.receiver.failure(split.id))  # type: ignore[misc]
        split.wait_quiet(split.receiver)
        failure = split.receiver.failure(split.id)
        assert failure is not None
        assert failure.code == "transfer_corrupt"
        assert split.positions(split.receiver, Arrived) == []
        assert split.receiver.pages.page(8 + 1) == before


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", MAX_GREETING_BYTES + 1) + b"x" * 100,
        struct.pack("<I", 0),
        struct.pack("<I", 7) + b"\x93\xa5hello",
        struct.pack("<I", MAX_MESSAGE_BYTES),
    ],
    ids=["another protocol", "too long", "empty", "torn", "long after a while"],
)
def test_garbage_ends_a_connection(sides: tuple[Station, Station], data: bytes) -> None:
    with Dialler(sides[1].mover.address) as dialler:
        dialler.socket.sendall(data)
        assert dialler.is_closed()
    split = Split(*sides)
    split.receiver.give(split.imported)
    still_goes_well(split)


def test_random_bytes_never_harm(sides: tuple[Station, Station]) -> None:
    chance = random.Random(5)
    for _ in range(50):
        with Dialler(sides[1].mover.address) as dialler:
            data = chance.randbytes(chance.randrange(1, 200))
            dialler.socket.sendall(struct.pack("<I", len(data)) + data)
            dialler.is_closed()
    split = Split(*sides)
    split.receiver.give(split.imported)
    still_goes_well(split)


def test_another_version_is_refused(sides: tuple[Station, Station]) -> None:
    split = Split(*sides)
    split.receiver.give(split.imported)
    with Dialler(split.address) as dialler:
        assert dialler.hello(split, version=VERSION + 1) == Unknown(VERSION)


def test_who_says_nothing_is_shown_the_door_and_a_crowd_keeps_nobody_out(
    sides: tuple[Station, Station],
) -> None:
    address = sides[1].mover.address
    crowd = [Dialler(address) for _ in range(MAX_STRANGERS + 20)]
    split = Split(*sides)
    split.receiver.give(split.imported)
    still_goes_well(split)
    for dialler in crowd:
        assert dialler.is_closed()
        dialler.socket.close()
