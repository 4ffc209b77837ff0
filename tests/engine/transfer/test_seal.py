"""Nothing that was changed, moved, repeated or recorded is believed, nor who has no secret."""

from __future__ import annotations

import os

import pytest

from engine.transfer.seal import Session

SECRET, ID = bytes(range(32)), bytes(16)
NONCES = {"dialler_nonce": b"d" * 32, "listener_nonce": b"l" * 32}


def session(secret: bytes = SECRET, transfer_id: bytes = ID, **nonces: bytes) -> Session:
    return Session(secret, transfer_id, **(NONCES | nonces))


def test_both_ends_agree() -> None:
    ours, theirs = session(), session()
    assert ours.is_proof(theirs.proof)
    for body in (b"one", b"two", b""):
        assert theirs.from_dialler.proves(body, ours.from_dialler.mac(body))
        assert ours.from_listener.proves(body, theirs.from_listener.mac(body))


@pytest.mark.parametrize(
    "other",
    [
        {"secret": bytes(32)},
        {"transfer_id": b"x" * 16},
        {"dialler_nonce": b"x" * 32},
        {"listener_nonce": b"x" * 32},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_secret_id_or_connection_proves_nothing(other: dict[str, bytes]) -> None:
    ours, theirs = session(), session(**other)
    assert not ours.is_proof(theirs.proof)
    assert not ours.from_listener.proves(b"x", theirs.from_listener.mac(b"x"))


def test_what_one_end_said_is_not_what_the_other_says() -> None:
    assert not session().from_listener.proves(b"x", session().from_dialler.mac(b"x"))


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("wrong", range(4))
def test_only_the_next_message_is_believed(at: int, wrong: int) -> None:
    bodies = [b"same", b"same", b"other", b""]
    said, heard = session().from_dialler, session().from_dialler
    macs = [*map(said.mac, bodies)]
    for body, mac in zip(bodies[:at], macs, strict=False):
        assert heard.proves(body, mac)
    assert heard.proves(bodies[wrong], macs[wrong]) == (at == wrong)


def test_every_flipped_bit_is_found() -> None:
    body = b"pages"
    message = body + session().from_dialler.mac(body)
    for bit in range(8 * len(message)):
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        assert not session().from_dialler.proves(bytes(changed[:5]), bytes(changed[5:]))


def test_a_secret_is_in_nothing_that_is_said() -> None:
    secret = os.urandom(32)
    ours = session(secret)
    said = ours.proof + ours.from_dialler.mac(b"x") + ours.from_listener.mac(b"x")
    assert secret not in said
