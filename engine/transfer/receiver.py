"""The side that lacks pages: says from which on, writes each into its place, and has all or fails.

A page is written only while its transfer is in state RECEIVING, and only once.
"""

from __future__ import annotations

from engine.schedule.transfer_orders import Arrived, Expect, Import, Offered, Received
from engine.store.page_codec import PageLayout
from engine.transfer.forms import form_of, misfit, travels_as
from engine.transfer.machine import Effects, Fault, Machine, Receive, Say, Tell
from engine.transfer.messages import Accept, Ack, Done, HandOver, Offer, Pages
from engine.transfer.states import RECEIVER, Act, State


class Receiver(Machine):
    table = RECEIVER

    def __init__(self, order: Expect | Import, layout: PageLayout) -> None:
        is_import = isinstance(order, Import)
        super().__init__(order.transfer_id, State.PREPARED if is_import else State.EXPECTED)
        self.layout = layout
        self.travels = layout  # known once there is an offer
        self.offer: Offer | None = None
        self._import = order if isinstance(order, Import) else None
        self._next = 0  # position of the page that is to come
        self._stop = 0
        self._arriving: Receive | None = None
        self._acts |= {
            Act.EXPECT: self._expect,
            Act.PREPARE: self._prepare,
            Act.ACCEPT: self._accept,
            Act.RECEIVE: self._receive,
            Act.ACK: self._ack,
            Act.COMPLETE: self._complete,
        }

    def _expect(self, offer: Offer) -> Effects | Fault:
        self.offer = offer
        return self._misfit() or [Tell(Offered(self.transfer_id, offer.keys))]

    def _prepare(self, order: Import) -> Effects:
        self._import = order
        return []

    def _accept(self, value: Offer | Import) -> Effects | Fault:
        if isinstance(value, Import):
            self._import = value
        else:
            self.offer = value
        order, offer = self._import, self.offer
        assert order is not None
        assert offer is not None
        if fault := self._misfit():
            return fault
        whole = order.num_tokens == offer.num_tokens
        if order.keys != offer.keys[: len(order.keys)] or (
            not whole and order.num_tokens > len(order.keys) * self.layout.page_size
        ):
            return Fault(
                "transfer_refused",
                f"offer: found {len(offer.keys)} keys of {offer.num_tokens} tokens, allowed the "
                f"chain of {len(order.keys)} of {order.num_tokens}; submit one prompt to both",
            )
        self._next, self._stop = order.first, order.first + len(order.page_ids)
        self.travels = travels_as(offer.form.layout, self.layout)
        return [Say(Accept(self._next, self._stop, form_of(self.layout)))]

    def _misfit(self) -> Fault | None:
        assert self.offer is not None
        reason = misfit(form_of(self.layout), self.offer.form)
        return None if reason is None else Fault("transfer_layout", reason)

    def _receive(self, pages: Pages) -> Effects | Fault:
        order, count = self._import, len(pages.digests)
        assert order is not None
        if (
            self._arriving is not None
            or pages.first != self._next
            or pages.first + count > self._stop
        ):
            return Fault(
                "transfer_corrupt",
                f"Pages: found {count} from {pages.first}, allowed {self._next} to {self._stop}, "
                f"one run after the other",
            )
        here = slice(pages.first - order.first, pages.first - order.first + count)
        self._arriving = Receive(
            pages.first,
            order.page_ids[here],
            order.generations[here],
            pages.digests,
            pages.places,
        )
        return [self._arriving]

    def _ack(self, arrived: Arrived) -> Effects:
        self._arriving = None
        self._next += arrived.count
        return [Tell(arrived), Say(Ack(arrived.first, arrived.count))]

    def _complete(self, message: HandOver) -> Effects | Fault:
        order, offer = self._import, self.offer
        assert order is not None
        assert offer is not None
        num_pages = -(-offer.num_tokens // self.layout.page_size)
        is_short = message.handover is not None and self._stop < num_pages
        if self._arriving is not None or self._next < self._stop or is_short:
            return Fault(
                "transfer_corrupt",
                f"HandOver: found behind page {self._next}, allowed behind {self._stop}, and with "
                f"a token behind {num_pages}",
            )
        return [Tell(Received(self.transfer_id, message.handover)), Say(Done())]
