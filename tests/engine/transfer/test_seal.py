"""Nothing that was changed, moved, repeated or recorded is believed, nor who has no secret."""

from __future__ import annotations

import os
from hashlib import sha256

import pytest

from engine.transfer.seal import DIGESTS, EVERYBODYS, Session

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

    assert digest_of(ours, b"page") != digest_of(theirs, b"page")


def digest_of(of: Session, page: bytes, name: str = DIGESTS[0]) -> bytes:
    digest = of.digest(name)
    assert digest is not None
    return digest(page)


def test_a_page_has_one_digest_on_both_ends_and_another_has_another() -> None:
    for name in (*DIGESTS, EVERYBODYS):
        ours, theirs = session(), session()
        assert digest_of(ours, b"page", name) == digest_of(theirs, b"page", name)
        assert digest_of(ours, b"page", name) != digest_of(theirs, b"pages", name)
    assert digest_of(session(), b"page", EVERYBODYS) == sha256(b"page").digest()
    assert session().digest("md5") is None


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
