"""Two schedulers on ArenaRunners, and a network between them that does what a test says.

Nothing moves by itself: a test connects transfers, lets pages pass, breaks what is under way and
says which news a side hears next. Until a side is quiet its network still scribbles on pages that
have not arrived, and looks whether those that it was given to read are still what they were; so a
page that was let go of too early shows.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from engine.schedule.events import SequenceEvent
from engine.schedule.sequence import NewSequence
from engine.schedule.transfer_orders import (
    Accepted,
    Acked,
    Arrived,
    Expect,
    Export,
    HandedOver,
    HandOver,
    Import,
    Offered,
    Received,
    Send,
    TransferFailed,
    TransferNews,
    TransferQuiet,
    Withdraw,
)
from policies.contract.wire import Role, Sampling, Transfer
from tests.engine.scheduler_bench import ROOT, Bench

GARBAGE = -7


@dataclass(eq=False)
class Half:
    """What one side's mover knows of a transfer."""

    side: Bench
    export: Export | None = None
    order: Import | None = None  # of who expects it
    given: dict[int, tuple[int, int]] = field(default_factory=dict)  # position → page, generation
    last: HandOver | None = None
    expect: Expect | None = None
    is_offered: bool = False
    position: int | None = None  # of the next page; None: not accepted
    withdrawn: Withdraw | None = None
    is_over: bool = False  # it was told Quiet, or will be as soon as it hears its news
    news: deque[TransferNews] = field(default_factory=deque)  # that its side has not heard

    def fail(self, code: str, message: str) -> None:
        if not self.is_over:
            self.news.append(TransferFailed(b"", code, message))
            self.end()

    def end(self) -> None:
        self.is_over = True
        self.news.append(TransferQuiet(b""))


class Network:
    def __init__(self, *sides: Bench) -> None:
        self.sides = sides
        self.halves: dict[tuple[bytes, Bench], Half] = {}
        self.heard: list[tuple[Bench, bytes, TransferNews]] = []
        self.moved = 0  # pages

    def gather(self) -> None:
        """Take the orders that both sides have given."""
        for side in self.sides:
            for order in side.scheduler.transfers.take_orders():
                key = order.transfer_id, side
                known = key in self.halves
                half = self.halves.setdefault(key, Half(side))
                match order:
                    case Export():
                        assert not known, "an id is used twice"
                        half.export = order
                    case Expect():
                        assert not known, "an id is used twice"
                        half.expect = order
                    case Import():
                        assert half.order is None
                        assert order.page_ids
                        half.order = order
                    case Send(first=first):
                        assert half.last is None
                        if not half.is_over:
                            assert first == half.position or first == max(half.given) + 1
                        pages = zip(order.page_ids, order.generations, strict=True)
                        half.given.update(enumerate(pages, first))
                    case HandOver():
                        assert half.export is not None
                        assert half.last is None
                        half.last = order
                        pages = zip(order.page_ids, order.generations, strict=True)
                        half.given.update(enumerate(pages, len(half.export.keys)))
                    case Withdraw():
                        half.withdrawn = half.withdrawn or order

    # --- what may happen ------------------------------------------------------------------------

    def peer(self, half_key: tuple[bytes, Bench]) -> Half | None:
        transfer_id, side = half_key
        (other,) = [one for one in self.sides if one is not side]
        return self.halves.get((transfer_id, other))

    def live(self) -> list[tuple[bytes, Bench]]:
        """Halves with something that could happen to them."""
        self.gather()
        return [key for key, half in self.halves.items() if not half.is_over or half.news]

    def unmet(self) -> list[Half]:
        """Those that were told that a peer would come at once, to which none has connected."""
        return [
            self.halves[key]
            for key in self.live()
            if (half := self.halves[key]).expect is not None
            and half.expect.is_asked
            and not half.is_over
            and half.withdrawn is None
            and not half.is_offered
            and ((peer := self.peer(key)) is None or peer.position is None)
        ]

    def hear(self, key: tuple[bytes, Bench], *, twice: bool = False) -> bool:
        """A side is told its next news of a transfer."""
        half = self.halves[key]
        if not half.news:
            return False
        told = half.news.popleft()
        news = type(told)(key[0], *[getattr(told, name) for name in told.__slots__[1:]])
        side = half.side
        if isinstance(news, Arrived):  # the tags of what arrived are written first
            assert half.order is not None
            for at in range(news.first, news.first + news.count):
                page = half.order.page_ids[at - half.order.first]
                side.runner.tags[page] = half.order.generations[at - half.order.first]
        for _ in range(1 + twice):
            side.events += side.scheduler.take(news, side.now)
            side.scheduler.invariants()
        self.heard.append((side, key[0], news))
        return True

    def advance(self, key: tuple[bytes, Bench], pages: int = 1 << 30) -> bool:
        """The next thing that goes well with a transfer, seen from one of its sides; whether there
        was one."""
        half, other = self.halves[key], self.peer(key)
        if half.is_over:
            return False
        if half.withdrawn is not None:  # heard by the peer, which then lets go
            if other is not None:
                other.fail(half.withdrawn.code, half.withdrawn.message)
            half.end()
            return True
        if half.export is None:
            return False
        if other is None or other.is_over:
            half.fail("transfer_refused", "peer: found no such id")
            return True
        if half.position is None:
            return self._connect(half, other)
        return self._move(half, other, pages)

    def _connect(self, half: Half, other: Half) -> bool:
        assert half.export is not None
        if other.order is None:
            if other.is_offered:
                return False
            other.is_offered = True
            other.news.append(Offered(b"", half.export.keys))
            return True
        order = other.order
        assert order.keys == half.export.keys[: len(order.keys)]
        half.position = order.first
        half.news.append(Accepted(b"", order.first))
        return True

    def _move(self, half: Half, other: Half, pages: int) -> bool:
        order = other.order
        assert order is not None
        assert half.position is not None
        stop = order.first + len(order.page_ids)
        ready = 0
        while ready < pages and half.position + ready < stop:
            at = half.position + ready
            if at not in half.given:
                break
            page, generation = half.given[at]
            if half.side.runner.tags[page] != generation:
                self.break_(half, other, "transfer_corrupt")
                return True
            target = order.page_ids[at - order.first]
            other.side.runner.arena[target] = list(half.side.runner.arena[page])
            ready += 1
        if ready:
            other.news.append(Arrived(b"", half.position, ready))
            half.news.append(Acked(b"", half.position, ready))
            half.position += ready
            self.moved += ready
            return True
        if half.last is None or half.position < stop:
            return False
        other.news.append(Received(b"", half.last.handover))
        other.end()
        half.news.append(HandedOver(b""))
        half.end()
        return True

    def break_(self, half: Half, other: Half | None, code: str) -> None:
        half.fail(code, "it broke")
        if other is not None:
            other.fail(code, "it broke")

    def meddle(self) -> None:
        """What is under way is still at it."""
        for half in self.halves.values():
            if half.is_over and not half.news:
                continue
            runner, pool = half.side.runner, half.side.scheduler.pool
            for page, generation in half.given.values():
                assert pool.generations[page] == generation, "given away while it is read"
            order = half.order
            if order is not None and not half.is_over:
                other = self.peer((order.transfer_id, half.side))
                done = order.first if other is None else other.position or order.first
                for page in order.page_ids[done - order.first :]:
                    runner.arena[page] = [GARBAGE] * runner.page_size

    def settle(self) -> bool:
        """All that can go well does, and is heard; whether there was anything."""
        count = 0
        while any([self.advance(key) or self.hear(key) for key in self.live()]):
            count += 1
            assert count < 10_000, "news without end"
        return count > 0


class SplitBench:
    """prefill and decode, the network between them, and what a gateway does."""

    def __init__(self, **limits: float) -> None:
        self.prefill, self.decode = Bench(**limits), Bench(**limits)
        self.network = Network(self.prefill, self.decode)
        self._ids = 0

    def transfer(self, *, returns: bool = False) -> Transfer:
        self._ids += 1
        name = self._ids.to_bytes(15)
        home = (b"r" + name, b"R" * 32) if returns else (b"", b"")
        return Transfer(b"t" + name, b"S" * 32, "peer:1", *home)

    def submit(
        self,
        sequence_id: int,
        prompt: array[int],
        *,
        max_tokens: int = 4,
        returns: bool = False,
        deadline: float | None = None,
        **asked: object,
    ) -> Transfer:
        """One prompt to both, as a gateway does it."""
        transfer = self.transfer(returns=returns)
        sampling = Sampling(max_tokens, **asked)  # type: ignore[arg-type]
        for side, role in self.roles():
            new = NewSequence(
                sequence_id,
                prompt,
                ROOT,
                sampling,
                deadline,
                owner=ROOT[:16],
                role=role,
                transfer=transfer,
            )
            side.scheduler.submit(new, side.now)
            side.runner.begin(sequence_id, prompt)
        return transfer

    def roles(self) -> tuple[tuple[Bench, Role], ...]:
        return (self.decode, "decode"), (self.prefill, "prefill")

    def run(self) -> None:
        """Until nothing happens any more."""
        for _ in range(2000):
            moved = self.network.settle()
            planned = [side.step() for side in (self.prefill, self.decode)]
            if not moved and planned == [None, None] and not self.network.settle():
                return
        raise AssertionError("it never came to rest")

    def rest(self) -> None:
        """Run to the end; then nothing is held on either side."""
        self.run()
        for side in (self.prefill, self.decode):
            assert not side.scheduler.has_work
            assert side.scheduler.pool.num_held == 0
            assert side.scheduler.transfers.is_idle

    def ends(self, sequence_id: int) -> tuple[SequenceEvent, SequenceEvent]:
        """Of prefill and of decode."""
        return self.prefill.end(sequence_id), self.decode.end(sequence_id)
