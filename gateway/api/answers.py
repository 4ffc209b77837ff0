"""Answers that may be asked for again: what runs is recorded, what is done is kept, all bounded.

    begin → write … write → finish ─┬─ billed and whole → stored until evicted or too old
       └ join: reads from the start ├─ billed, not whole → only its request is remembered
                                    └─ not billed → forgotten, so its key is free

An answer is whole while nothing of it was dropped; only a whole one can be joined. One that grows
too large keeps no more than what its readers have yet to take. Nothing here waits or knows a clock.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

ANSWER_BYTES = 1024  # what an answer counts for besides its body: head, ids, table entry
WINDOW_BYTES = 64 << 10  # of an answer that is too large to keep: more than this and it waits
MAX_READERS = 16
MAX_SPENT = 4096  # for the moment until the ledger's file knows, even of a row not yet written

RawHeaders = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: RawHeaders


@dataclass(slots=True, eq=False)
class Reader:
    """One client's place in an answer; woken whenever there may be more."""

    place: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Answer:
    request_id: str
    body_digest: bytes  # of the request
    head: Head | None = None
    data: bytearray = field(default_factory=bytearray)
    start: int = 0  # how much of the body was dropped in front of data
    is_whole: bool = True
    is_complete: bool = False  # its last byte was written
    is_running: bool = True  # its handler has not returned
    is_given_up: bool = False  # its handler is being cancelled
    readers: set[Reader] = field(default_factory=set)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    finished_at: float = 0.0

    def wake(self) -> None:
        for reader in self.readers:
            reader.wake.set()
        self.room.set()

    @property
    def is_full(self) -> bool:
        """Whether its writer must wait for its readers."""
        return not self.is_whole and len(self.data) > WINDOW_BYTES and bool(self.readers)


class AnswerStore:
    """All answers of one gateway by their key's digest; the least recently used is evicted."""

    def __init__(self, *, answer_bytes: int, stored_bytes: int, lifetime_s: float) -> None:
        self._answer_bytes = answer_bytes
        self._stored_bytes = stored_bytes
        self._lifetime_s = lifetime_s
        self._running: dict[bytes, Answer] = {}
        self._stored: OrderedDict[bytes, Answer] = OrderedDict()
        self._spent: OrderedDict[bytes, str] = OrderedDict()
        self.held_bytes = 0  # of whole answers, running and stored

    def find(self, digest: bytes, now: float) -> Answer | None:
        answer = self._running.get(digest)
        if answer is not None:
            return answer
        answer = self._stored.get(digest)
        if answer is not None and now - answer.finished_at >= self._lifetime_s:
            self._forget(digest)
            return None
        if answer is not None:
            self._stored.move_to_end(digest)
        return answer

    def spent_by(self, digest: bytes) -> str | None:
        """The request that was billed and whose answer is gone, if it is remembered."""
        return self._spent.get(digest)

    def begin(self, digest: bytes, *, request_id: str, body_digest: bytes) -> tuple[Answer, Reader]:
        """A new run and its first reader. Nothing may be known under its digest."""
        assert digest not in self._running
        assert digest not in self._stored
        answer, reader = Answer(request_id, body_digest), Reader()
        answer.readers.add(reader)
        self._running[digest] = answer
        self.held_bytes += ANSWER_BYTES
        self._make_room(answer)
        return answer, reader

    def join(self, answer: Answer) -> Reader | None:
        """A place at the start; None when the start is gone, or the end will not come."""
        if not answer.is_whole or answer.is_given_up or len(answer.readers) >= MAX_READERS:
            return None
        reader = Reader()
        answer.readers.add(reader)
        return reader

    def write(self, answer: Answer, data: bytes) -> None:
        answer.data += data
        if answer.is_whole:
            self.held_bytes += len(data)
            self._make_room(answer)
        else:
            self._trim(answer)
        answer.wake()

    def take(self, answer: Answer, reader: Reader) -> bytes:
        """What this reader has not had yet."""
        data = bytes(answer.data[reader.place - answer.start :])
        reader.place += len(data)
        if not answer.is_whole:
            self._trim(answer)
            answer.room.set()
        return data

    def leave(self, answer: Answer, reader: Reader) -> bool:
        """Whether a run is alone now. Leaving twice is leaving once."""
        answer.readers.discard(reader)
        if not answer.is_whole:
            self._trim(answer)
        answer.room.set()
        return answer.is_running and not answer.readers

    def finish(self, digest: bytes, answer: Answer, *, keep: bool, now: float) -> None:
        """The handler returned. keep: it was billed, so it must not run again."""
        del self._running[digest]
        answer.is_running = False
        answer.finished_at = now
        if keep and answer.is_whole and answer.is_complete:
            self._stored[digest] = answer
        elif keep:
            self._spent[digest] = answer.request_id
            if len(self._spent) > MAX_SPENT:
                self._spent.popitem(last=False)
        if answer.is_whole and digest not in self._stored:
            self._release(answer)
        self._sweep(now)
        answer.wake()

    def _make_room(self, answer: Answer) -> None:
        """Within both bounds again: by evicting what is done, else by not keeping this one."""
        if len(answer.data) <= self._answer_bytes:
            while self.held_bytes > self._stored_bytes and self._stored:
                unread = (digest for digest, old in self._stored.items() if not old.readers)
                victim = next(unread, None)
                if victim is None:
                    break
                self._forget(victim)
            if self.held_bytes <= self._stored_bytes:
                return
        self._release(answer)
        self._trim(answer)

    def _sweep(self, now: float) -> None:
        while self._stored:
            digest, oldest = next(iter(self._stored.items()))
            if now - oldest.finished_at < self._lifetime_s:
                return
            self._forget(digest)

    def _forget(self, digest: bytes) -> None:
        self._release(self._stored.pop(digest))

    def _release(self, answer: Answer) -> None:
        """It counts no longer and cannot be joined; its readers still get all of it."""
        answer.is_whole = False
        self.held_bytes -= len(answer.data) + ANSWER_BYTES

    def _trim(self, answer: Answer) -> None:
        taken = min((r.place for r in answer.readers), default=answer.start + len(answer.data))
        del answer.data[: taken - answer.start]
        answer.start = taken
