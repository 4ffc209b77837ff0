"""A product's weights as the CPU kernels read them: straight from the file's blocks, never fp32.

Parts of a fused product that the file packs alike become one matrix; a part that it holds as plain
numbers stays torch's (linear.py), beside the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from engine.execute.host_memory import zeros
from engine.execute.kernels.cpu.library import Library, Packed
from engine.execute.weights.facts import Blocks, Checkpoint

CHUNK_BYTES = 64 << 20  # of memory taken at a time; what is not written costs nothing
ALIGNMENT = 64


class Part(NamedTuple):
    """Neighbouring projections of one fused product that are computed together."""

    names: tuple[str, ...]
    columns: range  # of the product
    packed: Packed | None  # None: plain numbers


class Packer:
    """Packs matrices one behind the other; they live as long as it does."""

    def __init__(self, library: Library) -> None:
        self._functions = library.functions
        self._chunks: list[Tensor] = []
        self._used = CHUNK_BYTES

    def parts(self, checkpoint: Checkpoint, names: Sequence[str]) -> list[Part]:
        """names: of weights [outputs, inputs] that share their inputs, in the product's order."""
        found: list[Part] = []
        at = 0
        for is_packed, group in _alike(checkpoint, names):
            rows = [checkpoint.tensors[name].shape[0] for name in group]
            packed = self._pack(checkpoint, group) if is_packed else None
            found.append(Part(group, range(at, at + sum(rows)), packed))
            at += sum(rows)
        return found

    def _pack(self, checkpoint: Checkpoint, names: Sequence[str]) -> Packed:
        shapes = [checkpoint.tensors[name].shape for name in names]
        outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        whole = _read(
            checkpoint, [(name, shape[0]) for name, shape in zip(names, shapes, strict=True)]
        )
        packed = Packed()
        known = self._functions.kagari_ggml_form(whole.kind, outputs, inputs, byref(packed))
        assert known == 0, f"{names[0]}: rows of {inputs} of GGML type {whole.kind} have no kernel"
        packed.data = self._take(self._functions.kagari_packed_bytes(byref(packed))).data_ptr()
        order = None if whole.order is None else torch.tensor(whole.order, dtype=torch.int32)
        self._functions.kagari_pack_ggml(
            whole.kind,
            whole.data.data_ptr(),
            outputs,
            None if order is None else order.data_ptr(),
            byref(packed),
        )
        return packed

    def _take(self, num_bytes: int) -> Tensor:
        if self._used + num_bytes > CHUNK_BYTES:
            self._chunks.append(zeros(max(num_bytes, CHUNK_BYTES), dtype=torch.uint8))
            self._used = 0
        taken = self._chunks[-1][self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return taken


def _alike(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """Whether the kernels read their format, and neighbours of one format."""

    def form(name: str) -> str:
        precision = checkpoint.tensors[name].precision
        return precision if precision.startswith("q") else ""

    for precision, group in groupby(names, form):
        yield precision != "", tuple(group)


def _read(checkpoint: Checkpoint, matrices: Sequence[tuple[str, int]]) -> Blocks:
    """The rows of several, by name and number of rows, as those of one."""
    found: list[Blocks] = []
    order: list[int] = []
    for name, rows in matrices:
        blocks = checkpoint.read_blocks(name)
        assert blocks is not None, f"{name} lies in blocks"
        found.append(blocks)
        first = len(order)
        order += [first + at for at in blocks.order or range(rows)]
    if len(found) == 1:
        return found[0]
    is_ordered = any(blocks.order is not None for blocks in found)
    data = torch.cat([blocks.data for blocks in found])
    return Blocks(found[0].kind, data, order if is_ordered else None)
