"""The receiver's side: takes pages to where they belong, and believes none before its digest."""

from __future__ import annotations

import math
from hmac import compare_digest

import msgspec

from engine.schedule.transfer_orders import Arrived, Expect, Import
from engine.store.page_codec import copy_bytes, payload_checksum
from engine.store.quantise import convert
from engine.transfer import channel as channels
from engine.transfer.channel import Channel
from engine.transfer.machine import Effect, Fault, Receive, Say, Stop, Tell
from engine.transfer.messages import Accept, Drained, HandOver, Message, Offer, Pages, Withdraw
from engine.transfer.receiver import Receiver
from engine.transfer.rooms import OwnRoom, make_room
from engine.transfer.seal import DIGESTS, EVERYBODYS, Digest, Session, page_digest
from engine.transfer.side import Side, Site, Unsound
from engine.transfer.states import Event


class Incoming(Side):
    machine: Receiver

    def __init__(self, site: Site, order: Expect | Import) -> None:
        receiver = Receiver(order, site.layout)
        super().__init__(site, receiver, secret=order.secret, deadline=order.deadline)
        # An Import that nobody announced is of a peer that is on its way too.
        is_asked = order.is_asked if isinstance(order, Expect) else True
        self._meet_by = site.clock() + channels.CONNECT_S if is_asked else math.inf
        self._session: Session | None = None
        self._digest: Digest = page_digest  # of pages, once it is chosen
        self._room: OwnRoom | None = None
        self._is_drained = False  # the peer has said its last word: it writes nothing more
        self._receive: Receive | None = None
        self._began = 0.0
        self._tags: list[int] = []
        self._views: list[memoryview] = []  # the pages
        self._landing: list[memoryview] = []  # where their bytes land: there, or to be converted

    def greet(self, channel: Channel, session: Session, offer: Offer) -> None:
        """A peer has proven that it is the one."""
        self.channel, self._session = channel, session
        channel.owner = self
        self.feed(Event.OFFER, offer)

    def tick(self, now: float) -> None:
        if self.channel is None and self._meet_by <= now < self.deadline:
            found = f"peer: found not connected after {channels.CONNECT_S:g} s, allowed sooner"
            self.feed(Event.UNMET, Fault("transfer_timeout", found))
        else:
            super().tick(now)

    def take(self, message: Message) -> None:
        self._is_drained |= isinstance(message, HandOver | Withdraw | Drained)
        super().take(message)
        if isinstance(message, Pages) and not message.places and not self._landing:
            assert self.channel is not None
            self.channel.skip(len(message.digests) * self.machine.travels.page_bytes)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Say(Accept() as accept):
                self._room = self._make_room(accept)
                told = None if self._room is None else self._room.told
                digest = self._choose_digest()
                self.say(msgspec.structs.replace(accept, room=told, digest=digest))
            case Tell(Arrived() as arrived):
                assert self._receive is not None
                pairs = zip(self._receive.page_ids, self._receive.generations, strict=True)
                self.site.tell(arrived, list(pairs))
            case Receive():
                self._begin(effect)
            case Stop():
                self._let_go()
            case _:
                super().carry_out(effect)

    def hang_up(self) -> None:
        super().hang_up()
        if self._room is not None:
            self._room.close(is_drained=self._is_drained)
            self._room = None

    def _choose_digest(self) -> str:
        """The best that both know."""
        assert self._session is not None
        assert self.machine.offer is not None
        offered = self.machine.offer.digests
        name = next((name for name in DIGESTS if name in offered), EVERYBODYS)
        digest = self._session.digest(name)
        assert digest is not None
        self._digest = digest
        return name

    def _make_room(self, accept: Accept) -> OwnRoom | None:
        assert self.channel is not None
        assert self.machine.offer is not None
        return make_room(
            [way for way in self.machine.offer.ways if way in self.site.ways],
            self.site.shared_rooms,
            self.site.engine,
            num_pages=accept.stop - accept.first,
            place_bytes=self.machine.travels.page_bytes,
            is_local=self.channel.is_local,
        )

    def _begin(self, receive: Receive) -> None:
        assert self.channel is not None
        memory, room = self.site.memory, self._room
        self._receive, self._began = receive, self.site.clock()
        self._tags = [*map(memory.generation, receive.page_ids)]
        self._views = memory.incoming(receive.page_ids)
        size = self.machine.travels.page_bytes
        if self.machine.travels == self.site.layout:
            self._landing = self._views
        else:
            self._landing = [memoryview(bytearray(size)) for _ in self._views]
        if not receive.places:
            self.channel.expect(self._landing)
            return
        if (
            room is None
            or len(receive.places) != len(self._landing)
            or max(receive.places) >= room.told.places
        ):
            raise Unsound("transfer_corrupt", "Pages: found places that no page can lie in")
        for place, page in zip(receive.places, self._landing, strict=True):
            copy_bytes(room.place(place), page)
        self.filled()

    def filled(self) -> None:
        try:
            self._verify()
        except Unsound as error:
            self.feed(Event.FAULTY, error.fault)

    def _verify(self) -> None:
        receive, memory = self._receive, self.site.memory
        assert receive is not None
        is_private = self._room is not None and receive.places and self._room.is_private
        digest = payload_checksum if is_private else self._digest
        for at, (page, wanted) in enumerate(zip(self._landing, receive.digests, strict=True)):
            if not compare_digest(digest(page), wanted):
                raise Unsound(
                    "transfer_corrupt", f"page {receive.first + at}: found other bytes than sent"
                )
        if self._landing is not self._views:
            for page, view in zip(self._landing, self._views, strict=True):
                copy_bytes(convert(page, self.machine.travels, self.site.layout), view)
        if [*map(memory.generation, receive.page_ids)] != self._tags:
            raise Unsound(
                "transfer_corrupt",
                f"pages from {receive.first} on: found given to others meanwhile, allowed held",
            )
        memory.arrive(receive.page_ids, self._views)
        arrived = Arrived(
            self.machine.transfer_id,
            receive.first,
            len(receive.page_ids),
            sum(map(len, self._landing)),
            self.site.clock() - self._began,
        )
        self._let_go()
        self.feed(Event.ARRIVED, arrived)
        if self.channel is not None and self.channel.is_open:
            self.channel.send(self.site.clock())  # the places are wanted while others are read

    def _let_go(self) -> None:
        """Of the pages that are arriving."""
        if self._views:
            assert self.channel is not None
            self.channel.skip_rest()
            self.site.memory.free(self._views)
            self._views, self._landing = [], []
