"""Which shapes of batched products give a row of attention the same bits on this machine.

A row that sees so many keys must come out alike at every padded length above them, beside any
number of sequences, in a tile of any number of query tokens, and, where a window hides its first
keys, with whole blocks of these left out. Random rows are run at load at the shapes that will be
in use, and the limits within which they agree bit for bit are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

KEY_TILE = 64  # absolute keys of one tile
QUERY_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)  # query tokens of one tile
# Keys of one product of weights and values, and the fewest keys of a call: tried in this order. A
# kernel that cuts long sums differently from short ones is kept on one side of its threshold.
KEY_BLOCKS = ((1024, 64), (512, 64), (256, 64), (256, 256), (64, 64))
MOST_KEYS = 4096  # the longest call that is tried
SHORT_KEYS = 1024  # batches of many sequences are tried up to here
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Shapes:
    key_block: int = 1024  # keys of one product of weights and values
    least_keys: int = 64  # of a call
    least_tokens: int = 1  # query tokens of a tile
    may_skip: bool = True  # key blocks before a window


def key_tiles(tiles: int) -> int:
    """The number of key tiles that is run for `tiles`: a coarser grid, so that it can be tested."""
    step = 1 if tiles <= 4 else 2 if tiles <= 16 else 4 if tiles <= 64 else 16
    return -(-tiles // step) * step


def weigh(weights: Tensor, values: Tensor, *, key_block: int) -> Tensor:
    """weights [pairs, rows, keys] × values [pairs, keys, dim], key blocks added in order."""
    keys = values.shape[1]
    out = torch.bmm(weights[..., :key_block], values[:, :key_block])
    for at in range(key_block, keys, key_block):
        block = slice(at, at + key_block)
        out += torch.bmm(weights[..., block], values[:, block])
    return out


def find_shapes(
    *,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    context_tokens: int,
    max_sequences: int,
    windows: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Shapes | None:
    """The widest limits within which all shapes agree; None: there are none."""
    probe = _Probe(
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        context_tokens=context_tokens,
        max_sequences=max_sequences,
        dtype=dtype,
        device=device,
    )
    for probe.key_block, least_keys in KEY_BLOCKS:
        if probe.lengths_agree(least_keys):
            least_tokens = probe.least_tokens(least_keys)
            if least_tokens is not None:
                shapes = Shapes(probe.key_block, least_keys, least_tokens)
                may_skip = all(probe.starts_agree(window, shapes) for window in windows)
                return replace(shapes, may_skip=may_skip)
    return None


class _Probe:
    """Random keys, values and queries, and what rows of them are at the reference shape."""

    def __init__(
        self,
        *,
        num_kv_heads: int,
        group: int,
        head_dim: int,
        context_tokens: int,
        max_sequences: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._heads, self._group, self._most = num_kv_heads, group, max_sequences
        self.key_block = 0
        longest = key_tiles(-(-context_tokens // KEY_TILE))
        # Longer calls only repeat the block; fewer keys than a block are padded to one.
        longest = max(min(longest, MOST_KEYS // KEY_TILE), KEY_BLOCKS[0][0] // KEY_TILE)
        self.lengths = sorted({key_tiles(tiles) * KEY_TILE for tiles in range(1, longest + 1)})
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            values = torch.randn(*shape, head_dim, generator=generator)
            return values.to(device, dtype)

        many = max_sequences * self._heads
        self._queries = random(many, QUERY_TOKENS[-1] * self._group) * head_dim**-0.5
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
            for sequences in (2, 3, 5, 8, 13, self._most)
            for length in {short[0], short[-1]}
        )

    def least_tokens(self, least_keys: int) -> int | None:
        """Fewest query tokens from which on all tiles agree."""
        lengths = [at for at in self.lengths if at >= least_keys]
        cases = {(lengths[0], 1), (lengths[-1], 1)}
        cases |= {(at, self._most) for at in lengths if at <= SHORT_KEYS and at & (at - 1) == 0}
        least: int | None = None
        for tokens in reversed(QUERY_TOKENS):
            if not all(
                self._agrees(length - 14, tokens=tokens, length=length, sequences=sequences)
                for length, sequences in sorted(cases)
            ):
                return least
            least = tokens
        return least

    def starts_agree(self, window: int, shapes: Shapes) -> bool:
        """A row behind one or two blocks that its window hides, with and without these."""
        for skipped in (self.key_block, 2 * self.key_block):
            for hidden in (skipped, skipped + 21, skipped + self.key_block - 1):
                seen = min(hidden + window, self.lengths[-1])
                if seen <= hidden:
                    continue  # nothing is skipped for so far in a context this short
                whole = next(length for length in self.lengths if length >= seen)
                rest = key_tiles(-(-(seen - skipped) // KEY_TILE)) * KEY_TILE
                rest = min(max(rest, shapes.least_keys), self.lengths[-1] - skipped)
                expected = self._attend(seen, 16, whole, 1, hidden=hidden)
                least = shapes.least_tokens
                for tokens, sequences in ((least, 1), (QUERY_TOKENS[-1], 1), (least, self._most)):
                    found = self._attend(
                        seen, tokens, skipped + rest, sequences, hidden=hidden, skipped=skipped
                    )
                    if not _common_rows_equal(found[: self._heads], expected):
                        return False
        return True

    def _agrees(self, seen: int, *, tokens: int, length: int, sequences: int = 1) -> bool:
        """The rows that both shapes hold are equal; the reference is 16 tokens, one sequence."""
        reference = self._expected.get(seen)
        if reference is None:
            shortest = next(length for length in self.lengths if length >= seen)
            reference = self._expected[seen] = self._attend(seen, 16, shortest, 1)
        found = self._attend(seen, tokens, length, sequences)[: self._heads]
        return _common_rows_equal(found, reference)

    def _attend(
        self,
        seen: int,
        tokens: int,
        length: int,
        sequences: int,
        *,
        hidden: int = 0,
        skipped: int = 0,
    ) -> Tensor:
        """Rows that see keys hidden…seen of those from skipped to length."""
        pairs = sequences * self._heads
        stored = self._long if sequences == 1 else self._short
        if length > stored.shape[2]:
            stored = self._long.repeat(1, sequences, 1, 1)
        keys, values = stored[:, :pairs, skipped:length].unbind(0)
        queries = self._queries[:pairs, : tokens * self._group].contiguous()
        scores = torch.bmm(queries, keys.transpose(1, 2))
        scores[..., seen - skipped :] = NEVER
        scores[..., : hidden - skipped] = NEVER
        return weigh(torch.softmax(scores, -1), values, key_block=self.key_block)


def _common_rows_equal(found: Tensor, expected: Tensor) -> bool:
    common = min(found.shape[1], expected.shape[1])
    return torch.equal(found[:, :common], expected[:, :common])
