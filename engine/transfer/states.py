"""The protocol between two engines as one table: side, state, event → next state and act.

The machines of both sides (machine.py, sender.py, receiver.py) do what it says and no more, and
docs/transfers.md shows it. A state's rule for ANY is for every event without a rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class State(Enum):
    """Its value says what is true in it."""

    # of the sender
    DIALLING = "connects and proves that it knows the secret; again while the peer knows no such id"
    OFFERING = "has told what it has, and waits until the peer has room"
    SENDING = "sends pages as they are given to it"
    SETTLING = "was given all of them, and waits until the peer says that it has them"
    # of the receiver
    EXPECTED = "knows the id; nobody has come"
    PREPARED = "has pages to write into; nobody has come"
    OFFERED = "was told what there is, and waits for pages to write into"
    RECEIVING = "takes pages"
    # of both
    DRAINING = "has said Withdraw, touches no page, and waits until the peer says the same"
    LEAVING = "touches no page but to send what it had begun; its last word is on the way"
    QUIET = "touches nothing; the connection is closed"


class Event(Enum):
    # orders of the books
    SEND = "order Send"
    SEND_LAST = "order HandOver"
    IMPORT = "order Import"
    WITHDRAW = "order Withdraw"
    # messages of the peer
    OFFER = "Offer"
    ACCEPT = "Accept"
    PAGES = "Pages"
    ACK = "Ack"
    HAND_OVER = "HandOver"
    DONE = "Done"
    WITHDRAWN = "Withdraw"
    DRAINED = "Drained"
    # of this side
    OPENED = "connected"  # and both have proven the secret
    ARRIVED = "pages are right"
    FLUSHED = "all is sent"
    FAULTY = "a fault"  # what came, or is to be sent, cannot be right
    UNMET = "nobody came"  # though it was asked to, and has had CONNECT_S
    LATE = "the deadline"
    CUT = "a cut"  # the connection is lost, silent or forged, or none came about
    ANY = "anything else"


class Act(Enum):
    """Its value says what the machine does."""

    IGNORE = "nothing"
    # of the sender
    OFFER = "say Offer"
    BEGIN = "tell Accepted"
    SEND = "say Pages, as many as there is credit for"
    SEND_LAST = "the same, and HandOver behind the last of them"
    ACKED = "tell Acked, then as for Send"
    HANDED_OVER = "tell HandedOver, hang up, tell TransferQuiet"
    # of the receiver
    EXPECT = "tell Offered"
    PREPARE = "keep the pages for who comes"
    ACCEPT = "say Accept"
    RECEIVE = "read the pages into their places and verify them"
    ACK = "tell Arrived, say Ack"
    COMPLETE = "tell Received, say Done"
    # of both
    WITHDRAW = "stop, say Withdraw"
    FAIL = "stop, say Withdraw, tell TransferFailed"
    YIELD = "stop, say Drained, tell TransferFailed"
    DRAIN = "say Drained"
    LOSE = "stop, hang up, tell TransferFailed, tell TransferQuiet"
    END = "stop, hang up, tell TransferQuiet"


class Rule(NamedTuple):
    then: State
    act: Act


Rules = Mapping[Event, Rule]
Table = Mapping[State, Rules]

_LOSE = Rule(State.QUIET, Act.LOSE)
_END = Rule(State.QUIET, Act.END)
_FAIL = Rule(State.DRAINING, Act.FAIL)

# Nobody is connected.
_ALONE: Rules = {Event.WITHDRAW: _END, Event.LATE: _LOSE, Event.ANY: _LOSE}
_UNMET: Rules = {Event.UNMET: _LOSE}
_CONNECTED: Rules = {
    Event.WITHDRAW: Rule(State.DRAINING, Act.WITHDRAW),
    Event.WITHDRAWN: Rule(State.LEAVING, Act.YIELD),
    Event.FAULTY: _FAIL,
    Event.LATE: _FAIL,
    Event.CUT: _LOSE,
    Event.ANY: _FAIL,
}
_OVER: Table = {
    State.DRAINING: {
        Event.DRAINED: _END,
        Event.DONE: _END,  # it had all before it heard of the withdrawal
        Event.WITHDRAWN: Rule(State.LEAVING, Act.DRAIN),
        Event.FAULTY: _END,
        Event.LATE: _END,
        Event.CUT: _END,
        Event.ANY: Rule(State.DRAINING, Act.IGNORE),
    },
    State.LEAVING: {
        Event.FLUSHED: _END,
        Event.FAULTY: _END,
        Event.LATE: _END,
        Event.CUT: _END,
        Event.ANY: Rule(State.LEAVING, Act.IGNORE),
    },
    State.QUIET: {Event.ANY: Rule(State.QUIET, Act.IGNORE)},
}

SENDER: Table = {
    State.DIALLING: {Event.OPENED: Rule(State.OFFERING, Act.OFFER), **_ALONE},
    State.OFFERING: {Event.ACCEPT: Rule(State.SENDING, Act.BEGIN), **_CONNECTED},
    State.SENDING: {
        Event.SEND: Rule(State.SENDING, Act.SEND),
        Event.SEND_LAST: Rule(State.SETTLING, Act.SEND_LAST),
        Event.ACK: Rule(State.SENDING, Act.ACKED),
        **_CONNECTED,
    },
    State.SETTLING: {
        Event.ACK: Rule(State.SETTLING, Act.ACKED),
        Event.DONE: Rule(State.QUIET, Act.HANDED_OVER),
        **_CONNECTED,
    },
    **_OVER,
}

RECEIVER: Table = {
    State.EXPECTED: {
        Event.OFFER: Rule(State.OFFERED, Act.EXPECT),
        Event.IMPORT: Rule(State.PREPARED, Act.PREPARE),
        Event.FAULTY: _FAIL,  # of the offer that came
        **_UNMET,
        **_ALONE,
    },
    State.PREPARED: {
        Event.OFFER: Rule(State.RECEIVING, Act.ACCEPT),
        Event.FAULTY: _FAIL,
        **_UNMET,
        **_ALONE,
    },
    State.OFFERED: {Event.IMPORT: Rule(State.RECEIVING, Act.ACCEPT), **_CONNECTED},
    State.RECEIVING: {
        Event.PAGES: Rule(State.RECEIVING, Act.RECEIVE),
        Event.ARRIVED: Rule(State.RECEIVING, Act.ACK),
        Event.HAND_OVER: Rule(State.LEAVING, Act.COMPLETE),
        **_CONNECTED,
    },
    **_OVER,
}
