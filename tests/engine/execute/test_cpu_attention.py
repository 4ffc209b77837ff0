"""Compiled attention and rotary embedding against plain torch, and bit for bit with themselves."""

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from engine.config import ConfigError
from engine.execute.kernels.cpu import library
from engine.execute.kernels.cpu.library import Library
from engine.execute.layers.rotary import Rotary, rotate

# (heads, kv heads, dim, page size): groups 1, 3, 4, 7 and dims that are no power of two.
SHAPES = [(3, 3, 16, 16), (9, 3, 64, 64), (4, 1, 48, 16), (7, 1, 128, 128), (4, 2, 256, 64)]
DECODES = [(context - 1, 1) for context in (1, 63, 64, 65, 255, 256, 257, 700, 2049)]
CHUNKS = [(0, 70), (190, 131), (254, 3), (1000, 33)]  # (start, rows)
LAYERS, LAYER = 2, 1


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    try:
        if library.load(isa=request.param) is None:
            pytest.skip(str(library.why_absent()))
    except ConfigError:
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture
def kernels(isa: str) -> Iterator[Library]:
    loaded = library.load(isa=isa, threads=2)
    assert loaded is not None
    yield loaded
    loaded.close()


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    window: int = 0
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Tokens:
    """keys, values [tokens, kv heads, dim] as the pages hold them; queries [tokens, heads, dim]."""

    keys: Tensor
    values: Tensor
    queries: Tensor


def random_sequence(shape: Shape, tokens: int, *, seed: int) -> Tokens:
    random = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, tokens, shape.kv_heads, shape.dim, generator=random).to(shape.dtype)
    queries = torch.randn(tokens, shape.heads, shape.dim, generator=random)
    return Tokens(kv[0], kv[1], queries * (2.0 / math.sqrt(shape.dim)))


def addresses(arena: Tensor, shape: Shape) -> library.Arena:
    return library.Arena(
        data=arena.data_ptr(),
        page_stride=arena[0].nbytes,
        layer_offset=LAYER * arena[0, 0].nbytes,
        kv_heads=shape.kv_heads,
        page_size=shape.page_size,
        dim=shape.dim,
        precision=library.PRECISIONS.index("fp32" if arena.dtype == torch.float32 else "bf16"),
    )


def attend(
    kernels: Library,
    shape: Shape,
    spans: Sequence[tuple[Tokens, int, int]],
    *,
    scratch_floats: int | None = None,
    quants: library.Quants | None = None,
    is_wanted: bool = True,
) -> Tensor:
    """One step over (sequence, start, rows) → [all rows, heads, dim]. Pages are scattered; what no
    row may see is NaN, and so is a page that tables name beyond the visible keys."""
    size = shape.page_size
    tables = [-(-(start + rows) // size) for _, start, rows in spans]
    scattered = torch.randperm(sum(tables) + 1, generator=torch.Generator().manual_seed(9))
    arena = torch.full(
        (sum(tables) + 1, LAYERS, 2, shape.kv_heads, size, shape.dim), math.nan, dtype=shape.dtype
    )
    pages, places, first_row = [], [], 0
    for (sequence, start, rows), count in zip(spans, tables, strict=True):
        places.append(library.Span(first_row, rows, start, len(pages)))
        first_row += rows
        own = scattered[:count].tolist()
        scattered = scattered[count:]
        seen = max(0, start - shape.window + 1) if shape.window else 0
        for side, of in enumerate((sequence.keys, sequence.values)):
            for index, page in enumerate(own):
                begin = max(index * size, seen)
                tokens = of[begin : min((index + 1) * size, start + rows)]
                at = begin - index * size
                if len(tokens):
                    arena[page, LAYER, side, :, at : at + len(tokens)] = tokens.transpose(0, 1)
        # A page before the window may be someone else's by now.
        pages += [page if (i + 1) * size > seen else 10**9 for i, page in enumerate(own)]
        pages += [10**9]
    queries = torch.cat([s.queries[start : start + rows] for s, start, rows in spans]).contiguous()
    out = torch.full_like(queries, math.nan)
    context = max(start + rows for _, start, rows in spans)
    needed = kernels.functions.kagari_attention_scratch(
        first_row, shape.heads, shape.dim, context, kernels.threads
    )
    scratch = torch.full((needed + 64,), math.nan)
    table = torch.tensor(pages, dtype=torch.int32)
    span_array = (library.Span * len(places))(*places)
    step = library.Step(
        rows=first_row,
        num_spans=len(places),
        spans=ctypes.addressof(span_array),
        pages=table.data_ptr(),
    )
    op = library.Attend(
        queries=queries.data_ptr(),
        arena=addresses(arena, shape),
        out=out.data_ptr() if is_wanted else None,
        quants=ctypes.pointer(quants) if quants else None,
        scratch=scratch.data_ptr(),
        heads=shape.heads,
        window=shape.window,
        scratch_floats=needed if scratch_floats is None else scratch_floats,
        threads=kernels.threads,
    )
    kernels.run(library.program([op]), step)
    assert scratch[needed:].isnan().all(), "nothing is written behind the scratch"
    return out


def plain(shape: Shape, sequence: Tokens, start: int, rows: int) -> Tensor:
    """[rows, heads, dim] in fp64."""
    end, group = start + rows, shape.heads // shape.kv_heads
    keys = sequence.keys[:end].double().repeat_interleave(group, 1)
    values = sequence.values[:end].double().repeat_interleave(group, 1)
    scores = torch.einsum("rhd,khd->hrk", sequence.queries[start:end].double(), keys)
    ahead = torch.arange(end)[None] - torch.arange(start, end)[:, None]
    hidden = ahead > 0
    if shape.window:
        hidden |= ahead <= -shape.window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize("sizes", SHAPES)
def test_attend_equals_plain_softmax(
    kernels: Library, sizes: tuple[int, int, int, int], window: int, dtype: torch.dtype
) -> None:
    """Decode rows and chunks in one step. Both dtypes are read exactly; bf16 instructions round
    queries and weights, as plain bf16 attention does."""
    shape = Shape(*sizes, window=window, dtype=dtype)
    spans = [
        (random_sequence(shape, start + rows, seed=seed), start, rows)
        for seed, (start, rows) in enumerate(DECODES + CHUNKS)
    ]
    found = attend(kernels, shape, spans)
    expected = torch.cat([plain(shape, *span) for span in spans])
    is_rounded = kernels.isa == "avx512_bf16" and dtype == torch.bfloat16
    assert_close(found.double(), expected, atol=2e-2 if is_rounded else 1e-5, rtol=0)
    if is_rounded:
        assert (found.double() - expected).std() < 2e-3


@pytest.mark.parametrize("window", [0, 20, 300])
@pytest.mark.parametrize("sizes", [(3, 3, 16, 16), (9, 3, 64, 64), (7, 1, 48, 128)])
def test_rows_do_not_depend_on_company(
    isa: str, sizes: tuple[int, int, int, int], window: int
) -> None:
    """Whole, chunked, one by one, in a batch, on one thread, unsplit: the same bits."""
    shape = Shape(*sizes, window=window)
    tokens = 600
    sequence = random_sequence(shape, tokens, seed=1)
    other = random_sequence(shape, 1500, seed=2)
    kernels = library.load(isa=isa, threads=2)
    assert kernels is not None
    whole = attend(kernels, shape, [(sequence, 0, tokens)])
    assert whole.isfinite().all()
    cuts = [0, 1, 64, 130, 255, 256, 500, tokens]
    chunks = [(sequence, a, b - a) for a, b in pairwise(cuts)]
    one_by_one = [(sequence, position, 1) for position in range(tokens)]
    ways = {
        "chunks, a step each": torch.cat([attend(kernels, shape, [chunk]) for chunk in chunks]),
        "chunks in one step": attend(kernels, shape, chunks),
        "one by one in one step": attend(kernels, shape, one_by_one),
        "beside others": attend(kernels, shape, [(other, 1499, 1), *chunks, (other, 0, 77)])[1:-77],
        "one by one": torch.cat([attend(kernels, shape, [row]) for row in one_by_one[::7]]),
    }
    unsplit = [attend(kernels, shape, [row], scratch_floats=0) for row in one_by_one[::7]]
    alone = library.load(isa=isa, threads=1)
    assert alone is not None
    ways["on one thread"] = attend(alone, shape, [(sequence, 0, tokens)])
    for way, found in ways.items():
        expected = whole[::7] if way == "one by one" else whole
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), way
    assert torch.equal(torch.cat(unsplit), whole[::7])


@pytest.mark.parametrize("is_fast", [False, True])
def test_attend_quantises_whole_rows(kernels: Library, is_fast: bool) -> None:
    shape = Shape(9, 3, 64, 64)
    sequence = random_sequence(shape, 700, seed=3)
    spans = [(sequence, 699, 1), (sequence, 100, 50)]
    rows, width = 51, 9 * 64
    planes = torch.zeros(2, rows, width, dtype=torch.int8)
    scales = torch.zeros(rows, width // 32)
    sums = torch.zeros(rows, width // 16, dtype=torch.int32)
    quants = library.Quants(
        high=planes[0].data_ptr(),
        low=None if is_fast else planes[1].data_ptr(),
        scales=scales.data_ptr(),
        sums=sums.data_ptr(),
        width=width,
    )
    out = attend(kernels, shape, spans, quants=quants)
    integers = planes[0].int() if is_fast else planes[0].int() * 256 + planes[1].int()
    assert torch.equal(integers.view(rows, -1, 16).sum(-1, dtype=torch.int32), sums)
    steps = scales.repeat_interleave(32, 1)
    assert ((integers * steps - out.view(rows, -1)).abs() <= 0.51 * steps).all()
    assert (steps > 0).all()
    before = [planes.clone(), scales.clone(), sums.clone()]
    for part in (planes, scales, sums):
        part.zero_()
    unwanted = attend(kernels, shape, spans, quants=quants, is_wanted=False)
    assert unwanted.isnan().all()
    for part, expected in zip((planes, scales, sums), before, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"), [(9, 3, 64, 64), (4, 1, 256, 16), (3, 3, 10, 16)]
)
@pytest.mark.parametrize("is_normed", [False, True])
def test_rope_equals_rotary(
    kernels: Library,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    is_normed: bool,
    dtype: torch.dtype,
) -> None:
    """Without norms bit for bit: plain products and sums in both."""
    random = torch.Generator().manual_seed(5)
    rows, num_pages, eps, scale = 19, 40, 1e-5, 0.125
    positions = torch.randperm(300, generator=random)[:rows]
    pages = torch.randperm(num_pages, generator=random)[:rows]
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=random)
    gain = torch.randn(heads + kv_heads, dim, generator=random)
    inverse = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(300).float()[:, None] * inverse[None]
    tables = Rotary(inverse, 1.0, context_tokens=300, device=torch.device("cpu"))
    turned = qkv[:, : heads + kv_heads]
    if is_normed:
        turned = torch.nn.functional.rms_norm(turned, (dim,), eps=eps) * gain
    expected = rotate(turned, *tables.at(positions))

    arena = torch.full((num_pages, LAYERS, 2, kv_heads, page_size, dim), -7.0, dtype=dtype)
    queries = torch.zeros(rows, heads, dim)
    cos, sin = angles.cos(), angles.sin()
    position_array, page_array = positions.int(), pages.int()
    step = library.Step(
        rows=rows, positions=position_array.data_ptr(), slots_page=page_array.data_ptr()
    )
    op = library.Rope(
        qkv=qkv.data_ptr(),
        gain=gain.data_ptr() if is_normed else None,
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        queries=queries.data_ptr(),
        arena=addresses(arena, Shape(heads, kv_heads, dim, page_size)),
        heads=heads,
        eps=eps,
        query_scale=scale,
    )
    kernels.run(library.program([op]), step)

    at = (pages, slice(LAYER, LAYER + 1), slice(None), slice(None), positions % page_size)
    written = arena[at].reshape(rows, 2, kv_heads, dim)
    atol = 2e-6 if is_normed else 0.0
    assert_close(queries, expected[:, :heads] * scale, atol=atol, rtol=0)
    keys = expected[:, heads:]
    if dtype == torch.bfloat16 and is_normed:  # a rounding may fall to the other side
        assert_close(written[:, 0].float(), keys, atol=0, rtol=2**-8)
    else:
        assert_close(written[:, 0], keys.to(dtype), atol=atol, rtol=0)
    assert torch.equal(written[:, 1], qkv[:, heads + kv_heads :].to(dtype))
    assert int((arena != -7.0).sum()) == rows * 2 * kv_heads * dim, "nothing else is written"
