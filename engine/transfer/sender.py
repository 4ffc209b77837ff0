"""The side that has pages: offers them, sends them as they seal, and hands over what else it has.

Credit is pages that were said and are not acknowledged: as many as the room has places, or as
INLINE_BYTES make where pages follow their message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.schedule.transfer_orders import (
    Accepted,
    Acked,
    Export,
    HandedOver,
    HandOver,
    Send,
    TransferQuiet,
)
from engine.store.page_codec import PageLayout
from engine.transfer.forms import form_of, misfit, travels_as
from engine.transfer.machine import Effects, Fault, HangUp, Machine, Push, Say, Stop, Tell
from engine.transfer.messages import MAX_RUN, Accept, Ack, Offer
from engine.transfer.messages import HandOver as HandOverMessage
from engine.transfer.seal import DIGESTS
from engine.transfer.states import SENDER, Act, State

INLINE_BYTES = 8 << 20
RUNS = 2  # one travels while the next is made ready


@dataclass(frozen=True, slots=True)
class Granted:
    """An Accept, and how many places of its room are in reach; 0: pages follow their message."""

    accept: Accept
    places: int


class Sender(Machine):
    table = SENDER

    def __init__(self, export: Export, layout: PageLayout, ways: tuple[str, ...] = ()) -> None:
        super().__init__(export.transfer_id, State.DIALLING)
        self.layout = layout
        self.travels = layout  # known once the peer has accepted
        self._export = export
        self._ways = ways
        self._num_pages = -(-export.num_tokens // layout.page_size)
        self._stop = 0
        self._given = 0  # the position behind the last page that was given
        self._acked = 0
        self._waiting: deque[tuple[int, int, int]] = deque()  # position, page id, generation
        self._in_flight: deque[tuple[int, int | None]] = deque()  # position, its place
        self._places: deque[int | None] = deque()  # credit: None where there is no room
        self._run = 1
        self._last: HandOver | None = None
        self._is_said = False
        self._acts |= {
            Act.OFFER: lambda _: self._offer(),
            Act.BEGIN: self._begin,
            Act.SEND: self._send,
            Act.SEND_LAST: self._send_last,
            Act.ACKED: self._ack,
            Act.HANDED_OVER: lambda _: self._hand_over(),
        }

    def _offer(self) -> Effects:
        export, form = self._export, form_of(self.layout)
        return [Say(Offer(export.keys, export.num_tokens, form, self._ways, DIGESTS))]

    def _begin(self, granted: Granted) -> Effects | Fault:
        accept = granted.accept
        if reason := misfit(form_of(self.layout), accept.form):
            return Fault("transfer_layout", reason)
        if not accept.first <= accept.stop <= self._num_pages:
            return Fault(
                "transfer_corrupt",
                f"Accept: found pages {accept.first} to {accept.stop}, allowed 0 to "
                f"{self._num_pages}",
            )
        self.travels = travels_as(self.layout, accept.form.layout)
        if granted.places:
            self._places.extend(range(granted.places))
        else:
            self._places.extend([None] * max(RUNS, INLINE_BYTES // self.travels.page_bytes))
        self._run = min(MAX_RUN, max(1, len(self._places) // RUNS))
        self._given = self._acked = accept.first
        self._stop = accept.stop
        return [Tell(Accepted(self.transfer_id, accept.first))]

    def _send(self, order: Send) -> Effects | Fault:
        return self._give(order.first, order.page_ids, order.generations) or self._advance()

    def _send_last(self, order: HandOver) -> Effects | Fault:
        self._last = order
        fault = self._give(self._given, order.page_ids, order.generations)
        if fault is None and order.handover is not None and self._given < self._num_pages:
            fault = Fault(
                "transfer_corrupt",
                f"HandOver: found {self._given} pages given, allowed {self._num_pages}",
            )
        return fault or self._advance()

    def _give(
        self, first: int, page_ids: tuple[int, ...], generations: tuple[int, ...]
    ) -> Fault | None:
        if first != self._given:
            return Fault("transfer_corrupt", f"Send: found {first}, allowed {self._given}")
        pages = zip(page_ids, generations, strict=True)
        for at, (page_id, generation) in enumerate(pages, first):
            if at < self._stop:  # what is behind has no place at the peer
                self._waiting.append((at, page_id, generation))
        self._given += len(page_ids)
        return None

    def _advance(self) -> Effects:
        """What there is credit for, in runs; behind the last page the rest."""
        effects: Effects = []
        while self._waiting and self._places:
            size = min(len(self._waiting), len(self._places), self._run)
            run = [self._waiting.popleft() for _ in range(size)]
            places = [self._places.popleft() for _ in run]
            self._in_flight.extend(
                (at, place) for (at, _, _), place in zip(run, places, strict=True)
            )
            effects.append(
                Push(
                    run[0][0],
                    tuple(page_id for _, page_id, _ in run),
                    tuple(generation for _, _, generation in run),
                    tuple(place for place in places if place is not None),
                )
            )
        if self._last is not None and not self._waiting and not self._is_said:
            self._is_said = True
            effects.append(Say(HandOverMessage(self._last.handover)))
        return effects

    def _ack(self, ack: Ack) -> Effects | Fault:
        if ack.first != self._acked or not 0 < ack.count <= len(self._in_flight):
            return Fault(
                "transfer_corrupt",
                f"Ack: found {ack.count} from {ack.first}, allowed up to {len(self._in_flight)} "
                f"from {self._acked}",
            )
        self._acked += ack.count
        self._places.extend(self._in_flight.popleft()[1] for _ in range(ack.count))
        return [Tell(Acked(self.transfer_id, ack.first, ack.count)), *self._advance()]

    def _hand_over(self) -> Effects | Fault:
        if not self._is_said or self._in_flight:
            return Fault("transfer_corrupt", "Done: found before all was said and acknowledged")
        return [
            Tell(HandedOver(self.transfer_id)),
            Stop(),
            HangUp(),
            Tell(TransferQuiet(self.transfer_id)),
        ]
