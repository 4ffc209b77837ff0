"""Moves pages between engines: carries out the orders of a split's books, tells what came of it.

    engine loop ──give──▶ mover's thread: sides ◀──▶ channels ◀──▶ peers' movers
         ▲                        │
         └──take── news ◀─────────┘

One thread owns all sockets and all that is read and written of pages; none of them blocks it. So
what a machine says is true when it is said: after TransferQuiet nothing touches a page. A transfer
has a connection of its own, which the sender of the pages makes.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import assert_never

from engine.schedule.transfer_orders import (
    Expect,
    Export,
    HandOver,
    Import,
    Send,
    TransferFailed,
    TransferNews,
    TransferOrder,
    TransferQuiet,
    Withdraw,
)
from engine.store.page_codec import PageLayout
from engine.store.tiered import PageMemory
from engine.transfer.channel import Broken, Channel, Owner
from engine.transfer.doorstep import Parting, Stranger
from engine.transfer.incoming import Incoming
from engine.transfer.machine import Fault
from engine.transfer.outgoing import Outgoing
from engine.transfer.rooms import WAYS, Way
from engine.transfer.shared_room import SharedRooms
from engine.transfer.side import Side, Site
from engine.transfer.staging import TransferEngine
from engine.transfer.states import Event

TICK_S = 0.05  # how late a deadline may be found
IDLE_S = 0.5  # while transfers are only expected
MAX_STRANGERS = 64  # then the one that has been there longest goes
MAX_PARTING = 64  # then a last word may be lost
_BACKLOG = 128
_REMEMBERED = 1 << 14  # ids that were used


_Job = tuple[Side, Callable[[], None]]


class TransferMover:
    def __init__(
        self,
        memory: PageMemory,
        layout: PageLayout,
        *,
        listen: tuple[str, int] | None,
        ways: tuple[Way, ...] = WAYS["auto"],
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """memory: this thread's own. listen: address and port, 0 for a free one; None: nobody can
        bring pages. ways: of rooms.WAYS. wake: called from another thread when there is something
        to take. clock: that of the orders' deadlines. Raises OSError where the address cannot be
        listened on, or Mooncake does not start; ConfigError where it is not installed."""
        self.wake = wake
        self._memory = memory
        self._clock = clock
        self._site = Site(
            memory,
            layout,
            ways,
            clock,
            tell=self._tell,
            watch=self._watch,
            part=self._part,
            call=self._call,
            shared_rooms=SharedRooms(),
            engine=TransferEngine(_host_of(listen)) if "mooncake" in ways else None,
        )
        self._news: deque[tuple[TransferNews, list[tuple[int, int]]]] = deque()
        self._inbox: deque[TransferOrder | _Job | None] = deque()
        self._outgoing: dict[bytes, Outgoing] = {}
        self._incoming: dict[bytes, Incoming] = {}
        self._used: OrderedDict[bytes, type[TransferOrder]] = OrderedDict()
        self._watched: dict[Channel, int] = {}  # → what the selector waits for; oldest first
        self._is_deaf = False  # to who would connect
        self._ends_at: float | None = None  # once it closes
        self._close_s = 0.0
        self._listener = None if listen is None else _listen(listen)
        self._bell, self._ringer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for waited in (self._bell, self._listener):
            if waited is not None:
                waited.setblocking(False)
                self._selector.register(waited, selectors.EVENT_READ)
        self._ringer.setblocking(False)
        self.address = ""
        if self._listener is not None:
            host, port = self._listener.getsockname()[:2]
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._mover = threading.Thread(target=self._run, name="transfer-mover", daemon=True)
        self._mover.start()

    def give(self, orders: Iterable[TransferOrder]) -> None:
        self._inbox.extend(orders)
        self._ring()

    def take(self) -> list[TransferNews]:
        """What happened since the last call; the tags of pages that arrived are written by now."""
        taken: list[TransferNews] = []
        while self._news:
            news, assigned = self._news.popleft()
            if assigned:
                self._memory.assign(assigned)
            taken.append(news)
        return taken

    def close(self, within_s: float) -> None:
        """Withdraw what is under way and end the thread; what has no answer by then is cut."""
        self._close_s = within_s
        self._inbox.append(None)
        self._ring()
        self._mover.join(within_s + 1.0)

    def _ring(self) -> None:
        with suppress(OSError):  # full: it is awake; closed: nobody cares any more
            self._ringer.send(b"\0")

    # --- the mover's own ------------------------------------------------------------------------

    def _run(self) -> None:
        ticked_at = self._clock()
        while self._ends_at is None or (self._has_transfers and ticked_at < self._ends_at):
            ready = self._selector.select(self._patience_s())
            now = self._clock()  # who has said nothing by now: what comes meanwhile is read first
            for key, events in ready:
                if key.fileobj is self._bell:
                    self._bell.recv(1 << 12)
                elif key.fileobj is self._listener:
                    self._accept(self._listener)
                else:
                    self._serve(key.data, events)
            while self._inbox:
                self._take_in(self._inbox.popleft())
            if now - ticked_at >= TICK_S:
                ticked_at = now
                self._tick(now)
        self._end()

    def _patience_s(self) -> float | None:
        """How long to wait for something to happen."""
        if self._watched or self._outgoing or self._is_deaf:
            return TICK_S
        return IDLE_S if self._incoming else None

    @property
    def _has_transfers(self) -> bool:
        return bool(self._outgoing or self._incoming)

    def _end(self) -> None:
        ending = Fault("transfer_lost", "engine: found ending")
        for side in (*self._outgoing.values(), *self._incoming.values()):
            self._try(side, lambda side=side: side.feed(Event.CUT, ending))  # type: ignore[misc]
        for channel in list(self._watched):
            self._drop(channel)
        for left in (self._listener, self._bell, self._ringer):
            if left is not None:
                left.close()
        self._selector.close()
        self._site.shared_rooms.close()

    def _call(self, side: Side, act: Callable[[], None]) -> None:
        self._inbox.append((side, act))
        self._ring()

    def _take_in(self, order: TransferOrder | _Job | None) -> None:
        match order:
            case (side, act):
                self._act(side, act)
            case None:
                self._ends_at = self._clock() + self._close_s
                for side in (*self._outgoing.values(), *self._incoming.values()):
                    self._feed(side, Event.WITHDRAW, Withdraw(side.machine.transfer_id, "draining"))
            case Export():
                if self._is_new(order):
                    outgoing = Outgoing(self._site, order)
                    self._outgoing[order.transfer_id] = outgoing
                    self._act(outgoing, outgoing.dial)
            case Expect():
                if self._is_new(order):
                    self._incoming[order.transfer_id] = Incoming(self._site, order)
            case Import():
                expected = self._incoming.get(order.transfer_id)
                if expected is not None:
                    expected.deadline = order.deadline
                    self._feed(expected, Event.IMPORT, order)
                elif self._used.get(order.transfer_id) is Expect:
                    self._used[order.transfer_id] = Import  # its end is in the news by now
                elif self._is_new(order):
                    self._incoming[order.transfer_id] = Incoming(self._site, order)
            case Send():
                self._feed(self._outgoing.get(order.transfer_id), Event.SEND, order)
            case HandOver():
                self._feed(self._outgoing.get(order.transfer_id), Event.SEND_LAST, order)
            case Withdraw():
                for sides in (self._outgoing, self._incoming):
                    self._feed(sides.get(order.transfer_id), Event.WITHDRAW, order)
            case _:
                assert_never(order)

    def _is_new(self, order: Export | Expect | Import) -> bool:
        """An id is for one transfer: under a used one a recording of the first could come."""
        is_new = order.transfer_id not in self._used
        self._used[order.transfer_id] = type(order)
        if len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)
        if not is_new:
            message = "transfer_id: found one that was used, allowed a new one"
            self._tell(TransferFailed(order.transfer_id, "transfer_refused", message), [])
            self._tell(TransferQuiet(order.transfer_id), [])
        return is_new

    def _tell(self, news: TransferNews, assigned: list[tuple[int, int]]) -> None:
        if isinstance(news, TransferQuiet):
            self._outgoing.pop(news.transfer_id, None)
            self._incoming.pop(news.transfer_id, None)
        self._news.append((news, assigned))
        self.wake()

    # --- connections ----------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        strangers = [channel for channel in self._watched if isinstance(channel.owner, Stranger)]
        if len(strangers) >= MAX_STRANGERS:
            self._drop(strangers[0])
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: who waits does so until the next tick
            self._selector.unregister(listener)
            self._is_deaf = True
            return
        stranger = Stranger(
            connection, find=self._find, part=self._part, drop=self._drop, now=self._clock()
        )
        self._watch(stranger.channel)

    def _find(self, transfer_id: bytes) -> Incoming | None:
        """Who waits for a peer under this id. One that has come is the only one."""
        side = self._incoming.get(transfer_id)
        return side if side is not None and side.channel is None else None

    def _serve(self, channel: Channel, events: int) -> None:
        def act() -> None:
            now = self._clock()
            if events & selectors.EVENT_READ and channel.is_open:
                channel.receive(now)
            if channel.is_open:
                channel.owner.flush(now)

        self._try(channel, act)
        self._rearm(channel)

    def _feed(self, side: Side | None, event: Event, order: TransferOrder) -> None:
        """None: it has ended, and that is told."""
        if side is not None:
            self._act(side, lambda: side.feed(event, order))

    def _act(self, side: Side, act: Callable[[], None]) -> None:
        def act_and_flush() -> None:
            act()
            side.flush(self._clock())

        self._try(side, act_and_flush)
        if side.channel is not None:
            self._rearm(side.channel)

    def _tick(self, now: float) -> None:
        owners: list[Owner] = [*self._outgoing.values(), *self._incoming.values()]
        owners += [one.owner for one in self._watched if not isinstance(one.owner, Side)]
        for owner in owners:
            self._try(owner, lambda owner=owner: owner.tick(now))  # type: ignore[misc]
        for channel in list(self._watched):
            self._serve(channel, 0)
        if self._is_deaf and self._listener is not None:
            self._is_deaf = False
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _try(self, whose: Owner | Channel, act: Callable[[], None]) -> None:
        """Whatever goes wrong with one transfer or connection is its own affair."""
        try:
            act()
            return
        except Broken as broken:
            fault = broken.fault
        except Exception as error:  # such as no memory
            traceback.print_exc()
            fault = Fault("transfer_lost", f"mover: found {error!r}")
        owner = whose.owner if isinstance(whose, Channel) else whose  # now: a stranger is let in
        owner.cut(fault)

    def _watch(self, channel: Channel) -> None:
        self._watched[channel] = selectors.EVENT_READ
        self._selector.register(channel.socket, selectors.EVENT_READ, channel)
        self._rearm(channel)

    def _rearm(self, channel: Channel) -> None:
        """Wait until it can be written to only while there is something to write."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_more else 0)
        if self._watched.get(channel, wanted) != wanted:
            self._watched[channel] = wanted
            self._selector.modify(channel.socket, wanted, channel)

    def _part(self, channel: Channel) -> None:
        """What was said shall still arrive."""
        parting = sum(isinstance(other.owner, Parting) for other in self._watched)
        if channel.has_more or parting >= MAX_PARTING:
            self._drop(channel)
        elif channel.is_open:
            Parting(channel, self._drop, self._clock())

    def _drop(self, channel: Channel) -> None:
        if channel.is_open:
            del self._watched[channel]
            self._selector.unregister(channel.socket)
            channel.close()


def _host_of(listen: tuple[str, int] | None) -> str:
    return "127.0.0.1" if listen is None else listen[0]


def _listen(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=_BACKLOG)
