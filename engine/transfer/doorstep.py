"""Who has connected and proven nothing yet: short greetings, a short deadline, and no page."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import msgspec

from engine.transfer.channel import Broken, Channel
from engine.transfer.incoming import Incoming
from engine.transfer.machine import Fault
from engine.transfer.messages import (
    NONCE_BYTES,
    VERSION,
    Challenge,
    Hello,
    Offer,
    Unknown,
    decode_greeting,
    decode_message,
    encode,
)
from engine.transfer.seal import Session

STRANGER_S = 2.0  # to prove the secret
PARTING_S = 1.0  # for the peer to read a last word


class Stranger:
    """find: the side that waits for a peer under an id. part, drop: close, at once or once what was
    said has arrived."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        find: Callable[[bytes], Incoming | None],
        part: Callable[[Channel], None],
        drop: Callable[[Channel], None],
        now: float,
    ) -> None:
        self.channel = Channel(connection, self, now)
        self._find = find
        self._part = part
        self._drop = drop
        self._deadline = now + STRANGER_S
        self._id: bytes | None = None
        self._session: Session | None = None
        self._is_refused = False

    def heard(self, body: bytes) -> None:
        try:
            if self._id is None:
                self._challenge(decode_greeting(body))
            else:
                self._admit(decode_message(body))
        except msgspec.MsgspecError as error:
            raise Broken("transfer_corrupt", f"greeting: found {error}") from error

    def _challenge(self, hello: object) -> None:
        side = self._find(hello.transfer_id) if isinstance(hello, Hello) else None
        if not isinstance(hello, Hello) or hello.version != VERSION or side is None:
            self.channel.say(encode(Unknown(VERSION)))
            self._is_refused = True
            return
        self._id = hello.transfer_id
        nonce = os.urandom(NONCE_BYTES)
        session = Session(side.secret, self._id, dialler_nonce=hello.nonce, listener_nonce=nonce)
        self._session = session
        self.channel.say(encode(Challenge(VERSION, nonce, session.proof)))
        self.channel.seal(session.from_listener, session.from_dialler)

    def _admit(self, offer: object) -> None:
        """The seal has proven the secret. An id is for one peer: who comes second is too late."""
        assert self._id is not None
        assert self._session is not None
        side = self._find(self._id)
        if side is None or not isinstance(offer, Offer):
            raise Broken("transfer_refused", "offer: found one that nobody waits for")
        side.greet(self.channel, self._session, offer)

    def filled(self) -> None:
        raise AssertionError("no pages were expected")

    def cut(self, fault: Fault) -> None:
        self._drop(self.channel)

    def flush(self, now: float) -> None:
        self.channel.send(now)
        if self._is_refused and not self.channel.has_more:
            self._part(self.channel)

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            self._drop(self.channel)


class Parting:
    """A connection whose last word has been sent: closed once the peer has read it, as a close with
    bytes unread would throw that word away."""

    def __init__(self, channel: Channel, drop: Callable[[Channel], None], now: float) -> None:
        channel.owner = self
        channel.end()
        self.channel = channel
        self._drop = drop
        self._deadline = now + PARTING_S

    def heard(self, body: bytes) -> None:
        """Nothing matters any more."""

    def filled(self) -> None:
        """Nothing matters any more."""

    def cut(self, fault: Fault) -> None:
        self._drop(self.channel)

    def flush(self, now: float) -> None:
        """Nothing is said."""

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            self._drop(self.channel)
