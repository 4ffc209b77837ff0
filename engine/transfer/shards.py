"""A page's part of some layers and heads, and pages made of the parts of another division.

Ranks of a tensor- or pipeline-parallel engine hold a rectangle of each page: layers × heads. Named
by what it holds and not by a rank's number, a part fits whoever is divided otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from engine.store.page_codec import Bytes, PageLayout


class Shard(Struct, frozen=True, array_like=True):
    """Layers first_layer … stop_layer - 1 and, of each, key/value heads likewise."""

    first_layer: int
    stop_layer: int
    first_head: int
    stop_head: int


def whole(layout: PageLayout) -> Shard:
    return Shard(0, layout.num_layers, 0, layout.num_kv_heads)


def shard_layout(layout: PageLayout, shard: Shard) -> PageLayout:
    """Of a page that holds this part alone. Raises ValueError on a part that the page has not."""
    if not (
        0 <= shard.first_layer < shard.stop_layer <= layout.num_layers
        and 0 <= shard.first_head < shard.stop_head <= layout.num_kv_heads
    ):
        raise ValueError(f"shard: found {shard}, allowed parts of {whole(layout)}")
    return replace(
        layout,
        num_layers=shard.stop_layer - shard.first_layer,
        num_kv_heads=shard.stop_head - shard.first_head,
    )


def cut_page(page: Bytes, layout: PageLayout, shard: Shard) -> bytes:
    """The shard's bytes, themselves a page of shard_layout. Raises ValueError as that does, or on a
    page of another length."""
    shard_layout(layout, shard)
    return _part(_grid(page, layout), shard).tobytes()


def assemble_page(parts: Iterable[tuple[Shard, Bytes]], layout: PageLayout) -> bytes:
    """A page from parts that cover it, each place once. Raises ValueError where they do not, or as
    shard_layout does."""
    page = np.zeros(layout.page_bytes, np.uint8)
    grid = _grid(page.data, layout)
    covered = np.zeros(grid.shape[:1] + grid.shape[2:3], bool)
    for shard, part in parts:
        _part(grid, shard)[:] = _grid(part, shard_layout(layout, shard))
        places = covered[shard.first_layer : shard.stop_layer, shard.first_head : shard.stop_head]
        if places.any():
            raise ValueError(f"shards: found {shard} over another, allowed each place once")
        places[:] = True
    if not covered.all():
        raise ValueError("shards: found places that none covers, allowed none")
    return page.tobytes()


def _grid(page: Bytes, layout: PageLayout) -> NDArray[np.uint8]:
    """[layer][K,V][kv head][bytes of a head], a view."""
    if len(page) != layout.page_bytes:
        raise ValueError(f"page has {len(page)} bytes, want {layout.page_bytes}")
    shape = layout.num_layers, 2, layout.num_kv_heads, layout.head_bytes
    return np.frombuffer(page, np.uint8).reshape(shape)


def _part(grid: NDArray[np.uint8], shard: Shard) -> NDArray[np.uint8]:
    return grid[shard.first_layer : shard.stop_layer, :, shard.first_head : shard.stop_head]
