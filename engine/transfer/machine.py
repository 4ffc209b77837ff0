"""What both sides' machines share: events and orders in, effects out, by the table of states.py.

No sockets, no threads, no clock: the mover (mover.py) carries the effects out, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from engine.schedule.transfer_orders import (
    TransferFailed,
    TransferNews,
    TransferQuiet,
)
from engine.schedule.transfer_orders import Withdraw as WithdrawOrder
from engine.transfer.messages import CODE_CHARS, MESSAGE_CHARS, Drained, Message, Withdraw
from engine.transfer.states import Act, Event, State, Table


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a transfer fails. code: as in transfer_orders.TransferFailed."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Say:
    message: Message


@dataclass(frozen=True, slots=True)
class Tell:
    news: TransferNews


@dataclass(frozen=True, slots=True)
class Push:
    """Read these pages, put them into these places of the room, or behind the message where there
    are none, and say Pages."""

    first: int
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Take pages out of these places of the room, or from behind the message, into these pages.
    Then comes ARRIVED, if each is what its digest says, or FAULTY."""

    first: int
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]
    digests: tuple[bytes, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Touch no page any more, except to send what has begun to its end."""


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection, or cease to make one: from here on nothing is read or written."""


Effect = Say | Tell | Push | Receive | Stop | HangUp
Effects = list[Effect]


class Machine:
    """One side of one transfer."""

    table: ClassVar[Table]

    def __init__(self, transfer_id: bytes, state: State) -> None:
        self.transfer_id = transfer_id
        self.state = state
        self._acts: dict[Act, Callable[..., Effects | Fault]] = {
            Act.IGNORE: lambda _: [],
            Act.WITHDRAW: self._withdraw,
            Act.FAIL: self._fail,
            Act.YIELD: self._yield,
            Act.DRAIN: lambda _: [Say(Drained())],
            Act.LOSE: self._lose,
            Act.END: lambda _: self._end(),
        }

    def on(self, event: Event, value: object = None) -> Effects:
        """value: the order or message of the event; a Fault for FAULTY, UNMET, LATE, CUT."""
        rule = self.table[self.state].get(event)
        if rule is None:
            rule = self.table[self.state][Event.ANY]
            if not isinstance(value, Fault):
                found = f"{event.value}: found in state {self.state.name}, where none is allowed"
                value = Fault("transfer_corrupt", found)
        done = self._acts[rule.act](value)
        if isinstance(done, Fault):
            return self.on(Event.FAULTY, done)
        self.state = rule.then
        return done

    def _withdraw(self, order: WithdrawOrder) -> Effects:
        return [Stop(), Say(_withdraw_of(order.code, order.message))]

    def _fail(self, fault: Fault) -> Effects:
        return [Stop(), Say(_withdraw_of(fault.code, fault.message)), *self._failed(fault)]

    def _yield(self, withdraw: Withdraw) -> Effects:
        fault = Fault(withdraw.code, withdraw.message)
        return [Stop(), Say(Drained()), *self._failed(fault)]

    def _lose(self, fault: Fault) -> Effects:
        return [Stop(), HangUp(), *self._failed(fault), Tell(TransferQuiet(self.transfer_id))]

    def _end(self) -> Effects:
        return [Stop(), HangUp(), Tell(TransferQuiet(self.transfer_id))]

    def _failed(self, fault: Fault) -> Effects:
        return [Tell(TransferFailed(self.transfer_id, fault.code, fault.message))]


def _withdraw_of(code: str, message: str) -> Withdraw:
    return Withdraw(code[:CODE_CHARS], message[:MESSAGE_CHARS])
