"""One side of one transfer as the mover's thread carries it out: a machine and its connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from engine.schedule.transfer_orders import TransferNews
from engine.store.page_codec import PageLayout
from engine.store.tiered import PageMemory
from engine.transfer import messages
from engine.transfer.channel import Channel
from engine.transfer.machine import Effect, Fault, HangUp, Machine, Say, Tell
from engine.transfer.messages import Message, decode_message, encode
from engine.transfer.rooms import Way
from engine.transfer.shared_room import SharedRooms
from engine.transfer.staging import TransferEngine
from engine.transfer.states import Event, State

DRAIN_S = 5.0  # for the peer to answer a last word; then the connection is cut
EVENT_OF: Mapping[type[Message], Event] = {
    messages.Offer: Event.OFFER,
    messages.Accept: Event.ACCEPT,
    messages.Pages: Event.PAGES,
    messages.Ack: Event.ACK,
    messages.HandOver: Event.HAND_OVER,
    messages.Done: Event.DONE,
    messages.Withdraw: Event.WITHDRAWN,
    messages.Drained: Event.DRAINED,
}


@dataclass(frozen=True, slots=True)
class Site:
    """What all transfers of an engine share."""

    memory: PageMemory
    layout: PageLayout
    ways: tuple[Way, ...]
    clock: Callable[[], float]
    tell: Callable[[TransferNews, list[tuple[int, int]]], None]  # with tags that are to be written
    watch: Callable[[Channel], None]  # wait for what it brings
    part: Callable[[Channel], None]  # close it, once what was said has arrived
    call: Callable[[Side, Callable[[], None]], None]  # from any thread: do it on the mover's
    shared_rooms: SharedRooms
    engine: TransferEngine | None  # Mooncake's


class Unsound(Exception):
    """What is to be sent, or has come, cannot be right."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.fault = Fault(code, message)


class Side:
    """Everything here runs on the mover's thread."""

    def __init__(self, site: Site, machine: Machine, *, secret: bytes, deadline: float) -> None:
        self.site = site
        self.machine = machine
        self.secret = secret
        self.deadline = deadline
        self.channel: Channel | None = None

    def feed(self, event: Event, value: object = None) -> None:
        was_over = self._is_over
        try:
            for effect in self.machine.on(event, value):
                self.carry_out(effect)
        except Unsound as error:  # whatever else there was to do is not done
            self.feed(Event.FAULTY, error.fault)
        if self._is_over and not was_over:
            self.deadline = self.site.clock() + DRAIN_S

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Say(message):
                self.say(message)
            case Tell(news):
                self.site.tell(news, [])
            case HangUp():
                self.hang_up()
            case _:
                raise AssertionError(f"{type(self).__name__} cannot {effect}")

    def say(self, message: Message) -> None:
        assert self.channel is not None
        self.channel.say(encode(message))

    def hang_up(self) -> None:
        if self.channel is not None:
            self.site.part(self.channel)

    def cut(self, fault: Fault) -> None:
        """The connection is of no use."""
        self.feed(Event.CUT, fault)

    def heard(self, body: bytes) -> None:
        try:
            message = decode_message(body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self.feed(Event.FAULTY, Fault("transfer_corrupt", f"message: found {error}"))
            return
        if not isinstance(message, messages.Ping):
            self.take(message)

    def take(self, message: Message) -> None:
        self.feed(EVENT_OF[type(message)], message)

    def filled(self) -> None:
        raise AssertionError("no pages were expected")

    def flush(self, now: float) -> None:
        """Send what was said."""
        if self.channel is not None and self.channel.is_open:
            self.channel.send(now)
            if self.machine.state is State.LEAVING and not self.has_more:
                self.feed(Event.FLUSHED)

    @property
    def has_more(self) -> bool:
        """Something that was said is not sent."""
        return self.channel is not None and self.channel.has_more

    def tick(self, now: float) -> None:
        if now >= self.deadline:
            found = f"found in state {self.machine.state.name} at its end, allowed before it"
            self.feed(Event.LATE, Fault("transfer_timeout", f"deadline: {found}"))
        elif self.channel is not None and self.channel.is_open:
            self.channel.tick(now)

    @property
    def _is_over(self) -> bool:
        return self.machine.state in (State.DRAINING, State.LEAVING)
