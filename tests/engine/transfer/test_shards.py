"""Pages in parts: whoever is divided otherwise makes the same page of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.store.page_codec import PageLayout
from engine.transfer.shards import Shard, assemble_page, cut_page, shard_layout, whole

LAYOUTS = st.builds(
    PageLayout,
    st.sampled_from(("bf16", "fp32", "int8", "fp8")),
    num_layers=st.integers(1, 4),
    num_kv_heads=st.sampled_from((4, 8)),
    page_size=st.just(16),
    head_dim=st.sampled_from((1, 4)),
)
LAYOUT = PageLayout("int8", num_layers=2, num_kv_heads=4, page_size=16, head_dim=4)


def by_heads(layout: PageLayout, degree: int) -> list[Shard]:
    """As that many ranks of tensor parallelism hold a page."""
    edges = [layout.num_kv_heads * rank // degree for rank in range(degree + 1)]
    return [Shard(0, layout.num_layers, *edge) for edge in pairwise(edges)]


def page_of(layout: PageLayout, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(layout.page_bytes)


@settings(deadline=None, max_examples=30)
@given(layout=LAYOUTS, sent=st.sampled_from((1, 2, 4)), kept=st.sampled_from((1, 2, 4)))
def test_parts_of_any_degree_become_parts_of_any_other(
    layout: PageLayout, sent: int, kept: int
) -> None:
    page = page_of(layout)
    parts = [(shard, cut_page(page, layout, shard)) for shard in by_heads(layout, sent)]
    again = assemble_page(reversed(parts), layout)
    assert again == page
    for shard in by_heads(layout, kept):
        assert cut_page(again, layout, shard) == cut_page(page, layout, shard)


@settings(deadline=None, max_examples=30)
@given(layout=LAYOUTS, data=st.data())
def test_a_grid_of_layers_and_heads_covers_a_page(layout: PageLayout, data: st.DataObject) -> None:
    def cuts(size: int) -> list[int]:
        inner = data.draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
        return [0, *sorted(inner), size]

    shards = [
        Shard(*layers, *heads)
        for layers in pairwise(cuts(layout.num_layers))
        for heads in pairwise(cuts(layout.num_kv_heads))
    ]
    page = page_of(layout)
    parts = [(shard, cut_page(page, layout, shard)) for shard in shards]
    assert all(len(part) == shard_layout(layout, shard).page_bytes for shard, part in parts)
    assert assemble_page(parts, layout) == page


def test_a_part_holds_its_heads_codes_and_scales() -> None:
    page = page_of(LAYOUT)
    head = LAYOUT.head_bytes
    part = cut_page(page, LAYOUT, Shard(1, 2, 2, 3))  # of [layer][K,V][head]
    keys, values = (1 * 2 + 0) * 4 + 2, (1 * 2 + 1) * 4 + 2
    assert part == b"".join(page[at * head : (at + 1) * head] for at in (keys, values))


@pytest.mark.parametrize(
    "shards", [[Shard(0, 2, 0, 2)], [Shard(0, 2, 0, 3), Shard(0, 2, 2, 4)]], ids=["gap", "twice"]
)
def test_parts_that_do_not_cover_a_page_once_make_none(shards: list[Shard]) -> None:
    page = page_of(LAYOUT)
    with pytest.raises(ValueError, match="shards"):
        assemble_page([(shard, cut_page(page, LAYOUT, shard)) for shard in shards], LAYOUT)


@pytest.mark.parametrize("shard", [Shard(0, 3, 0, 4), Shard(1, 1, 0, 4), Shard(0, 2, -1, 2)])
def test_a_part_that_a_page_has_not_is_refused(shard: Shard) -> None:
    with pytest.raises(ValueError, match="allowed parts of"):
        cut_page(page_of(LAYOUT), LAYOUT, shard)


def test_a_part_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="want"):
        assemble_page([(whole(LAYOUT), b"short")], LAYOUT)
