"""What a machine believes of its peer and its books: nothing that does not follow from the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.schedule.transfer_orders import (
    Acked,
    Arrived,
    Expect,
    Export,
    HandedOver,
    HandOver,
    Handover,
    Import,
    Offered,
    Send,
    TransferFailed,
)
from engine.transfer import messages
from engine.transfer.forms import form_of
from engine.transfer.machine import Effects, Machine, Push, Receive, Say, Stop, Tell
from engine.transfer.messages import Accept, Ack, Done, Offer, PageForm, Pages
from engine.transfer.messages import HandOver as HandOverMessage
from engine.transfer.receiver import Receiver
from engine.transfer.sender import INLINE_BYTES, Granted, Sender
from engine.transfer.shards import Shard
from engine.transfer.states import Event, State
from tests.engine.transfer.movers import LAYOUT, chain

ID, KEYS, TOKENS = b"i" * 16, chain(4), 70  # four full pages and a tail
FORM = form_of(LAYOUT)
HANDOVER = Handover(7)
EXPORT = Export(ID, b"", "", KEYS, TOKENS, 0.0)
IMPORT = Import(ID, b"", KEYS, TOKENS, 1, (8, 9, 10, 11), (5, 6, 7, 8), 0.0)
OFFER = Offer(KEYS, TOKENS, FORM, (), ("blake3",))
DIGESTS = (b"a", b"b")


def told(effects: Effects, kind: type) -> list[object]:
    news = [effect.news for effect in effects if isinstance(effect, Tell)]
    return [one for one in news if isinstance(one, kind)]


def said(effects: Effects) -> list[messages.Message]:
    return [effect.message for effect in effects if isinstance(effect, Say)]


def sender(*, places: int = 0, accept: Accept | None = None) -> Sender:
    """Accepted from page 1 on."""
    machine = Sender(EXPORT, LAYOUT)
    assert said(machine.on(Event.OPENED)) == [OFFER]
    machine.on(Event.ACCEPT, Granted(accept or Accept(1, 5, FORM), places))
    return machine


def receiver() -> Receiver:
    machine = Receiver(IMPORT, LAYOUT)
    assert said(machine.on(Event.OFFER, OFFER)) == [Accept(1, 5, FORM)]
    return machine


def arrive(machine: Receiver, first: int, count: int) -> None:
    (receive,) = machine.on(Event.PAGES, Pages(first, (b"",) * count))
    assert isinstance(receive, Receive)
    machine.on(Event.ARRIVED, Arrived(ID, first, count))


def fails(machine: Machine, event: Event, value: object, code: str = "transfer_corrupt") -> None:
    effects = machine.on(event, value)
    assert machine.state is State.DRAINING
    assert isinstance(effects[0], Stop)
    (withdraw,) = said(effects)
    assert isinstance(withdraw, messages.Withdraw)
    (failure,) = told(effects, TransferFailed)
    assert isinstance(failure, TransferFailed)
    assert (failure.code, failure.message) == (withdraw.code, withdraw.message)
    assert failure.code == code


# --- the sender ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "code"),
    [
        (Accept(1, 6, FORM), "transfer_corrupt"),  # more than there is
        (Accept(3, 2, FORM), "transfer_corrupt"),
        (Accept(1, 5, form_of(replace(LAYOUT, head_dim=4))), "transfer_layout"),
        (Accept(1, 5, form_of(replace(LAYOUT, precision="int3"))), "transfer_layout"),
        (Accept(1, 5, PageForm(LAYOUT, "kv9-other", FORM.shard)), "transfer_layout"),
        (Accept(1, 5, PageForm(LAYOUT, LAYOUT.layout_id, Shard(0, 1, 0, 2))), "transfer_layout"),
    ],
)
def test_an_accept_that_cannot_be(accept: Accept, code: str) -> None:
    machine = Sender(EXPORT, LAYOUT)
    machine.on(Event.OPENED)
    fails(machine, Event.ACCEPT, Granted(accept, 0), code)


def test_credit_is_the_places_of_the_room_and_comes_back_with_acks() -> None:
    machine = sender(places=3)
    pushes = machine.on(Event.SEND, Send(ID, 1, (1, 2, 3), (1, 1, 1)))
    assert pushes == [
        Push(1, (1,), (1,), (0,)),
        Push(2, (2,), (1,), (1,)),
        Push(3, (3,), (1,), (2,)),
    ]
    assert machine.on(Event.SEND_LAST, HandOver(ID, (4,), (1,), HANDOVER)) == []
    effects = machine.on(Event.ACK, Ack(1, 1))
    assert effects == [
        Tell(Acked(ID, 1, 1)),
        Push(4, (4,), (1,), (0,)),
        Say(HandOverMessage(HANDOVER)),
    ]


def test_without_a_room_so_many_bytes_may_be_on_the_way() -> None:
    layout = replace(LAYOUT, num_layers=4096)  # pages of 4 MB
    assert INLINE_BYTES // layout.page_bytes == 2
    machine = Sender(EXPORT, layout)
    machine.on(Event.OPENED)
    machine.on(Event.ACCEPT, Granted(Accept(0, 5, form_of(layout)), 0))
    pushes = machine.on(Event.SEND, Send(ID, 0, (0, 1, 2, 3), (1,) * 4))
    assert [push.first for push in pushes if isinstance(push, Push)] == [0, 1]


@pytest.mark.parametrize("ack", [Ack(2, 1), Ack(0, 1), Ack(1, 3), Ack(1, 0)])
def test_an_ack_of_what_was_not_said(ack: Ack) -> None:
    machine = sender()
    machine.on(Event.SEND, Send(ID, 1, (1, 2), (1, 1)))
    fails(machine, Event.ACK, ack)


def test_an_end_before_all_was_said_or_acknowledged() -> None:
    machine = sender()
    fails(machine, Event.DONE, Done())
    machine = sender()
    machine.on(Event.SEND, Send(ID, 1, (1, 2, 3), (1, 1, 1)))
    machine.on(Event.SEND_LAST, HandOver(ID, (4,), (1,), HANDOVER))
    machine.on(Event.ACK, Ack(1, 3))
    fails(machine, Event.DONE, Done())
    machine = sender(places=2)
    machine.on(Event.SEND, Send(ID, 1, (1, 2, 3), (1, 1, 1)))
    machine.on(Event.SEND_LAST, HandOver(ID, (4,), (1,), HANDOVER))
    fails(machine, Event.DONE, Done())


def test_all_was_said_and_acknowledged() -> None:
    machine = sender()
    machine.on(Event.SEND, Send(ID, 1, (1, 2, 3), (1, 1, 1)))
    machine.on(Event.SEND_LAST, HandOver(ID, (4,), (1,), HANDOVER))
    machine.on(Event.ACK, Ack(1, 4))
    assert told(machine.on(Event.DONE, Done()), HandedOver) == [HandedOver(ID)]
    assert machine.state is State.QUIET


@pytest.mark.parametrize(
    ("event", "order"),
    [
        (Event.SEND, Send(ID, 2, (2,), (1,))),
        (Event.SEND, Send(ID, 0, (0,), (1,))),
        (Event.SEND_LAST, HandOver(ID, (4,), (1,), HANDOVER)),  # pages are not given
    ],
)
def test_orders_with_a_gap(event: Event, order: object) -> None:
    fails(sender(), event, order)


def test_pages_that_the_receiver_has_no_place_for_are_not_sent() -> None:
    machine = sender(accept=Accept(1, 3, FORM))
    pushes = machine.on(Event.SEND, Send(ID, 1, (1, 2, 3), (1, 1, 1)))
    assert [push.page_ids for push in pushes if isinstance(push, Push)] == [(1, 2)]
    assert said(machine.on(Event.SEND_LAST, HandOver(ID, (), (), None))) == [HandOverMessage(None)]


# --- the receiver -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offer", "code"),
    [
        (Offer(chain(4, seed=1), TOKENS, FORM), "transfer_refused"),
        (Offer(KEYS[:3], TOKENS, FORM), "transfer_refused"),
        (Offer(KEYS, TOKENS + 1, FORM), "transfer_refused"),
        (Offer(KEYS, TOKENS, form_of(replace(LAYOUT, num_layers=1))), "transfer_layout"),
    ],
)
@pytest.mark.parametrize("comes", ["before", "after"])
def test_an_offer_that_is_not_of_this_prompt(offer: Offer, code: str, comes: str) -> None:
    if comes == "before":
        fails(Receiver(IMPORT, LAYOUT), Event.OFFER, offer, code)
        return
    machine = Receiver(Expect(ID, b"", 0.0), LAYOUT)
    if code == "transfer_layout":
        fails(machine, Event.OFFER, offer, code)
        return
    assert told(machine.on(Event.OFFER, offer), Offered) == [Offered(ID, offer.keys)]
    fails(machine, Event.IMPORT, IMPORT, code)


@pytest.mark.parametrize(
    "pages",
    [
        Pages(0, DIGESTS),  # held already
        Pages(2, DIGESTS),  # a gap
        Pages(1, (b"",) * 5),  # behind the end
    ],
)
def test_pages_out_of_place(pages: Pages) -> None:
    fails(receiver(), Event.PAGES, pages)


def test_pages_before_the_last_ones_are_in_place_or_again() -> None:
    machine = receiver()
    machine.on(Event.PAGES, Pages(1, DIGESTS))
    fails(machine, Event.PAGES, Pages(3, DIGESTS))
    machine = receiver()
    arrive(machine, 1, 2)
    fails(machine, Event.PAGES, Pages(1, DIGESTS))


def test_pages_go_where_their_positions_say() -> None:
    machine = receiver()
    arrive(machine, 1, 1)
    assert machine.on(Event.PAGES, Pages(2, DIGESTS, (4, 5))) == [
        Receive(2, (9, 10), (6, 7), DIGESTS, (4, 5))
    ]


def test_a_handover_covers_all_pages() -> None:
    for count in range(4):
        machine = receiver()
        for at in range(count):
            arrive(machine, 1 + at, 1)
        fails(machine, Event.HAND_OVER, HandOverMessage(HANDOVER))
    machine = receiver()
    arrive(machine, 1, 4)
    assert said(machine.on(Event.HAND_OVER, HandOverMessage(HANDOVER))) == [Done()]


def test_no_token_is_taken_over_a_part_of_a_prompt() -> None:
    machine = Receiver(replace(IMPORT, page_ids=(8, 9, 10), generations=(5, 6, 7)), LAYOUT)
    machine.on(Event.OFFER, OFFER)
    arrive(machine, 1, 3)
    fails(machine, Event.HAND_OVER, HandOverMessage(HANDOVER))
