"""Whether kernels compute what the scalar ones do: a small layer through both, at load."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from engine.execute.kernels.cpu import library

Q4_1, Q5_1 = 3, 7  # ggml.h
ROWS, HEADS, DIM, PAGE = 27, 2, 32, 32  # so many rows that tiles of 16 and of 8 take part
WIDTH = HEADS * DIM
QKV = (HEADS + 2) * DIM  # one head of keys and one of values
# They differ in the roundings of fused sums, which may move an integer by one in 32,512, and of
# bf16 queries and weights (0.004 here); what is compiled wrongly, or runs on a CPU it was not made
# for, is far off.
TOLERANCE = 2e-2


@functools.cache
def agrees(functions: ctypes.CDLL, isa: int) -> bool:
    """Whether those of isa, an index into ISAS, can be trusted; leaves them open, on one thread."""
    functions.kagari_open(0, 1)
    expected = probe(functions)
    functions.kagari_open(isa, 1)
    return all(
        bool(((found - wanted).abs() <= TOLERANCE * wanted.abs().max()).all())
        for found, wanted in zip(probe(functions), expected, strict=True)
    )


def probe(functions: ctypes.CDLL) -> tuple[Tensor, ...]:
    """What a small layer gives on its way: a product, attention, a second product, its gate; then
    attention over pages of the other precisions."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=random)
    gain = torch.rand(WIDTH, generator=random) + 0.5
    turns = torch.outer(torch.arange(ROWS), 0.5 ** torch.arange(DIM // 2))
    cos, sin = turns.cos(), turns.sin()
    inner, outer = _Quants(), _Quants()
    qkv, queries = torch.empty(ROWS, QKV), torch.empty(ROWS, WIDTH)
    attended, product = torch.empty(ROWS, WIDTH), torch.empty(ROWS, QKV)
    gated = torch.empty(ROWS, QKV // 2)
    pages = torch.zeros(2 * PAGE * DIM)  # a head's keys and values, in whatever is widest
    arena = library.Arena(pages.data_ptr(), 0, 0, 1, PAGE, DIM, library.PRECISIONS.index("bf16"))
    floats = functions.kagari_attention_scratch(ROWS, HEADS, DIM, ROWS, 1)
    scratch = torch.empty(floats)
    first = _Weights(functions, Q4_1, 20, random)
    second = _Weights(functions, Q5_1, 24, random)  # packed in 8 bits
    rope = library.Rope(
        qkv=qkv.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        queries=queries.data_ptr(),
        arena=arena,
        heads=HEADS,
        query_scale=1 / math.sqrt(DIM),
    )
    attend = library.Attend(
        queries=queries.data_ptr(),
        arena=arena,
        out=attended.data_ptr(),
        quants=ctypes.pointer(outer.struct),
        scratch=scratch.data_ptr(),
        heads=HEADS,
        scratch_floats=floats,
        threads=1,
    )
    layer = library.program(
        [
            library.Norm(
                x=x.data_ptr(),
                gain=gain.data_ptr(),
                quants=ctypes.pointer(inner.struct),
                eps=1e-5,
                width=WIDTH,
            ),
            library.Gemm(
                weight=ctypes.pointer(first.struct),
                in_=ctypes.pointer(inner.struct),
                out=qkv.data_ptr(),
                columns=QKV,
                stride=QKV,
            ),
            rope,
            attend,
            library.Gemm(
                weight=ctypes.pointer(second.struct),
                in_=ctypes.pointer(outer.struct),
                out=product.data_ptr(),
                columns=QKV,
                stride=QKV,
            ),
            library.Gate(in_=product.data_ptr(), out=gated.data_ptr(), width=QKV // 2),
        ]
    )
    positions, zeros = torch.arange(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    span = library.Span(0, ROWS, 0, 0)
    step = library.Step(
        rows=ROWS,
        num_spans=1,
        positions=positions.data_ptr(),
        slots_page=zeros.data_ptr(),
        spans=ctypes.addressof(span),
        pages=zeros.data_ptr(),
    )
    functions.kagari_run(ctypes.addressof(layer.ops), len(layer), ctypes.byref(step))
    found = [qkv, attended.clone(), product, gated]
    attention = library.program([rope, attend])
    for precision in range(len(library.PRECISIONS)):
        rope.arena.precision = attend.arena.precision = precision
        functions.kagari_run(ctypes.addressof(attention.ops), 2, ctypes.byref(step))
        found.append(attended.clone())
    return tuple(found)


class _Quants:
    """Room for ROWS rows of WIDTH integers."""

    def __init__(self) -> None:
        self.planes = torch.empty(2, ROWS, WIDTH, dtype=torch.int8)
        self.scales = torch.empty(ROWS, WIDTH // 32)
        self.sums = torch.empty(ROWS, WIDTH // 16)
        self.struct = library.Quants(
            *(array.data_ptr() for array in (*self.planes, self.scales, self.sums)), WIDTH
        )


class _Weights:
    """Random ones, [QKV, WIDTH], of a GGML type whose blocks begin with a scale and a minimum."""

    def __init__(
        self, functions: ctypes.CDLL, kind: int, block_bytes: int, random: torch.Generator
    ) -> None:
        blocks = torch.randint(
            256, (QKV, WIDTH // 32, block_bytes), dtype=torch.uint8, generator=random
        )
        numbers = torch.rand(QKV, WIDTH // 32, 2, generator=random) * torch.tensor([1 / 16, -0.5])
        blocks[..., :4] = numbers.half().view(torch.uint8)
        self.struct = library.Packed()
        functions.kagari_ggml_form(kind, QKV, WIDTH, ctypes.byref(self.struct))
        size = functions.kagari_packed_bytes(ctypes.byref(self.struct))
        self.data = torch.empty(size, dtype=torch.uint8)
        self.struct.data = self.data.data_ptr()
        functions.kagari_pack_ggml(kind, blocks.data_ptr(), QKV, None, ctypes.byref(self.struct))
