"""The sender's side: dials, reads pages where they lie, converts where that makes fewer bytes."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from engine.schedule.transfer_orders import Export
from engine.store.page_codec import payload_checksum
from engine.store.quantise import convert
from engine.transfer.channel import Broken, Channel
from engine.transfer.forms import form_of, misfit, travels_as
from engine.transfer.machine import Effect, Fault, Push, Stop
from engine.transfer.messages import (
    NONCE_BYTES,
    VERSION,
    Accept,
    Challenge,
    Hello,
    Message,
    Pages,
    Unknown,
    decode_greeting,
    encode,
)
from engine.transfer.rooms import PeerRoom, reach_room
from engine.transfer.seal import DIGESTS, Digest, Session, page_digest
from engine.transfer.sender import Granted, Sender
from engine.transfer.side import Side, Site, Unsound
from engine.transfer.states import Event, State

RETRY_S = 2.0  # until the peer knows the id: it may hear of the transfer a little later than we
PAUSE_S = (0.01, 0.2)  # before the second try, and the longest one


@dataclass(eq=False, slots=True)
class _Unsaid:
    """A message that waits for pages to be in the peer's room, or for others that do."""

    body: bytes
    is_due: bool = False


class Outgoing(Side):
    machine: Sender

    def __init__(self, site: Site, order: Export) -> None:
        sender = Sender(order, site.layout, site.ways)
        super().__init__(site, sender, secret=order.secret, deadline=order.deadline)
        self._peer = order.peer
        self._nonce = b""
        self._session: Session | None = None
        self._digest: Digest = page_digest  # of pages, once the peer has chosen
        self._room: PeerRoom | None = None
        self._unsaid: deque[_Unsaid] = deque()
        self._give_up_at = site.clock() + RETRY_S
        self._pause_s = PAUSE_S[0]
        self._dial_at: float | None = None

    # --- to the peer ----------------------------------------------------------------------------

    def dial(self) -> None:
        now = self.site.clock()
        self._dial_at = None
        try:
            host, port = parse_address(self._peer)
        except ValueError as error:
            self.feed(Event.CUT, Fault("transfer_refused", str(error)))
            return
        family = socket.AF_INET6 if host.version == 6 else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        self.channel = Channel(connection, self, now)
        connection.connect_ex((str(host), port))  # whether it came about is seen when it is used
        self._nonce = os.urandom(NONCE_BYTES)
        self.channel.say(encode(Hello(VERSION, self.machine.transfer_id, self._nonce)))
        self.site.watch(self.channel)

    def cut(self, fault: Fault) -> None:
        if self.machine.state is not State.DIALLING:
            super().cut(fault)
            return
        now = self.site.clock()
        if self.channel is not None:
            self.site.part(self.channel)
            self.channel = None
        if now + self._pause_s < self._give_up_at:
            self._dial_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])
        else:
            super().cut(fault)

    def tick(self, now: float) -> None:
        if self._dial_at is not None and now >= self._dial_at:
            self.dial()
        super().tick(now)

    def heard(self, body: bytes) -> None:
        if self.machine.state is not State.DIALLING:
            super().heard(body)
            return
        try:
            greeting = decode_greeting(body)
        except msgspec.MsgspecError as error:
            raise Broken("transfer_corrupt", f"greeting: found {error}") from error
        if isinstance(greeting, Hello) or greeting.version != VERSION:
            self._give_up_at = 0.0
            raise Broken(
                "transfer_refused",
                f"{self._peer}: found version {greeting.version}, allowed {VERSION}; update it",
            )
        if isinstance(greeting, Unknown):
            raise Broken("transfer_refused", f"{self._peer}: found no such transfer expected there")
        self._prove(greeting)

    def _prove(self, challenge: Challenge) -> None:
        assert self.channel is not None
        session = Session(
            self.secret,
            self.machine.transfer_id,
            dialler_nonce=self._nonce,
            listener_nonce=challenge.nonce,
        )
        if not session.is_proof(challenge.proof):
            raise Broken("transfer_refused", f"{self._peer}: found without the transfer's secret")
        self._session = session
        self.channel.seal(session.from_dialler, session.from_listener)
        self.feed(Event.OPENED)

    # --- pages ----------------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        if isinstance(message, Accept) and self.machine.state is State.OFFERING:
            assert self._session is not None
            digest = self._session.digest(message.digest)
            if digest is None:
                found = f"Accept: found digest {message.digest!r}, allowed one of {DIGESTS}"
                self.feed(Event.FAULTY, Fault("transfer_corrupt", found))
                return
            self._digest = digest
            self._room = self._reach(message)
            places = 0 if self._room is None else self._room.places
            self.feed(Event.ACCEPT, Granted(message, places))
        else:
            super().take(message)

    def _reach(self, accept: Accept) -> PeerRoom | None:
        if misfit(form_of(self.site.layout), accept.form):
            return None  # as the machine will find
        place_bytes = travels_as(self.site.layout, accept.form.layout).page_bytes
        site = self.site
        return reach_room(
            accept.room,
            site.shared_rooms,
            site.engine,
            place_bytes=place_bytes,
            call=lambda act: site.call(self, act),
        )

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Push():
                self._push(effect)
            case Stop():
                pass  # only pages whose message was said are still read, by the channel
            case _:
                super().carry_out(effect)

    def _push(self, push: Push) -> None:
        assert self.channel is not None
        memory, room = self.site.memory, self._room
        views = memory.outgoing(push.page_ids)
        with ExitStack() as lent:
            lent.callback(memory.free, views)
            pages = [*map(self._converted, views)]
            body = self._pages_message(push, pages)
            if room is None:
                lent.pop_all()
                self.channel.say(body, pages, lambda: memory.free(views))
            else:
                unsaid = _Unsaid(body)
                self._unsaid.append(unsaid)
                room.put(push.places, pages, lambda is_there: self._put(unsaid, is_there))
        self.channel.send(self.site.clock())  # it travels while the next run is made ready

    def _pages_message(self, push: Push, pages: list[memoryview]) -> bytes:
        is_private = self._room is not None and self._room.is_private
        digest = payload_checksum if is_private else self._digest
        digests = tuple(map(digest, pages))
        # Read, and then looked at: a page that was given to another meanwhile is not sent.
        if [*map(self.site.memory.generation, push.page_ids)] != list(push.generations):
            raise Unsound(
                "transfer_corrupt",
                f"pages from {push.first} on: found given to others, allowed as they were given",
            )
        return encode(Pages(push.first, digests, push.places))

    def _put(self, unsaid: _Unsaid, is_there: bool) -> None:
        """Pages are in the peer's room, or will never be."""
        if unsaid not in self._unsaid:
            return  # it has ended meanwhile
        unsaid.is_due = True
        if not is_there:
            self._unsaid.remove(unsaid)
            self.feed(Event.FAULTY, Fault("transfer_lost", "room: found the peer's out of reach"))
        self._say_due()

    def say(self, message: Message) -> None:
        self._unsaid.append(_Unsaid(encode(message), is_due=True))
        self._say_due()

    def _say_due(self) -> None:
        """All in the order in which it was said, and Pages not before the pages."""
        while self._unsaid and self._unsaid[0].is_due and self.channel is not None:
            self.channel.say(self._unsaid.popleft().body)

    @property
    def has_more(self) -> bool:
        return bool(self._unsaid) or super().has_more

    def hang_up(self) -> None:
        super().hang_up()
        self._unsaid.clear()
        if self._room is not None:
            self._room.close()
            self._room = None

    def _converted(self, page: memoryview) -> memoryview:
        sent, travels = self.site.layout, self.machine.travels
        return page if sent == travels else memoryview(convert(page, sent, travels))


def parse_address(
    address: str,
) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """ "192.0.2.1:7000" or "[2001:db8::1]:7000". Raises ValueError, in four parts; names are not
    resolved here: a resolver that hangs would stop every transfer."""
    host, _, port = address.rpartition(":")
    try:
        number = int(port)
        found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        number = 0
    if not 0 < number < 1 << 16:
        raise ValueError(
            f"peer: found {address[:100]!r}, allowed ADDRESS:PORT; set the engine's --peer-host"
        )
    return found, number
