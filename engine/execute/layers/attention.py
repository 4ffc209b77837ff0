"""Attention over paged keys and values in plain batched products, equal bit for bit in any batch.

A group's query heads are folded into the row axis: queries become [sequences × kv heads,
tokens × group, dim] against [sequences × kv heads, keys, dim]. Keys are padded with a page of
zeros to a multiple of 64 and masked; exact zeros in a sum change nothing, so a row's result
depends on its own keys only. Within which shapes this machine's kernels keep that promise is
tested at load (attention_shapes.py); where they never do, every row goes through one fixed shape,
64 absolute keys at a time, merged online (Milakov and Gimelshein, 2018).

Layers with a window hide all but the last keys from a token (Beltagy et al., 2020). Whole key
blocks that no row of a tile sees are not read: the blocks that are left are cut where they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.execute.layers import page_values
from engine.execute.layers.attention_shapes import (
    KEY_TILE,
    QUERY_TOKENS,
    Shapes,
    find_shapes,
    key_tiles,
    weigh,
)
from engine.store.page_codec import PageLayout

MAX_SEQUENCES = 16  # single-token rows of one call
FIXED_ROWS = 32
NEVER = float("-inf")


class Span(NamedTuple):
    """Consecutive batch rows of one sequence at positions start, start + 1, …"""

    first_row: int
    num_rows: int
    start: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tile:
    """Query tokens of a call: rows first…first + sequences × tokens, padded to `padded` tokens."""

    first_row: int
    tokens: int
    padded: int
    first_key: int  # of those that the call gathers
    keys: int  # from there on
    masked_from: int
    mask: Tensor  # [sequences, 1, padded, 1, keys - masked_from], 0 or -inf


@dataclass(frozen=True, slots=True)
class Call:
    """Sequences whose pages are gathered together; several only if each has a single token."""

    sequences: int
    places: tuple[Tensor, ...]  # a layer: arena rows of page_size × dim, [K V, seq, head, page]
    tiles: tuple[Tile, ...]


class Attention:
    """Plans the calls of a step once, then runs them for each layer; head_dim is in elements,
    null_page the arena's page of zeros."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        num_layers: int,
        null_page: int,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Iterable[int | None] = (None,),
    ) -> None:
        self.windows = frozenset(windows)
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.page_size, self.null_page = page_size, null_page
        self.dtype, self.device = dtype, device
        # Arena rows of page_size × dim: [page][layer][K,V][kv head].
        self._page_stride = num_layers * 2 * num_kv_heads
        self._layers = torch.arange(num_layers, device=device)[:, None] * (2 * num_kv_heads)
        self._halves = torch.arange(2 * num_kv_heads, device=device).view(2, 1, num_kv_heads, 1)
        shapes = find_shapes(
            num_kv_heads=num_kv_heads,
            group=self.group,
            head_dim=head_dim,
            context_tokens=context_tokens,
            max_sequences=MAX_SEQUENCES,
            windows=sorted(window for window in self.windows if window is not None),
            dtype=dtype,
            device=device,
        )
        self.is_wide = shapes is not None
        self.shapes = shapes or Shapes()

    # --- planning ---------------------------------------------------------------------------

    def plans(self, spans: Sequence[Span]) -> dict[int | None, list[Call]]:
        """The calls of each kind of layer, by its window."""
        longest = max((span.start + span.num_rows for span in spans), default=0)
        full = self.plan(spans)
        # As long as a window hides nothing, its layers do what the others do.
        return {
            window: full if window is None or longest <= window else self.plan(spans, window)
            for window in self.windows
        }

    def plan(self, spans: Sequence[Span], window: int | None = None) -> list[Call]:
        """spans in batch order, single-token ones that may share a call next to each other."""
        calls: list[Call] = []
        waiting: list[Span] = []
        for span in spans:
            if waiting and not self._may_join(waiting, span, window):
                calls.append(self._call(waiting, window))
                waiting = []
            waiting.append(span)
        if waiting:
            calls.append(self._call(waiting, window))
        return calls

    def places(self, pages: Tensor, positions: Tensor) -> Tensor:
        """int64 [tokens, 2, kv heads]: the arena row (of dim values) in layer 0 of each token's
        keys and values, for the page that holds its position."""
        blocks = pages[:, None] * self._page_stride + self._halves.view(1, -1)
        rows = blocks * self.page_size + (positions % self.page_size)[:, None]
        return rows.view(-1, 2, self.num_kv_heads)

    def key_tiles_of(self, span: Span, window: int | None = None) -> int:
        return self._key_tiles(span.start + span.num_rows - self._first_key(span.start, window))

    def _key_tiles(self, keys: int) -> int:
        return max(self.shapes.least_keys // KEY_TILE, key_tiles(-(-keys // KEY_TILE)))

    def _first_key(self, position: int, window: int | None) -> int:
        """The key from which on a tile is computed whose first row is at that position."""
        if window is None or not self.shapes.may_skip:
            return 0
        # Whole key blocks are left out, and whole pages.
        stride = max(self.shapes.key_block, self.page_size)
        return max(0, position + 1 - window) // stride * stride

    def _may_join(self, waiting: list[Span], span: Span, window: int | None) -> bool:
        if span.num_rows > 1 or waiting[0].num_rows > 1 or len(waiting) == MAX_SEQUENCES:
            return False
        tiles, others = (self.key_tiles_of(one, window) for one in (span, waiting[0]))
        # Rows past their windows need about as much; where blocks are cut makes the difference.
        is_far = window is not None and min(span.start, waiting[0].start) >= window
        return tiles == others or (is_far and self.shapes.may_skip)

    def _call(self, spans: list[Span], window: int | None) -> Call:
        tiles = tuple(self._tiles(spans, window))
        keys = max(tile.first_key + tile.keys for tile in tiles)
        pages_each = -(-keys // self.page_size)
        tables = []
        for span in spans:
            first = self._first_key(span.start, window) // self.page_size
            pages = span.pages[first : first + pages_each]
            tables.append([*pages, *[self.null_page] * (pages_each - len(pages))])
        table = torch.tensor(tables, device=self.device).view(1, len(spans), 1, pages_each)
        first_rows = (table * self._page_stride + self._halves).view(1, -1)
        places = (first_rows + self._layers).unbind(0)
        return Call(len(spans), places, tiles)

    def _tiles(self, spans: list[Span], window: int | None) -> list[Tile]:
        head = spans[0]
        most = QUERY_TOKENS[-1]
        tiles = []
        for at in range(0, head.num_rows, most):
            tokens = min(most, head.num_rows - at)
            padded = next(size for size in QUERY_TOKENS if size >= tokens)
            padded = max(padded, self.shapes.least_tokens)
            # From here on positions are counted from each sequence's own first key.
            first_keys = [self._first_key(span.start + at, window) for span in spans]
            starts = torch.tensor(
                [span.start + at - first for span, first in zip(spans, first_keys, strict=True)]
            )
            keys = self._key_tiles(int(starts.max()) + tokens) * KEY_TILE
            is_plain = len(spans) == 1 and window is None
            masked_from = int(starts.min()) // KEY_TILE * KEY_TILE if is_plain else 0
            # Padded queries look at the last real one's keys; nobody reads what they see.
            offsets = torch.arange(padded).clamp_(max=tokens - 1)
            positions = starts[:, None, None] + offsets[None, :, None]
            seen = torch.arange(masked_from, keys)[None, None]
            hidden = seen > positions
            if window is not None:
                hidden |= seen <= positions - window
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, NEVER)
            mask = mask[:, None, :, None].to(self.device)
            first_key = first_keys[0] - self._first_key(head.start, window)
            tiles.append(
                Tile(head.first_row + at, tokens, padded, first_key, keys, masked_from, mask)
            )
        return tiles

    # --- running ----------------------------------------------------------------------------

    def __call__(
        self,
        queries: Tensor,
        pages: Tensor,
        *,
        layer: int,
        calls: Sequence[Call],
        out: Tensor,
        codes: PageLayout | None = None,
    ) -> Tensor:
        """queries [rows, heads, dim], scaled; pages as an arena's; codes: what those of quantised
        ones mean; out [rows, heads × dim], filled."""
        blocks = pages.flatten(0, 3).flatten(1)
        heads, width = self.num_kv_heads, self.group * self.head_dim
        for call in calls:
            pairs = call.sequences * heads
            gathered = blocks.index_select(0, call.places[layer])
            if codes is not None:
                gathered = page_values.dequantise(gathered, codes)
            if gathered.dtype != self.dtype:
                gathered = gathered.to(self.dtype)
            keys, values = gathered.view(2, pairs, -1, self.head_dim).unbind(0)
            for tile in call.tiles:
                rows = slice(tile.first_row, tile.first_row + call.sequences * tile.tokens)
                q = queries[rows].view(call.sequences, tile.tokens, heads, width).transpose(1, 2)
                if tile.padded > tile.tokens:
                    q = torch.nn.functional.pad(q, (0, 0, 0, tile.padded - tile.tokens))
                q = q.reshape(pairs, tile.padded * self.group, self.head_dim)
                attend = self._wide if self.is_wide else self._fixed
                seen = slice(tile.first_key, tile.first_key + tile.keys)
                o = attend(q, keys[:, seen], values[:, seen], tile)
                o = o.view(call.sequences, heads, tile.padded, width)[:, :, : tile.tokens]
                out[rows].view(call.sequences, tile.tokens, heads, width).copy_(o.transpose(1, 2))
        return out

    def _wide(self, q: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> Tensor:
        scores = torch.bmm(q, keys.transpose(1, 2))
        grid = scores.view(-1, self.num_kv_heads, tile.padded, self.group, tile.keys)
        grid[..., tile.masked_from :].add_(tile.mask)
        return weigh(torch.softmax(scores, -1), values, key_block=self.shapes.key_block)

    def _fixed(self, q: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> Tensor:
        """Tiles of FIXED_ROWS rows, one (sequence, head) at a time: the same shapes everywhere."""
        pairs, num_rows, _ = q.shape
        mask = tile.mask.new_zeros(tile.mask.shape[0], 1, tile.padded, 1, tile.keys)
        mask[..., tile.masked_from :] = tile.mask
        grid = mask.expand(-1, self.num_kv_heads, -1, self.group, -1)
        mask = grid.reshape(pairs, num_rows, tile.keys)
        spare = -num_rows % FIXED_ROWS
        q = torch.nn.functional.pad(q, (0, 0, 0, spare))
        mask = torch.nn.functional.pad(mask, (0, 0, 0, spare))
        out = torch.empty_like(q)
        for pair in range(pairs):
            for row in range(0, num_rows, FIXED_ROWS):
                rows = slice(row, row + FIXED_ROWS)
                out[pair, rows] = _online(
                    q[pair, rows].contiguous(), keys[pair], values[pair], mask[pair, rows]
                )
        return out[:, :num_rows]


def _online(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [FIXED_ROWS, dim] over keys in tiles of 64, in order; some key is open to every row."""
    # Finite, so that a tile that is hidden from a row adds exact zeros to it and no NaN.
    top = torch.full((len(q), 1), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    total = torch.zeros_like(top)
    out = torch.zeros_like(q)
    for at in range(0, len(keys), KEY_TILE):
        tile = slice(at, at + KEY_TILE)
        scores = torch.mm(q, keys[tile].t()).add_(mask[:, tile])
        higher = torch.maximum(top, scores.amax(1, keepdim=True))
        shrink = torch.exp(top - higher)
        weights = torch.exp(scores - higher)
        total = total * shrink + weights.sum(1, keepdim=True)
        out = out * shrink + torch.mm(weights, values[tile])
        top = higher
    return out / total
