"""Compiled attention and rotary embedding against plain torch, and bit for bit with themselves."""

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from engine.config import ConfigError
from engine.execute.arena import DTYPES, Arena
from engine.execute.kernels.cpu import library
from engine.execute.kernels.cpu.library import Library
from engine.execute.layers.rotary import Rotary, rotate
from engine.execute.models.program import addresses
from engine.store.page_codec import QUANTISED, PageLayout
from engine.store.quantise import dequantise, quantise
from tests.engine.execute.planes import values_of

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
    precision: str = "bf16"

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.precision, LAYERS, self.kv_heads, self.page_size, self.dim)


@dataclass(frozen=True)
class Tokens:
    """keys, values [tokens, kv heads, dim] as the pages mean them, and what these hold of them, see
    Arena.by_token; queries [tokens, heads, dim]."""

    keys: Tensor
    values: Tensor
    stored: tuple[Tensor, ...]  # each [K V, tokens, kv heads, …]
    queries: Tensor


def stored_as(precision: str, kv: Tensor) -> tuple[Tensor, ...]:
    """What pages hold of fp32 keys and values."""
    if precision in DTYPES:
        return (kv.to(DTYPES[precision]),)
    codes, scales = quantise(kv.numpy(), precision)
    return torch.from_numpy(codes), torch.from_numpy(scales[..., None].view(numpy.uint8))


def meaning(precision: str, stored: Sequence[Tensor]) -> Tensor:
    """fp32; the other way round."""
    if precision in DTYPES:
        return stored[0].float()
    codes, scales = (part.contiguous().numpy() for part in stored)
    return torch.from_numpy(dequantise(codes, scales.view(numpy.uint16)[..., 0], precision))


def random_sequence(shape: Shape, tokens: int, *, seed: int, value_scale: float = 1.0) -> Tokens:
    random = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, tokens, shape.kv_heads, shape.dim, generator=random)
    kv[1] *= value_scale
    stored = stored_as(shape.precision, kv)
    meant = meaning(shape.precision, stored)
    queries = torch.randn(tokens, shape.heads, shape.dim, generator=random)
    return Tokens(meant[0], meant[1], stored, queries * (2.0 / math.sqrt(shape.dim)))


def poisoned(shape: Shape, num_pages: int) -> Arena:
    """All its bytes are 255: NaN in every precision, and a NaN scale."""
    arena = Arena(shape.layout, num_pages, device=torch.device("cpu"))
    arena.pages.view(torch.uint8).fill_(255)
    return arena


def attend(
    kernels: Library,
    shape: Shape,
    spans: Sequence[tuple[Tokens, int, int]],
    *,
    shared: Sequence[tuple[int, int]] = (),
    scratch_floats: int | None = None,
    quants: library.Quants | None = None,
    is_wanted: bool = True,
) -> Tensor:
    """One step over (sequence, start, rows) → [all rows, heads, dim]. Pages are scattered; what no
    row may see is NaN, and so is a page that tables name beyond the visible keys. `shared`: of each
    span, the span whose first pages it has too, and how many."""
    size = shape.page_size
    tables = [-(-(start + rows) // size) for _, start, rows in spans]
    scattered = torch.randperm(sum(tables) + 1, generator=torch.Generator().manual_seed(9))
    arena = poisoned(shape, sum(tables) + 1)
    pages, places, first_row = [], [], 0
    for span, ((sequence, start, rows), count) in enumerate(zip(spans, tables, strict=True)):
        places.append(library.Span(first_row, rows, start, len(pages)))
        first_row += rows
        of, num_shared = shared[span] if shared else (span, 0)
        known = places[of].first_page
        own = pages[known : known + num_shared] + scattered[num_shared:count].tolist()
        scattered = scattered[count:]
        seen = max(0, start - shape.window + 1) if shape.window else 0
        for index, page in enumerate(own):
            begin, stop = max(index * size, seen), min((index + 1) * size, start + rows)
            at = slice(begin - index * size, stop - index * size)
            for held, part in zip(arena.by_token, sequence.stored, strict=True):
                if begin < stop:
                    held[page, LAYER, :, :, at] = part[:, begin:stop].transpose(1, 2)
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
        arena=addresses(arena, LAYER),
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


@pytest.mark.parametrize(
    ("precision", "window"),
    [*product(("fp32", "bf16"), (0, 40, 300)), ("int8", 0), ("int8", 40), ("fp8", 0), ("fp8", 300)],
)
@pytest.mark.parametrize("sizes", SHAPES)
def test_attend_equals_plain_softmax(
    kernels: Library, sizes: tuple[int, int, int, int], window: int, precision: str
) -> None:
    """Decode rows and chunks in one step. All precisions are read exactly; bf16 instructions round
    queries and weights, as plain bf16 attention does."""
    shape = Shape(*sizes, window=window, precision=precision)
    spans = [
        (random_sequence(shape, start + rows, seed=seed), start, rows)
        for seed, (start, rows) in enumerate(DECODES + CHUNKS)
    ]
    found = attend(kernels, shape, spans)
    expected = torch.cat([plain(shape, *span) for span in spans])
    is_rounded = kernels.isa in ("avx512_bf16", "amx") and precision != "fp32"
    assert_close(found.double(), expected, atol=2e-2 if is_rounded else 1e-5, rtol=0)
    if is_rounded:
        assert (found.double() - expected).std() < 2e-3


@pytest.mark.parametrize(
    ("precision", "window"), [("bf16", 0), ("bf16", 20), ("bf16", 300), ("int8", 300), ("fp8", 0)]
)
@pytest.mark.parametrize("sizes", [(3, 3, 16, 16), (9, 3, 64, 64), (7, 1, 48, 128)])
def test_rows_do_not_depend_on_company(
    isa: str, sizes: tuple[int, int, int, int], window: int, precision: str
) -> None:
    """Whole, chunked, one by one, in a batch, on one thread, unsplit: the same bits."""
    shape = Shape(*sizes, window=window, precision=precision)
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


PREFIXES = [  # of each sequence: the one it begins like, tokens of that, tokens in all
    (0, 0, 1700), (0, 1300, 1301), (0, 1300, 1500), (0, 512, 900), (3, 640, 1537), (0, 512, 513),
    (0, 128, 300), (7, 0, 2000), (7, 1024, 1025), (7, 1024, 1281), (10, 0, 40), (0, 1664, 1701),
]  # fmt: skip


def sharing_sequences(shape: Shape, prefixes: Sequence[tuple[int, int, int]]) -> list[Tokens]:
    """Sequences of (tokens as another's, its own after them)."""
    made: list[Tokens] = []
    for seed, (of, cut, tokens) in enumerate(prefixes):
        own = random_sequence(shape, tokens, seed=seed)
        first = made[of] if cut else own
        made.append(
            Tokens(
                torch.cat([first.keys[:cut], own.keys[cut:]]),
                torch.cat([first.values[:cut], own.values[cut:]]),
                tuple(
                    torch.cat([a[:, :cut], b[:, cut:]], 1)
                    for a, b in zip(first.stored, own.stored, strict=True)
                ),
                own.queries,
            )
        )
    return made


@pytest.mark.parametrize("precision", library.PRECISIONS)
@pytest.mark.parametrize(
    "sizes", [(3, 3, 16, 16), (9, 3, 64, 64), (7, 1, 48, 128), (4, 2, 128, 512), (40, 2, 64, 64)]
)
def test_rows_do_not_depend_on_who_shares_their_pages(
    isa: str, sizes: tuple[int, int, int, int], precision: str
) -> None:
    """A tree of prefixes, its sequences in any order, beside a chunk: the bits of each alone."""
    shape = Shape(*sizes, precision=precision)
    sequences = sharing_sequences(shape, PREFIXES)
    known = [0, 7, 3]  # whose pages others have, in this order: 3 has some of 0's
    others = sorted(set(range(len(PREFIXES))) - set(known))
    order = known + numpy.random.default_rng(1).permutation(others).tolist()
    places = {index: place for place, index in enumerate(order)}
    spans = [(sequences[i], PREFIXES[i][2] - 1, 1) for i in order]
    shared = [(places[PREFIXES[i][0]], PREFIXES[i][1] // shape.page_size) for i in order]
    assert all(of <= place for place, (of, _) in enumerate(shared)), "a place is known before use"
    chunk = (random_sequence(shape, 700, seed=99), 500, 150)
    for threads in (1, 2):
        kernels = library.load(isa=isa, threads=threads)
        assert kernels is not None
        alone = torch.cat([attend(kernels, shape, [span]) for span in spans])
        together = attend(kernels, shape, spans, shared=shared)
        assert torch.equal(together.view(torch.int32), alone.view(torch.int32))
        mixed = attend(kernels, shape, [*spans, chunk], shared=[*shared, (len(spans), 0)])
        assert torch.equal(mixed[:-150].view(torch.int32), alone.view(torch.int32))
        cramped = attend(kernels, shape, spans, shared=shared, scratch_floats=0)
        assert torch.equal(cramped.view(torch.int32), alone.view(torch.int32))
        kernels.close()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_rows_of_subnormal_sums_do_not_depend_on_company(kernels: Library, precision: str) -> None:
    """Units that take subnormal numbers for 0 and others that do not may share no row."""
    shape = Shape(9, 3, 64, 64, precision=precision)
    tokens = 300
    sequence = random_sequence(shape, tokens, seed=1, value_scale=1e-37)
    whole = attend(kernels, shape, [(sequence, 0, tokens)])
    one_by_one = attend(kernels, shape, [(sequence, position, 1) for position in range(tokens)])
    assert whole.abs().max() > 2.0**-126
    assert whole.abs().min() < 2.0**-126
    assert torch.equal(one_by_one.view(torch.int32), whole.view(torch.int32))


@pytest.mark.parametrize("is_fast", [False, True])
def test_attend_quantises_whole_rows(kernels: Library, is_fast: bool) -> None:
    shape = Shape(9, 3, 64, 64)
    sequence = random_sequence(shape, 700, seed=3)
    spans = [(sequence, 699, 1), (sequence, 100, 50)]
    rows, width = 51, 9 * 64
    planes = torch.zeros(2, rows, width, dtype=torch.int8)
    scales = torch.zeros(rows, width // 32)
    sums = torch.zeros(rows, width // 16)
    quants = library.Quants(
        high=planes[0].data_ptr(),
        low=None if is_fast else planes[1].data_ptr(),
        scales=scales.data_ptr(),
        sums=sums.data_ptr(),
        width=width,
    )
    out = attend(kernels, shape, spans, quants=quants)
    integers = planes[0].int() if is_fast else values_of(planes[0], planes[1], kernels.isa)
    summed = integers.view(rows, -1, 2, 16).sum(3)
    summed[:, :, 0] += summed[:, :, 1]
    assert torch.equal((summed * scales[:, :, None]).flatten(1), sums)
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


@pytest.mark.parametrize("precision", library.PRECISIONS)
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
    precision: str,
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

    shape = Shape(heads, kv_heads, dim, page_size, precision=precision)
    arena = poisoned(shape, num_pages)
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
        arena=addresses(arena, LAYER),
        heads=heads,
        eps=eps,
        query_scale=scale,
    )
    kernels.run(library.program([op]), step)

    assert_close(queries, expected[:, :heads] * scale, atol=2e-6 if is_normed else 0.0, rtol=0)
    kv = torch.stack((expected[:, heads:], qkv[:, heads + kv_heads :]))
    stored = stored_as(precision, kv)
    at = (pages, LAYER, slice(None), slice(None), positions % page_size)
    found = [held[at].transpose(0, 1) for held in arena.by_token]
    if is_normed:  # a rounding may fall to the other side
        keys, wanted = meaning(precision, found)[0], meaning(precision, stored)[0]
        largest = wanted.abs().amax(-1, keepdim=True)
        step = {"fp32": 0, "bf16": 2**-8, "int8": 1 / 126, "fp8": 2**-4}[precision] * largest
        assert ((keys - wanted).abs() <= 1.02 * step + 2e-6).all()
        found, stored = [part[1:] for part in found], tuple(part[1:] for part in stored)
    for part, wanted in zip(found, stored, strict=True):
        assert torch.equal(part, wanted)
    for held in arena.by_token:
        held.view(torch.uint8)[at] = 255
    assert bool((arena.pages.view(torch.uint8) == 255).all()), "nothing else is written"


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("dim", [10, 64])
def test_codes_of_any_size_are_those_of_the_formula(
    kernels: Library, dim: int, precision: str
) -> None:
    """Of values, which nothing turns: subnormal to nearly infinite, some zero, some no numbers."""
    random = torch.Generator().manual_seed(6)
    rows, kv_heads = 64, 2
    qkv = torch.randn(rows, 3, kv_heads, dim, generator=random)
    qkv *= 10 ** (torch.rand(rows, 1, 1, 1, generator=random) * 83 - 45)
    qkv *= 10 ** (-4 * torch.rand(rows, 1, 1, dim, generator=random))
    qkv[:3] = 0
    qkv[3, :, 1, 5], qkv[4, :, 0, 0], qkv[5, :, 0, dim - 1] = math.nan, math.inf, -math.inf
    qkv[6], qkv[7] = torch.finfo().max, -torch.finfo().smallest_normal
    shape = Shape(kv_heads, kv_heads, dim, 64, precision=precision)
    arena = poisoned(shape, 1)
    turns = torch.ones(rows, dim // 2), torch.zeros(rows, dim // 2)
    positions, pages = torch.arange(rows).int(), torch.zeros(rows).int()
    queries = torch.zeros(rows, kv_heads, dim)
    step = library.Step(rows=rows, positions=positions.data_ptr(), slots_page=pages.data_ptr())
    op = library.Rope(
        qkv=qkv.data_ptr(),
        cos=turns[0].data_ptr(),
        sin=turns[1].data_ptr(),
        queries=queries.data_ptr(),
        arena=addresses(arena, LAYER),
        heads=kv_heads,
        query_scale=1,
    )
    kernels.run(library.program([op]), step)
    for held, wanted in zip(arena.by_token, stored_as(precision, qkv[:, 2]), strict=True):
        assert torch.equal(held[0, LAYER, 1].transpose(0, 1), wanted)
    scales = arena.by_token[1].view(torch.bfloat16)[0, LAYER, 1]
    assert bool((scales[:, :3] == 0).all())
    assert scales[:, 3:6].isnan().nonzero()[:, :2].tolist() == [[0, 1], [0, 2], [1, 0]]
