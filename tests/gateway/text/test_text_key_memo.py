"""The key memo: equal to the plain chain, and a next turn hashes only its new pages."""

from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.key_memo import KeyMemo
from policies.contract import page_keys, wire

PAGE = 4
ROOTS = [sha256(bytes([number])).digest() for number in range(3)]


def plain(root: bytes, ids: bytes) -> list[bytes]:
    return page_keys.page_keys(root, ids, page_size=PAGE)


def pages_held(memo: KeyMemo) -> int:
    return sum(len(run.keys) for run in memo._by_age)


@st.composite
def related_chains(draw: st.DrawFn) -> list[tuple[bytes, bytes]]:
    """Prompts that extend, cut or branch off earlier ones, under a few roots."""
    chains: list[tuple[bytes, array[int]]] = []
    for _ in range(draw(st.integers(1, 15))):
        ids = array("I", draw(st.lists(st.integers(0, 2), max_size=30)))
        root = draw(st.sampled_from(ROOTS))
        if chains and draw(st.booleans()):
            root, earlier = draw(st.sampled_from(chains))
            ids = earlier[: draw(st.integers(0, len(earlier)))] + ids
        chains.append((root, ids))
    return [(root, wire.pack_ids(ids)) for root, ids in chains]


@given(chains=related_chains(), max_bytes=st.sampled_from([0, 700, 3_000, 1 << 20]))
def test_memo_equals_the_plain_chain_and_keeps_its_bound(
    chains: list[tuple[bytes, bytes]], max_bytes: int
) -> None:
    memo = KeyMemo(page_size=PAGE, max_bytes=max_bytes)
    for root, ids in chains:
        assert memo.page_keys(root, ids) == plain(root, ids)
        assert memo.num_bytes <= max_bytes
        assert memo.num_bytes == sum(run.num_bytes for run in memo._by_age)
        for run in memo._by_age:  # every run hangs where it can be found, so it can be evicted
            siblings = run.parent.children if run.parent else memo._run_by_root
            assert siblings[run.place] is run
            assert run.parent is None or run.parent in memo._by_age


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each page that is hashed."""
    pages: list[int] = []
    next_key = page_keys.next_key

    def counted(parent: bytes, page_ids: bytes) -> bytes:
        pages.append(1)
        return next_key(parent, page_ids)

    monkeypatch.setattr(page_keys, "next_key", counted)
    return pages


def test_next_turn_hashes_only_its_new_pages(hashed: list[int]) -> None:
    memo = KeyMemo(page_size=PAGE)
    first = wire.pack_ids(array("I", range(400)))
    memo.page_keys(ROOTS[0], first)
    assert len(hashed) == 100
    hashed.clear()
    changed_tail = first[: 396 * 4] + wire.pack_ids(array("I", range(1000, 1020)))
    keys = memo.page_keys(ROOTS[0], changed_tail)
    assert len(hashed) == 5
    assert keys == plain(ROOTS[0], changed_tail)


def test_sessions_with_a_common_prefix_keep_each_other_warm(hashed: list[int]) -> None:
    memo = KeyMemo(page_size=PAGE)
    prefix = array("I", range(400))
    sessions = [prefix + array("I", [number] * 40) for number in range(50)]
    for ids in sessions:
        memo.page_keys(ROOTS[0], wire.pack_ids(ids))
    assert len(hashed) == 100 + 50 * 10
    hashed.clear()
    for ids in sessions:
        memo.page_keys(ROOTS[0], wire.pack_ids(ids + array("I", [7] * PAGE)))
    assert len(hashed) == 50
    assert pages_held(memo) == 100 + 50 * 11


def test_another_root_shares_nothing(hashed: list[int]) -> None:
    memo = KeyMemo(page_size=PAGE)
    ids = wire.pack_ids(array("I", range(40)))
    assert memo.page_keys(ROOTS[0], ids) != memo.page_keys(ROOTS[1], ids)
    assert len(hashed) == 20


def test_returned_keys_are_the_callers_own() -> None:
    memo = KeyMemo(page_size=PAGE)
    ids = wire.pack_ids(array("I", range(40)))
    memo.page_keys(ROOTS[0], ids).clear()
    assert memo.page_keys(ROOTS[0], ids) == plain(ROOTS[0], ids)
