"""Attention over paged keys and values in plain batched products, equal bit for bit in any batch.

A group's query heads are folded into the row axis: queries become [sequences × kv heads,
tokens × group, dim] against [sequences × kv heads, keys, dim]. Keys are padded with a page of
zeros to a multiple of 64 and masked; exact zeros at the end of a sum change nothing, so a row's
result depends on its own keys only. Whether this machine's kernels keep that promise over all
shapes in use is tested at load (`is_wide`); where they do not, every row goes through one fixed
shape, 64 absolute keys at a time, merged online (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

KEY_TILE = 64  # absolute keys of one tile
QUERY_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)  # query tokens of one tile
MAX_SEQUENCES = 16  # single-token rows of one call
FIXED_ROWS = 32
# Keys of one product of weights and values, and the fewest keys of a call: tried in this order. A
# kernel that cuts long sums differently from short ones is kept on one side of its threshold.
KEY_BLOCKS = ((1024, 64), (512, 64), (256, 64), (256, 256), (64, 64))
SAMPLE_SEQUENCES = (2, 3, 5, 8, 13, MAX_SEQUENCES)
SHORT_KEYS = 1024  # the self-test tries batches of many sequences up to here
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
    keys: int
    masked_from: int
    mask: Tensor  # [sequences, 1, padded, 1, keys - masked_from], 0 or -inf


@dataclass(frozen=True, slots=True)
class Call:
    """Sequences whose pages are gathered together; several only if each has a single token."""

    sequences: int
    places: tuple[
        Tensor, ...
    ]  # a layer: arena rows of page_size × dim, order [K V, seq, head, page]
    tiles: tuple[Tile, ...]


def key_tiles(tiles: int) -> int:
    """The number of key tiles that is run for `tiles`: a coarser grid, so that it can be tested."""
    step = 1 if tiles <= 4 else 2 if tiles <= 16 else 4 if tiles <= 64 else 16
    return -(-tiles // step) * step


class Attention:
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
    ) -> None:
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.page_size, self.null_page = page_size, null_page
        self.dtype, self.device = dtype, device
        # Arena rows of page_size × dim: [page][layer][K,V][kv head].
        self._page_stride = num_layers * 2 * num_kv_heads
        self._layers = torch.arange(num_layers, device=device)[:, None] * (2 * num_kv_heads)
        self._halves = torch.arange(2 * num_kv_heads, device=device).view(2, 1, num_kv_heads, 1)
        self.least_tokens = 1  # query tokens of a tile
        self._least_tiles, self._key_block = 1, 1 << 30
        self.is_wide = self._find_wide_shapes(context_tokens)

    # --- planning ---------------------------------------------------------------------------

    def plan(self, spans: Sequence[Span]) -> list[Call]:
        """spans in batch order, single-token ones that may share a call next to each other."""
        calls: list[Call] = []
        waiting: list[Span] = []
        for span in spans:
            if waiting and not self._may_join(waiting, span):
                calls.append(self._call(waiting))
                waiting = []
            waiting.append(span)
        if waiting:
            calls.append(self._call(waiting))
        return calls

    def places(self, pages: Tensor, positions: Tensor) -> Tensor:
        """int64 [tokens, 2, kv heads]: the arena row (of dim values) in layer 0 of each token's
        keys and values, for the page that holds its position."""
        blocks = pages[:, None] * self._page_stride + self._halves.view(1, -1)
        rows = blocks * self.page_size + (positions % self.page_size)[:, None]
        return rows.view(-1, 2, self.num_kv_heads)

    def key_tiles_of(self, span: Span) -> int:
        return self._key_tiles(span.start + span.num_rows)

    def _key_tiles(self, keys: int) -> int:
        return max(self._least_tiles, key_tiles(-(-keys // KEY_TILE)))

    def _may_join(self, waiting: list[Span], span: Span) -> bool:
        return (
            span.num_rows == 1
            and waiting[0].num_rows == 1
            and len(waiting) < MAX_SEQUENCES
            and self.key_tiles_of(span) == self.key_tiles_of(waiting[0])
        )

    def _call(self, spans: list[Span]) -> Call:
        keys = max(self.key_tiles_of(span) for span in spans) * KEY_TILE
        pages_each = -(-keys // self.page_size)
        table = torch.tensor(
            [
                [*span.pages[:pages_each], *[self.null_page] * (pages_each - len(span.pages))]
                for span in spans
            ],
            device=self.device,
        ).view(1, len(spans), 1, pages_each)
        first = (table * self._page_stride + self._halves).view(1, -1)
        places = (first + self._layers).unbind(0)
        return Call(len(spans), places, tuple(self._tiles(spans)))

    def _tiles(self, spans: list[Span]) -> list[Tile]:
        head = spans[0]
        most = QUERY_TOKENS[-1]
        tiles = []
        for at in range(0, head.num_rows, most):
            tokens = min(most, head.num_rows - at)
            padded = next(size for size in QUERY_TOKENS if size >= tokens)
            padded = max(padded, self.least_tokens)
            starts = torch.tensor([span.start + at for span in spans])
            seen = int(starts.max()) + tokens
            keys = self._key_tiles(seen) * KEY_TILE
            masked_from = int(starts.min()) // KEY_TILE * KEY_TILE if len(spans) == 1 else 0
            # Padded queries look at the last real one's keys; nobody reads what they see.
            offsets = torch.arange(padded).clamp_(max=tokens - 1)
            positions = starts[:, None, None] + offsets[None, :, None]
            hidden = torch.arange(masked_from, keys)[None, None] > positions
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, NEVER)
            mask = mask[:, None, :, None].to(self.device)
            tiles.append(Tile(head.first_row + at, tokens, padded, keys, masked_from, mask))
        return tiles

    # --- running ----------------------------------------------------------------------------

    def __call__(
        self, queries: Tensor, arena: Tensor, *, layer: int, calls: Sequence[Call], out: Tensor
    ) -> Tensor:
        """queries [rows, heads, dim], scaled; arena as stored; out [rows, heads × dim], filled."""
        blocks = arena.view(-1, self.page_size * self.head_dim)
        heads, width = self.num_kv_heads, self.group * self.head_dim
        for call in calls:
            pairs = call.sequences * heads
            gathered = blocks.index_select(0, call.places[layer])
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
                o = attend(q, keys[:, : tile.keys], values[:, : tile.keys], tile)
                o = o.view(call.sequences, heads, tile.padded, width)[:, :, : tile.tokens]
                out[rows].view(call.sequences, tile.tokens, heads, width).copy_(o.transpose(1, 2))
        return out

    def _wide(self, q: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> Tensor:
        scores = torch.bmm(q, keys.transpose(1, 2))
        grid = scores.view(-1, self.num_kv_heads, tile.padded, self.group, tile.keys)
        grid[..., tile.masked_from :].add_(tile.mask)
        return self._weigh(torch.softmax(scores, -1), values)

    def _weigh(self, weights: Tensor, values: Tensor) -> Tensor:
        """weights [pairs, rows, keys] × values [pairs, keys, dim], key blocks added in order."""
        keys, block = values.shape[1], self._key_block
        out = torch.bmm(weights[..., :block], values[:, :block])
        for at in range(block, keys, block):
            out += torch.bmm(weights[..., at : at + block], values[:, at : at + block])
        return out

    def _fixed(self, q: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> Tensor:
        pairs, num_rows, _ = q.shape
        mask = torch.zeros(tile.mask.shape[0], 1, tile.padded, 1, tile.keys, dtype=self.dtype)
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

    # --- the self-test ----------------------------------------------------------------------

    def _find_wide_shapes(self, context_tokens: int) -> bool:
        """Whether whole-row products agree bit for bit over all shapes in use; sets the limits.

        A row that sees `seen` keys must come out alike at every padded length above it, beside any
        number of sequences, and in a tile of any number of query tokens.
        """
        probe = _Probe(self, context_tokens)
        for self._key_block, least_keys in KEY_BLOCKS:
            self._least_tiles = least_keys // KEY_TILE
            if probe.lengths_agree(least_keys):
                least_tokens = probe.least_tokens(least_keys)
                if least_tokens is not None:
                    self.least_tokens = least_tokens
                    return True
        self._least_tiles = 1
        return False


class _Probe:
    """Random keys, values and queries, and what rows of them are at the reference shape."""

    def __init__(self, attention: Attention, context_tokens: int) -> None:
        self._attention = attention
        self._heads, self._group = attention.num_kv_heads, attention.group
        longest = key_tiles(-(-context_tokens // KEY_TILE))
        longest = max(longest, max(least for _, least in KEY_BLOCKS) // KEY_TILE)
        self.lengths = sorted({key_tiles(tiles) * KEY_TILE for tiles in range(1, longest + 1)})
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            values = torch.randn(*shape, attention.head_dim, generator=generator)
            return values.to(attention.device, attention.dtype)

        many = MAX_SEQUENCES * self._heads
        self._queries = random(many, QUERY_TOKENS[-1] * self._group) * attention.head_dim**-0.5
        self._long = random(2, self._heads, self.lengths[-1])
        self._short = random(2, many, min(SHORT_KEYS, self.lengths[-1]))
        self._short[:, : self._heads] = self._long[:, :, : self._short.shape[2]]
        self._expected: dict[int, Tensor] = {}

    def lengths_agree(self, least_keys: int) -> bool:
        """Every padded length within the largest block, and some beyond it, beside companions."""
        self._expected.clear()
        short = [at for at in self.lengths if least_keys <= at <= SHORT_KEYS]
        beyond = [at for at in self.lengths if at in (1280, 2048) or at == self.lengths[-1]]
        return all(
            self._agrees(length - 14, tokens=16, length=longer)
            for length in sorted({*short, *beyond})
            for longer in sorted({*short, *beyond})
            if longer >= length
        ) and all(
            self._agrees(length - 14, tokens=16, length=length, sequences=sequences)
            for sequences in SAMPLE_SEQUENCES
            for length in {short[0], short[-1]}
        )

    def least_tokens(self, least_keys: int) -> int | None:
        """Fewest query tokens from which on all tiles agree."""
        lengths = [at for at in self.lengths if at >= least_keys]
        cases = {(lengths[0], 1), (lengths[-1], 1)}
        cases |= {(at, MAX_SEQUENCES) for at in lengths if at <= SHORT_KEYS and at & (at - 1) == 0}
        least: int | None = None
        for tokens in reversed(QUERY_TOKENS):
            if not all(
                self._agrees(length - 14, tokens=tokens, length=length, sequences=sequences)
                for length, sequences in sorted(cases)
            ):
                return least
            least = tokens
        return least

    def _agrees(self, seen: int, *, tokens: int, length: int, sequences: int = 1) -> bool:
        """The rows that both shapes hold are equal; the reference is 16 tokens, one sequence."""
        reference = self._expected.get(seen)
        if reference is None:
            shortest = next(length for length in self.lengths if length >= seen)
            reference = self._expected[seen] = self._attend(seen, 16, shortest, 1)
        found = self._attend(seen, tokens, length, sequences)[: self._heads]
        common = min(found.shape[1], reference.shape[1])
        return torch.equal(found[:, :common], reference[:, :common])

    def _attend(self, seen: int, tokens: int, length: int, sequences: int) -> Tensor:
        pairs = sequences * self._heads
        stored = self._long if sequences == 1 else self._short
        keys, values = stored[:, :pairs, :length].unbind(0)
        queries = self._queries[:pairs, : tokens * self._group].contiguous()
        scores = torch.bmm(queries, keys.transpose(1, 2))
        scores[..., seen:] = NEVER
        return self._attention._weigh(torch.softmax(scores, -1), values)


def _online(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [FIXED_ROWS, dim] over keys in tiles of 64, in order; key 0 is open to every row."""
    top = torch.full((len(q), 1), NEVER, dtype=q.dtype, device=q.device)
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
