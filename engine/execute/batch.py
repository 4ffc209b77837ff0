"""The tensors of one forward pass, built from a step's rows with as little Python as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execute.layers.attention import Attention, Call, Span
from engine.execute.layers.row_tiles import RowTiles
from engine.schedule.plan import PageCopy, Row

PADDING_ID = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Token rows in batch order: single-token rows by length first, then chunks; then padding."""

    num_tokens: int
    pieces: tuple[int, ...]  # admitted row counts; their sum is the padded number of token rows
    token_ids: Tensor  # int64 [padded]
    positions: Tensor  # int64 [padded]
    places: Tensor  # int64 [num_tokens, 2, kv heads]: arena rows in layer 0
    calls: dict[int | None, list[Call]]  # by the layers' window
    first_tokens: list[int]  # by plan row: the token row of its first token


@dataclass(frozen=True, slots=True)
class TagPairs:
    """What the rows expect of the tags: see kernels.reference.verify_tags."""

    pages: Tensor
    generations: Tensor
    rows: Tensor


def tag_pairs(rows: Sequence[Row], copies: Sequence[PageCopy], *, device: torch.device) -> TagPairs:
    pages: list[int] = []
    generations: list[int] = []
    lengths: list[int] = []
    for row in rows:
        for table, held in zip(row.page_table, row.generations, strict=True):
            pages += table
            generations += held
        lengths.append(sum(map(len, row.page_table)))
    owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    if copies:  # a copy's row read the source too
        pages += [copy.source for copy in copies]
        generations += [copy.generation for copy in copies]
        owners = torch.cat((owners, torch.tensor([copy.row for copy in copies])))
    values = torch.tensor((pages, generations), device=device)
    return TagPairs(values[0], values[1], owners.to(device))


def build_batch(rows: Sequence[Row], attention: Attention, tiles: RowTiles) -> Batch:
    spans = [Span(0, len(row.token_ids), row.start, row.page_table[0]) for row in rows]

    # Rows that can share an attention call lie together; the order changes no row's result.
    def company(index: int) -> tuple[bool, int]:
        span = spans[index]
        return (True, 0) if span.num_rows > 1 else (False, attention.key_tiles_of(span))

    ordered = sorted(range(len(rows)), key=company)
    ids: list[int] = []
    positions: list[int] = []
    pages: list[int] = []
    laid: list[Span] = []
    first_tokens = [0] * len(rows)
    shift = attention.page_size.bit_length() - 1
    for index in ordered:
        span = spans[index]._replace(first_row=len(ids))
        laid.append(span)
        first_tokens[index] = len(ids)
        ids += rows[index].token_ids
        stop = span.start + span.num_rows
        positions += range(span.start, stop)
        pages += [span.pages[at >> shift] for at in range(span.start, stop)]
    num_tokens = len(ids)
    pieces = tiles.cover(num_tokens)
    spare = sum(pieces) - num_tokens
    table = torch.tensor(
        (ids + [PADDING_ID] * spare, positions + [0] * spare, pages + [0] * spare)
    ).to(attention.device)
    places = attention.places(table[2, :num_tokens], table[1, :num_tokens])
    return Batch(
        num_tokens=num_tokens,
        pieces=pieces,
        token_ids=table[0],
        positions=table[1],
        places=places,
        calls=attention.plans(laid),
        first_tokens=first_tokens,
    )
