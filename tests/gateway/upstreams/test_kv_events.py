"""vLLM's page events: our keys from its token ids, and messages lost, repeated or begun anew."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.kv_events import BlockBook
from gateway.upstreams.kv_listener import EventLog
from policies.contract.page_keys import page_keys
from policies.contract.wire import CacheCleared, PageRemoved, PageStored, pack_ids
from policies.predicted import PredictedResidency
from policies.residency import Residency, event_keys

PAGE = 32
ROOT = b"r" * 32


def own_keys(ids: list[int], root: bytes = ROOT) -> list[bytes]:
    """Root first, as events carry them."""
    packed = pack_ids(array("I", ids))
    return [key[:16] for key in page_keys(root, packed, page_size=PAGE)]


def stored(ids: list[int], size: int, *, parent: Any = None, first: int = 0, **more: Any) -> dict:
    count = len(ids) // size
    return {
        "type": "BlockStored",
        "block_hashes": [first + at + 1 for at in range(count)],
        "parent_block_hash": parent,
        "token_ids": ids[: count * size],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
def test_pages_are_ours_whatever_the_block_size(size) -> None:
    ids = list(range(256))
    book = BlockBook(PAGE, lambda salt: ROOT)
    half = 128 // size
    told = book.read(batch(stored(ids[:128], size)))
    told += book.read(batch(stored(ids[128:], size, parent=half, first=half)))
    assert told == [PageStored(key) for key in own_keys(ids)]
    gone = [PageRemoved(key) for key in own_keys(ids)[-max(1, size // PAGE) :]]
    assert (
        book.read(batch({"type": "BlockRemoved", "block_hashes": [256 // size], "medium": "GPU"}))
        == gone
    )
    assert book.read(batch({"type": "AllBlocksCleared"})) == [CacheCleared()]
    assert len(book) == 0


def test_both_ways_to_write_an_event_are_read_and_bytes_are_hashes_too() -> None:
    ids = list(range(64))
    as_array = ["BlockStored", [b"h1", b"h2"], None, ids, 32, None, "GPU"]
    book = BlockBook(PAGE, lambda salt: ROOT)
    assert book.read(batch(as_array)) == [PageStored(key) for key in own_keys(ids)]
    assert book.read(batch(["BlockRemoved", [b"h2"], "GPU"])) == [PageRemoved(own_keys(ids)[1])]
    assert book.read(batch(["AllBlocksCleared"])) == [CacheCleared()]


def test_a_chain_belongs_to_who_salted_it() -> None:
    roots = {"salt-a": b"a" * 32, "salt-b": b"b" * 32}
    book = BlockBook(PAGE, lambda salt: roots.get(salt or ""))
    ids = list(range(64))
    one = book.read(batch(stored(ids, 32, extra_keys=[["salt-a"], None])))
    two = book.read(batch(stored(ids, 32, first=10, extra_keys=[["lora", "salt-b"], None])))
    assert one == [PageStored(key) for key in own_keys(ids, b"a" * 32)]
    assert book.read(batch(stored(ids, 32, first=20, extra_keys=[["salt-b"], None]))) == [
        PageStored(key) for key in own_keys(ids, b"b" * 32)
    ]
    assert two == []  # the first text is what counts, and it is nobody's
    assert book.read(batch(stored(ids, 32, first=30))) == []
    assert book.read(batch(stored(ids, 32, parent=30, first=40))) == []


@pytest.mark.parametrize(
    "more", [{"medium": "CPU"}, {"lora_name": "x"}, {"lora_id": 1}, {"group_idx": 1}]
)
def test_what_is_not_the_models_own_memory_is_left_out(more) -> None:
    book = BlockBook(PAGE, lambda salt: ROOT)
    assert book.read(batch(stored(list(range(64)), 32, **more))) == []


@pytest.mark.parametrize(
    "payload", [b"", b"\x01", batch({"type": "BlockStored"}), batch(5), batch(["BlockStored", 3])]
)
def test_what_is_no_batch_is_refused(payload) -> None:
    with pytest.raises(ValueError, match="KV events"):
        BlockBook(PAGE, lambda salt: ROOT).read(payload)


def make_log() -> tuple[EventLog, Any]:
    server = SimpleNamespace(name="s", told=None, predicted=PredictedResidency(100))
    return EventLog(server, lambda: BlockBook(PAGE, lambda salt: ROOT)), server


def messages(count: int) -> list[bytes]:
    """Each stores the next page of one long chain."""
    return [
        batch(stored(list(range(at * PAGE, (at + 1) * PAGE)), PAGE, parent=at or None, first=at))
        for at in range(count)
    ]


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_lost_repeated_and_replayed_messages_give_the_same_pages(
    dice: random.Random, count
) -> None:
    sent = messages(count)
    events, server = make_log()
    for number in range(count):
        if dice.random() < 0.4 and number < count - 1:
            continue  # lost on its way
        first = events.missing(number)
        if first is not None:  # the server replays from there, with what we have too
            for again in range(max(0, first - dice.randrange(3)), count):
                events.take(again, sent[again])
        events.take(number, sent[number])
    deepest_first = event_keys(own_keys(list(range(count * PAGE))))
    assert server.told.reach(deepest_first) == [("device", count)]
    assert events.num_lost == 0


def test_without_a_replay_a_gap_is_counted_and_what_follows_is_unknown() -> None:
    events, server = make_log()
    sent = messages(4)
    for number in (0, 2, 3):
        assert events.missing(number) == (1 if number == 2 else None)
        events.take(number, sent[number])
    assert (events.num_lost, server.told.gaps) == (1, 1)
    assert server.told.reach(event_keys(own_keys(list(range(4 * PAGE))))) == [("device", 1)]


def test_a_server_that_began_anew_holds_nothing() -> None:
    events, server = make_log()
    server.predicted.expect([b"k" * 16], 0.0)
    for number, payload in enumerate(messages(3)):
        events.missing(number)
        events.take(number, payload)
    assert isinstance(server.told, Residency)
    assert len(server.told) == 3
    assert events.missing(0) is None
    events.take(0, messages(1)[0])
    assert len(server.told) == 1
    assert len(server.predicted) == 0


def test_a_message_that_cannot_be_read_is_skipped() -> None:
    events, server = make_log()
    events.missing(0)
    events.take(0, b"nonsense")
    events.missing(1)
    events.take(1, messages(1)[0])
    assert len(server.told) == 1
