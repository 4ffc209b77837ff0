"""Both machines under hypothesis: whatever is lost, late, withdrawn or hostile, no byte is wrong.

A world of two engines' pages and of transfers between them, each over a connection of its own that
is written, read and cut at any time; in the hostile one messages also come twice, late, never or
with other pages, as if there were no seal. A page that is let go of is somebody else's at once, so
that a read or a write too late is caught.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schedule.transfer_orders import (
    Accepted,
    Acked,
    Arrived,
    Expect,
    Export,
    HandedOver,
    HandOver,
    Handover,
    Import,
    Offered,
    Received,
    Send,
    TransferFailed,
    TransferQuiet,
    Withdraw,
)
from engine.store.page_codec import PageLayout
from engine.transfer.machine import Effect, Fault, HangUp, Machine, Push, Receive, Say, Stop, Tell
from engine.transfer.messages import Accept, Pages
from engine.transfer.receiver import Receiver
from engine.transfer.sender import Granted, Sender
from engine.transfer.side import EVENT_OF
from engine.transfer.states import Event, State

LAYOUT = PageLayout("bf16", num_layers=1, num_kv_heads=1, page_size=16, head_dim=1)
CUT = Fault("transfer_lost", "cut")
LATE = Fault("transfer_timeout", "late")
UNMET = Fault("transfer_timeout", "nobody came")
NOBODY = b"somebody else's"


@dataclass(eq=False)
class End:
    """One side of one transfer: its machine, what it has said, and what its books would know."""

    machine: Machine
    contents: list[bytes]  # of this engine's pages; whose they are is their beginning
    pages: dict[int, int] = field(default_factory=dict)  # position → page, while it is held
    unsent: deque[tuple[Any, tuple[int, ...]]] = field(default_factory=deque)
    wire: deque[Any] = field(default_factory=deque)  # on the way to this end; CUT: nothing more
    arriving: deque[tuple[int, bytes]] = field(default_factory=deque)  # page, bytes
    receive: Receive | None = None
    is_open: bool = False
    news: list[Any] = field(default_factory=list)

    @property
    def is_quiet(self) -> bool:
        return self.machine.state is State.QUIET

    def let_go(self, positions: list[int]) -> None:
        for at in positions:
            self.contents[self.pages.pop(at)] = NOBODY

    def read(self, page: int) -> bytes:
        assert page in self.pages.values(), "a page is read that was let go of"
        return self.contents[page]


class Transfer:
    """Of num_tokens; a return hands nothing over. short: pages that the receiver has no place for.
    places: of the room; 0: there is none."""

    def __init__(
        self,
        at: int,
        *,
        num_tokens: int,
        first: int,
        short: int,
        places: int,
        is_return: bool,
        expects: bool,
    ) -> None:
        self.id = bytes([at]) * 16
        self.num_full = num_tokens // LAYOUT.page_size
        self.num_pages = self.num_full if is_return else -(-num_tokens // LAYOUT.page_size)
        self.num_tokens = self.num_full * LAYOUT.page_size if is_return else num_tokens
        self.first = min(first, self.num_pages)
        self.stop = max(self.first, self.num_pages - short)
        self.places = [NOBODY] * places
        self.handover = None if is_return else Handover(token=at)
        self.keys = tuple(bytes([at, page]) * 16 for page in range(self.num_full))
        self.is_connected = False
        self.given = self.first
        self.was_last_given = False
        export = Export(self.id, b"", "", self.keys, self.num_tokens, 0.0)
        pages = range(self.num_pages)
        self.sender = End(Sender(export, LAYOUT), [self.content(page) for page in pages])
        self.sender.pages = {page: page for page in pages}
        order = Expect(self.id, b"", 0.0) if expects else self.importing()
        self.receiver = End(Receiver(order, LAYOUT), [])
        if not expects:
            self.make_room()

    def content(self, position: int) -> bytes:
        return self.id + bytes([position])

    def importing(self) -> Import:
        count = self.stop - self.first
        is_part = self.handover is None and self.stop < self.num_pages
        return Import(
            self.id,
            b"",
            self.keys[: self.stop] if is_part else self.keys,
            self.stop * LAYOUT.page_size if is_part else self.num_tokens,
            self.first,
            tuple(range(count)),
            (1,) * count,
            0.0,
        )

    def make_room(self) -> None:
        self.receiver.contents = [self.id + b"?"] * (self.stop - self.first)
        self.receiver.pages = {at: at - self.first for at in range(self.first, self.stop)}

    def peer_of(self, end: End) -> End:
        return self.receiver if end is self.sender else self.sender

    # --- what a mover does ----------------------------------------------------------------------

    def feed(self, end: End, event: Event, value: object = None) -> None:
        for effect in end.machine.on(event, value):
            self.carry_out(end, effect)
        if end.machine.state is State.LEAVING and not end.unsent:
            self.feed(end, Event.FLUSHED)

    def carry_out(self, end: End, effect: Effect) -> None:
        match effect:
            case Say(message):
                assert end.is_open
                end.unsent.append((message, ()))
            case Push():
                pages = [end.read(page) for page in effect.page_ids]
                for place, page in zip(effect.places, pages, strict=False):
                    assert self.places[place] is NOBODY, "a place is filled before it was read"
                    self.places[place] = page
                message = Pages(effect.first, tuple(pages), effect.places)
                end.unsent.append((message, () if effect.places else effect.page_ids))
            case Receive():
                end.receive = effect
            case Stop():
                end.arriving.clear()
                end.receive = None
            case HangUp():
                if end.is_open:
                    end.is_open = False
                    end.unsent.clear()
                    end.wire.clear()
                    self.peer_of(end).wire.append(CUT)
            case Tell(news):
                end.news.append(news)
                self.told(end, news)

    def told(self, end: End, news: object) -> None:
        """What books make of it; and what may not be."""
        assert not any(isinstance(told, TransferQuiet) for told in end.news[:-1])
        match news:
            case Accepted(first=first):
                assert first == self.first
            case Acked(first=first, count=count):
                assert first == self.follows(end, Acked)
                end.let_go(list(range(first, first + count)))
            case Arrived(first=first, count=count):
                assert first == self.follows(end, Arrived)
                for at in range(first, first + count):
                    assert end.contents[end.pages[at]] == self.content(at)
            case Received(handover=handover):
                assert handover == self.handover
                assert handover is None or self.stop == self.num_pages
                for at, page in end.pages.items():
                    assert end.contents[page] == self.content(at)
            case HandedOver():
                assert any(isinstance(told, Received) for told in self.receiver.news)
            case TransferFailed():
                assert not any(isinstance(told, TransferFailed) for told in end.news[:-1])
            case TransferQuiet():
                end.let_go(list(end.pages))

    def follows(self, end: End, kind: type[Acked] | type[Arrived]) -> int:
        """Where the last of these news begins, if there is no gap."""
        before = [news.count for news in end.news[:-1] if isinstance(news, kind)]
        return self.first + sum(before)

    # --- what happens ---------------------------------------------------------------------------

    def connect(self) -> None:
        assert not self.is_connected
        self.is_connected = True
        if self.receiver.is_quiet or self.sender.is_quiet:
            self.feed(self.sender, Event.CUT, CUT)
        else:
            self.sender.is_open = self.receiver.is_open = True
            self.feed(self.sender, Event.OPENED)

    def flush(self, end: End) -> None:
        """One message goes out of reach; the pages behind it are read now."""
        message, page_ids = end.unsent.popleft()
        payload = tuple(end.read(page) for page in page_ids)
        if self.peer_of(end).is_open:
            self.peer_of(end).wire.append((message, payload))
        if end.machine.state is State.LEAVING and not end.unsent:
            self.feed(end, Event.FLUSHED)

    def hear(self, end: End) -> None:
        """The next message, once the pages of the last one are all in place."""
        found = end.wire.popleft()
        if found is CUT:
            end.is_open = False
            end.unsent.clear()
            self.feed(end, Event.CUT, CUT)
            return
        message, payload = found
        value = Granted(message, len(self.places)) if isinstance(message, Accept) else message
        self.feed(end, EVENT_OF[type(message)], value)
        if end.receive is not None and isinstance(message, Pages):
            if message.places:
                payload = tuple(self.places[place] for place in message.places)
                for place in message.places:
                    self.places[place] = NOBODY
            end.arriving.extend(zip(end.receive.page_ids, payload, strict=True))

    def write(self, end: End) -> None:
        """One more page; behind the last one they are believed or not."""
        page, content = end.arriving.popleft()
        assert page in end.pages.values(), "a page is written that was let go of"
        assert end.machine.state is State.RECEIVING
        end.contents[page] = content
        receive = end.receive
        if end.arriving or receive is None:
            return
        end.receive = None
        if [end.contents[page] for page in receive.page_ids] == list(receive.digests):
            self.feed(end, Event.ARRIVED, Arrived(self.id, receive.first, len(receive.page_ids)))
        else:
            self.feed(end, Event.FAULTY, Fault("transfer_corrupt", "other bytes"))

    def may_send(self) -> bool:
        is_accepted = any(isinstance(news, Accepted) for news in self.sender.news)
        return is_accepted and not self.sender.is_quiet and not self.was_last_given

    def send(self, count: int) -> None:
        """The books' next orders: some pages, and once these are all sealed the rest."""
        stop = min(self.given + count, self.num_full)
        if self.given < stop:
            pages = tuple(range(self.given, stop))
            self.feed(self.sender, Event.SEND, Send(self.id, self.given, pages, (1,) * len(pages)))
            self.given = stop
        else:
            self.was_last_given = True
            tail = tuple(range(max(self.first, self.num_full), self.num_pages))
            order = HandOver(self.id, tail, (1,) * len(tail), self.handover)
            self.feed(self.sender, Event.SEND_LAST, order)

    def may_import(self) -> bool:
        is_offered = any(isinstance(news, Offered) for news in self.receiver.news)
        state = self.receiver.machine.state
        return state is State.EXPECTED or (is_offered and state is State.OFFERED)

    def take_import(self) -> None:
        self.make_room()
        self.feed(self.receiver, Event.IMPORT, self.importing())

    def steps(self) -> list[Callable[[], None]]:
        """What may happen next of its own accord."""
        steps: list[Callable[[], None]] = []
        if not self.is_connected:
            steps.append(self.connect)
        if self.may_import():
            steps.append(self.take_import)
        if self.may_send():
            steps += [partial(self.send, 1), partial(self.send, 3)]
        for end in (self.sender, self.receiver):
            if end.unsent:
                steps.append(partial(self.flush, end))
            if end.arriving:
                steps.append(partial(self.write, end))
            elif end.wire:
                steps.append(partial(self.hear, end))
        return steps

    def ends_well(self) -> None:
        """Both come to their end with nothing held, whatever happened before."""
        while steps := self.steps():
            steps[-1]()
        for _ in range(2):  # what was lost on the way is not waited for for ever
            for end in (self.sender, self.receiver):
                if not end.is_quiet:
                    self.feed(end, Event.LATE, LATE)
                while steps := self.steps():
                    steps[-1]()
        for end in (self.sender, self.receiver):
            assert end.is_quiet
            assert end.news[-1] == TransferQuiet(self.id)
            assert not end.pages
            assert not end.unsent
            assert not end.arriving


class World:
    """Two transfers at once, and what happens to them."""

    def __init__(self, chance: random.Random, *, is_hostile: bool) -> None:
        self.chance = chance
        self.is_hostile = is_hostile
        self.transfers = [
            Transfer(
                at,
                num_tokens=chance.randint(1, 100),
                first=chance.randint(0, 2),
                short=chance.choice((0, 0, 0, 1, 2)),
                places=chance.randint(0, 3),
                is_return=chance.random() < 0.4,
                expects=chance.random() < 0.5,
            )
            for at in range(2)
        ]

    def run(self) -> None:
        for _ in range(self.chance.randint(10, 80)):
            steps = [step for transfer in self.transfers for step in transfer.steps()]
            is_arriving = any(transfer.receiver.arriving for transfer in self.transfers)
            if self.chance.random() < (0.2 if is_arriving else 0.03):
                self.disturb()
            elif self.is_hostile and self.chance.random() < 0.2:
                self.tamper()
            elif steps:
                self.chance.choice(steps)()
        for transfer in self.transfers:
            transfer.ends_well()

    def disturb(self) -> None:
        transfer = self.chance.choice(self.transfers)
        end = self.chance.choice((transfer.sender, transfer.receiver))
        match self.chance.choice(("withdraw", "withdraw", "late", "unmet", "silence", "cut")):
            case "withdraw":
                transfer.feed(end, Event.WITHDRAW, Withdraw(transfer.id))
            case "late":
                transfer.feed(end, Event.LATE, LATE)
            case "unmet" if not transfer.is_connected and not transfer.receiver.is_quiet:
                transfer.feed(transfer.receiver, Event.UNMET, UNMET)
                assert transfer.receiver.is_quiet
            case "silence" if end.is_open:  # whatever is still on its way
                transfer.feed(end, Event.CUT, CUT)
            case "cut" if end.is_open:
                end.wire = deque([*list(end.wire)[: self.chance.randint(0, 2)], CUT])

    def tamper(self) -> None:
        """As if there were no seal: what comes was once said by the peer, and no more is sure."""
        ends = [end for one in self.transfers for end in (one.sender, one.receiver) if end.wire]
        end = self.chance.choice(ends) if ends else None
        if end is None or CUT in end.wire:
            return
        at = self.chance.randrange(len(end.wire))
        message, payload = end.wire[at]
        match self.chance.choice(("repeat", "lose", "move", "other pages")):
            case "repeat":
                end.wire.append((message, payload))
            case "lose":
                del end.wire[at]
            case "move":
                del end.wire[at]
                end.wire.appendleft((message, payload))
            case "other pages":
                end.wire[at] = message, tuple(page + b"!" for page in payload)


@pytest.mark.parametrize("is_hostile", [False, True], ids=["honest", "hostile"])
@settings(max_examples=250, deadline=None)
@given(seed=st.integers(0, 1 << 60))
def test_no_wrong_byte_and_every_transfer_ends_quiet(seed: int, is_hostile: bool) -> None:
    World(random.Random(seed), is_hostile=is_hostile).run()


@pytest.mark.slow
@pytest.mark.parametrize("is_hostile", [False, True], ids=["honest", "hostile"])
def test_no_wrong_byte_in_many_runs(is_hostile: bool) -> None:
    for seed in range(20_000):
        try:
            World(random.Random(seed), is_hostile=is_hostile).run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
