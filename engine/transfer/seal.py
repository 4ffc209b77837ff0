"""Proves who is at the other end of a connection, and that each message is theirs, new and whole.

Both ends know a transfer's one-use secret from the gateway; it never travels here. Each draws a
nonce, the listener answers with a proof over both, and from then on every message carries an
HMAC-SHA256 of itself and of a counter, under a key for its direction made of secret, id and nonces.
So what is recorded is worth nothing on another connection, and on its own a message that is left
out, repeated, moved or changed is found. A page that follows its message is covered by it: there is
its digest (no checksum, which who can change both could forge). BLAKE3 under a key of the
connection, because it takes a fourth of SHA-256's time; SHA-256 for peers that know no other.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256
from struct import Struct

from blake3 import blake3

from engine.store.page_codec import Bytes

_COUNTER = Struct("<Q")
_LABEL = b"kagari transfer 1 "
DIGESTS = ("blake3",)  # of pages, beside SHA-256, which every peer has; the best first
EVERYBODYS = "sha256"

Digest = Callable[[Bytes], bytes]


class Seal:
    """One direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def mac(self, body: bytes) -> bytes:
        """Of the next message."""
        counter = _COUNTER.pack(self._count)
        self._count += 1
        return hmac.digest(self._key, counter + body, "sha256")

    def proves(self, body: bytes, mac: bytes) -> bool:
        """Whether it is the next message; once it was not, nothing behind it can be believed."""
        return hmac.compare_digest(self.mac(body), mac)


class Session:
    """What both ends make of a secret and two nonces."""

    def __init__(
        self, secret: bytes, transfer_id: bytes, *, dialler_nonce: bytes, listener_nonce: bytes
    ) -> None:
        context = transfer_id + dialler_nonce + listener_nonce

        def derive(purpose: bytes) -> bytes:
            return hmac.digest(secret, _LABEL + purpose + b"\0" + context, "sha256")

        self.proof = derive(b"proof")  # of the listener's
        self.from_dialler = Seal(derive(b"from dialler"))
        self.from_listener = Seal(derive(b"from listener"))
        self._page_key = derive(b"pages")

    def is_proof(self, proof: bytes) -> bool:
        """Whether it is a listener's that knows the secret."""
        return hmac.compare_digest(self.proof, proof)

    def digest(self, name: str) -> Digest | None:
        """Of pages that a network carries; other threads run meanwhile. None: of a name that is not
        known here."""
        if name == EVERYBODYS:
            return page_digest
        return self._keyed_digest if name in DIGESTS else None

    def _keyed_digest(self, page: Bytes) -> bytes:
        return blake3(page, key=self._page_key).digest()


def page_digest(page: Bytes) -> bytes:
    return sha256(page).digest()
