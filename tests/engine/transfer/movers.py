"""Two real movers in one process, each over pages of its own, and what a test asks of them."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np

from engine.schedule.transfer_orders import (
    Accepted,
    Acked,
    Arrived,
    Export,
    HandOver,
    Handover,
    Import,
    Send,
    TransferFailed,
    TransferNews,
    TransferQuiet,
)
from engine.store.page_codec import PageLayout
from engine.transfer.mover import TransferMover

LAYOUT = PageLayout("bf16", num_layers=2, num_kv_heads=2, page_size=16, head_dim=8)
PATIENCE_S = 20.0
HANDOVER = Handover(token=7, cached_tokens=16)


class Pages:
    """A PageMemory of plain memory; it counts the views that are out, and knows who has been let go
    of: to touch such a page is an error."""

    def __init__(self, layout: PageLayout, num_pages: int, seed: int = 0) -> None:
        self.page_bytes = layout.page_bytes
        self.bytes = memoryview(bytearray(num_pages * self.page_bytes))
        chance = np.random.default_rng(seed)
        if layout.precision == "bf16":
            bits = chance.integers(0, 0x4100, len(self.bytes) // 2, np.uint16)  # 0 to 8
            self.bytes[:] = bits.tobytes()
        else:
            self.bytes[:] = chance.integers(0, 100, len(self.bytes), np.uint8).tobytes()
        self.tags = [1] * num_pages
        self.lent = 0

    def page(self, page_id: int) -> memoryview:
        return self.bytes[page_id * self.page_bytes : (page_id + 1) * self.page_bytes]

    def generation(self, page_id: int) -> int:
        return self.tags[page_id]

    def assign(self, assigned: Sequence[tuple[int, int]]) -> None:
        for page_id, generation in assigned:
            self.tags[page_id] = generation

    def outgoing(self, page_ids: Sequence[int]) -> list[memoryview]:
        self.lent += len(page_ids)
        return [self.page(page_id) for page_id in page_ids]

    incoming = outgoing

    def arrive(self, page_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        """The views are the pages."""

    def free(self, views: Sequence[memoryview]) -> None:
        self.lent -= len(views)


class Station:
    """A mover and what it has told."""

    def __init__(
        self,
        layout: PageLayout = LAYOUT,
        *,
        num_pages: int = 32,
        seed: int = 0,
        ways: tuple[str, ...] = ("shm",),
        listen: tuple[str, int] | None = ("127.0.0.1", 0),
    ) -> None:
        self.layout = layout
        self.pages = Pages(layout, num_pages, seed)
        self.mover = TransferMover(self.pages, layout, listen=listen, ways=ways)
        self.news: list[TransferNews] = []
        self._by_id: defaultdict[bytes, list[TransferNews]] = defaultdict(list)

    def give(self, *orders: object) -> None:
        self.mover.give(orders)  # type: ignore[arg-type]

    def poll(self) -> list[TransferNews]:
        for news in self.mover.take():
            self.news.append(news)
            self._by_id[news.transfer_id].append(news)
        return self.news

    def of(self, transfer_id: bytes) -> list[TransferNews]:
        self.poll()
        return self._by_id[transfer_id]

    def failure(self, transfer_id: bytes) -> TransferFailed | None:
        found = [news for news in self.of(transfer_id) if isinstance(news, TransferFailed)]
        assert len(found) < 2
        return found[0] if found else None


def until(
    holds: Callable[[], object],
    within_s: float = PATIENCE_S,
    told: Callable[[], object] = lambda: "",
) -> None:
    """told: what to say beside that it did not come about."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come about {told()}"
        time.sleep(0.002)


def chain(num_pages: int, seed: int = 0) -> tuple[bytes, ...]:
    return tuple(sha256(b"%d %d" % (seed, at)).digest() for at in range(num_pages))


class Split:
    """One transfer of num_tokens from one side to the other, pages in a row from page 0 of the
    sender to `into` of the receiver."""

    def __init__(
        self,
        sender: Station,
        receiver: Station,
        *,
        num_tokens: int = 70,
        first: int = 1,
        into: int = 8,
        within_s: float = 15.0,
    ) -> None:
        self.sender, self.receiver = sender, receiver
        self.id, self.secret = os.urandom(16), os.urandom(32)
        self.num_tokens, self.first, self.into = num_tokens, first, into
        self.num_full = num_tokens // LAYOUT.page_size
        self.num_pages = -(-num_tokens // LAYOUT.page_size)
        self.keys = chain(self.num_full)
        self.deadline = time.monotonic() + within_s
        self.address = receiver.mover.address

    @property
    def export(self) -> Export:
        return Export(self.id, self.secret, self.address, self.keys, self.num_tokens, self.deadline)

    @property
    def imported(self) -> Import:
        count = self.num_pages - self.first
        return Import(
            self.id,
            self.secret,
            self.keys,
            self.num_tokens,
            self.first,
            tuple(range(self.into, self.into + count)),
            (9,) * count,
            self.deadline,
        )

    def send(self, first: int, stop: int) -> Send:
        return Send(self.id, first, tuple(range(first, stop)), (1,) * (stop - first))

    @property
    def last(self) -> HandOver:
        tail = tuple(range(self.num_full, self.num_pages))
        return HandOver(self.id, tail, (1,) * len(tail), HANDOVER)

    def send_all(self) -> None:
        """As the sender's books do, once they know what the receiver lacks."""
        until(
            lambda: any(isinstance(news, Accepted) for news in self.sender.of(self.id)),
            told=lambda: (self.sender.of(self.id), self.receiver.of(self.id)),
        )
        self.sender.give(self.send(self.first, self.num_full), self.last)

    def run(self) -> None:
        self.receiver.give(self.imported)
        self.sender.give(self.export)
        self.send_all()
        self.wait_quiet()

    def wait_quiet(self, *sides: Station, within_s: float = PATIENCE_S) -> None:
        """Each side tells it once, as its last word; then no view is out."""
        quiet = TransferQuiet(self.id)
        for side in sides or (self.sender, self.receiver):
            until(lambda side=side: quiet in side.of(self.id), within_s)  # type: ignore[misc]
            told = side.of(self.id)
            assert told.count(quiet) == 1
            assert told[-1] == quiet
            assert sum(isinstance(news, TransferFailed) for news in told) <= 1
            assert side.pages.lent == 0

    def positions(self, side: Station, kind: type[Acked] | type[Arrived]) -> list[int]:
        return [
            at
            for news in side.of(self.id)
            if isinstance(news, kind)
            for at in range(news.first, news.first + news.count)
        ]

    def arrived_right(self) -> None:
        """Whatever was told to have arrived is what was sent; nothing else was written."""
        for at in self.positions(self.receiver, Arrived):
            here = self.into + at - self.first
            assert self.receiver.pages.page(here) == self.sender.pages.page(at)
            assert self.receiver.pages.tags[here] == 9
