"""The store of answers under any order of events: bounded, nobody left waiting, nothing spliced."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.api.answers import (
    ANSWER_BYTES,
    MAX_READERS,
    WINDOW_BYTES,
    Answer,
    AnswerStore,
    Reader,
)

ANSWER_LIMIT = 4096
STORED_LIMIT = 4 * ANSWER_BYTES + 6000
LIFETIME_S = 50.0
PIECE = 900


def byte_at(place: int) -> int:
    return place * 7 % 251


def piece_at(place: int, length: int) -> bytes:
    """The same byte at the same place of any answer, so that a gap or a splice shows."""
    return bytes(byte_at(at) for at in range(place, place + length))


class Machine(RuleBasedStateMachine):
    """Digests are few, so keys are begun, joined and begun again; sizes are near the limits."""

    readers = Bundle("readers")
    digests = st.sampled_from([bytes([n]) for n in range(8)])

    def __init__(self) -> None:
        super().__init__()
        self.store = AnswerStore(
            answer_bytes=ANSWER_LIMIT, stored_bytes=STORED_LIMIT, lifetime_s=LIFETIME_S
        )
        self.now = 0.0
        self.number = 0
        self.running: dict[bytes, Answer] = {}
        self.written: dict[Answer, int] = {}
        self.billed: dict[bytes, Answer] = {}  # the last one under each digest
        self.taken: dict[Reader, int] = {}

    @rule(target=readers, digest=digests)
    def ask(self, digest: bytes) -> tuple[Answer, Reader | None]:
        """What a request does: join what is there, or begin."""
        answer = self.store.find(digest, self.now)
        if answer is None and self.store.spent_by(digest) is not None:
            return Answer("", b""), None  # refused
        if answer is None:
            assert digest not in self.running, "a run must always be found"
            self.number += 1
            answer, reader = self.store.begin(
                digest, request_id=str(self.number), body_digest=digest
            )
            self.running[digest], self.written[answer] = answer, 0
            self.billed.pop(digest, None)
            self.taken[reader] = 0
            return answer, reader
        assert answer in (self.running.get(digest), self.billed.get(digest))
        joined = self.store.join(answer)
        if joined is not None:
            self.taken[joined] = 0
        else:
            assert not answer.is_whole or answer.is_given_up or len(answer.readers) == MAX_READERS
        return answer, joined

    @rule(digest=digests, length=st.integers(0, PIECE), last=st.booleans())
    def write(self, digest: bytes, length: int, last: bool) -> None:
        answer = self.running.get(digest)
        if answer is None or answer.is_complete or answer.is_full:
            return
        answer.is_complete = last
        self.store.write(answer, piece_at(self.written[answer], length))
        self.written[answer] += length
        assert all(reader.wake.is_set() for reader in answer.readers)

    @rule(reader=readers)
    def take(self, reader: tuple[Answer, Reader | None]) -> None:
        answer, place = reader
        if place is None or place not in answer.readers:
            return
        data = self.store.take(answer, place)
        assert data == piece_at(self.taken[place], len(data))
        self.taken[place] += len(data)
        assert place.place == self.taken[place] == self.written[answer]
        assert answer.room.is_set() or answer.is_whole

    @rule(reader=consumes(readers))
    def leave(self, reader: tuple[Answer, Reader | None]) -> None:
        answer, place = reader
        if place is None:
            return
        alone = self.store.leave(answer, place)
        assert alone == (answer in self.running.values() and not answer.readers)
        if alone and not answer.is_whole:
            answer.is_given_up = True

    @rule(digest=digests, keep=st.booleans())
    def finish(self, digest: bytes, keep: bool) -> None:
        answer = self.running.pop(digest, None)
        if answer is None:
            return
        was_whole = answer.is_whole
        self.store.finish(digest, answer, keep=keep, now=self.now)
        assert all(reader.wake.is_set() for reader in answer.readers)
        if keep and was_whole and answer.is_complete:
            self.billed[digest] = answer
        else:
            assert self.store.find(digest, self.now) is None
            assert self.store.spent_by(digest) == (answer.request_id if keep else None)

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def is_bounded(self) -> None:
        whole = [a for a in (*self.running.values(), *self.billed.values()) if a.is_whole]
        assert self.store.held_bytes == sum(len(a.data) + ANSWER_BYTES for a in whole)
        assert self.store.held_bytes <= STORED_LIMIT
        for answer in self.running.values():
            most = ANSWER_LIMIT if answer.is_whole else max(WINDOW_BYTES, ANSWER_LIMIT) + PIECE
            assert len(answer.data) <= most
            if not answer.readers and not answer.is_whole:
                assert not answer.data

    @invariant()
    def nothing_is_kept_too_long(self) -> None:
        for digest, answer in self.billed.items():
            found = self.store.find(digest, self.now) if answer.is_whole else None
            assert found is None or self.now - answer.finished_at < LIFETIME_S


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestAnswerStore = Machine.TestCase


def store_of(**limits: float) -> AnswerStore:
    given = {"answer_bytes": 1 << 20, "stored_bytes": 1 << 20, "lifetime_s": 60.0, **limits}
    return AnswerStore(**given)  # type: ignore[arg-type]


def test_least_recently_used_is_evicted_and_not_one_that_is_read() -> None:
    store = store_of(stored_bytes=3 * ANSWER_BYTES)
    for name in (b"a", b"b", b"c"):
        answer, reader = store.begin(name, request_id="", body_digest=b"")
        answer.is_complete = True
        store.leave(answer, reader)
        store.finish(name, answer, keep=True, now=0.0)
    found = store.find(b"a", 1.0)
    assert found is not None
    oldest = store.find(b"b", 1.0)
    assert oldest is not None
    reader_of_b = store.join(oldest)
    assert reader_of_b is not None
    store.find(b"c", 1.0)
    store.find(b"a", 1.0)
    store.begin(b"d", request_id="", body_digest=b"")
    assert store.find(b"b", 1.0) is oldest  # the least recently used, yet somebody reads it
    assert store.find(b"c", 1.0) is None
    assert store.find(b"a", 1.0) is found


def test_first_reader_gets_everything_although_nothing_may_be_stored() -> None:
    store = store_of(stored_bytes=0)
    answer, reader = store.begin(b"a", request_id="", body_digest=b"")
    for number in range(5):
        store.write(answer, b"%d" % number)
    assert store.take(answer, reader) == b"01234"
    assert store.join(answer) is None
    assert store.held_bytes == 0


def test_writer_of_a_large_answer_waits_for_its_readers_and_no_longer() -> None:
    store = store_of(answer_bytes=10)
    answer, reader = store.begin(b"a", request_id="", body_digest=b"")
    store.write(answer, b"x" * (WINDOW_BYTES + 1))
    assert answer.is_full
    store.take(answer, reader)
    assert not answer.is_full
    store.write(answer, b"x" * (WINDOW_BYTES + 1))
    store.leave(answer, reader)
    assert not answer.is_full
    assert not answer.data
