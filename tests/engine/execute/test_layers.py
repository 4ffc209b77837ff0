"""Layers against plain formulas, and the self-test that admits row counts."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.execute.arena import Arena
from engine.execute.layers import activation, page_values
from engine.execute.layers.attention import Attention, Span, key_tiles
from engine.execute.layers.linear import Linear
from engine.execute.layers.norm import RmsNorm
from engine.execute.layers.rotary import (
    BLOCK_POSITIONS,
    GrowingTables,
    Rotary,
    frequencies,
    rotate,
    tables,
)
from engine.execute.layers.row_tiles import RowTiles, admit
from engine.execute.weights import RopeScaling
from engine.store.page_codec import QUANTISED, PageLayout

CPU = torch.device("cpu")
TOLERANCES = [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize(("dtype", "atol"), TOLERANCES)
@pytest.mark.parametrize("rows", [1, 17, 123])
def test_rms_norm(rows: int, dtype: torch.dtype, atol: float) -> None:
    x, weight = torch.randn(rows, 90), torch.randn(90)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    found = RmsNorm(weight, 1e-5, dtype=dtype)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=atol, rtol=atol)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert RmsNorm(torch.ones(8), 1e-5, dtype=torch.float32)(torch.zeros(2, 8)).eq(0).all()


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize(("rows", "inside", "outside"), [(1, 80, 72), (5, 97, 31), (33, 64, 7)])
def test_linear(rows: int, inside: int, outside: int, dtype: torch.dtype, atol: float) -> None:
    weight, x = torch.randn(outside, inside), torch.randn(rows, inside)
    linear = Linear(weight.to(dtype))
    assert (linear.in_features, linear.out_features) == (inside, outside)
    torch.testing.assert_close(
        linear(x.to(dtype)).float(), x @ weight.T, atol=atol * 4, rtol=atol / 4
    )
    bias = torch.randn(outside)
    biased = Linear(weight.to(dtype), bias.to(dtype))
    torch.testing.assert_close(
        biased(x.to(dtype)).float(), x @ weight.T + bias, atol=atol * 4, rtol=atol / 4
    )


def test_rms_norm_of_heads_has_a_weight_for_each() -> None:
    x, weight = torch.randn(5, 3, 20)[:, :, :16], torch.randn(3, 16)
    found = RmsNorm(weight, 1e-5, dtype=torch.float32)(x)
    for head in range(3):
        alone = RmsNorm(weight[head], 1e-5, dtype=torch.float32)(x[:, head])
        torch.testing.assert_close(found[:, head], alone, atol=1e-6, rtol=1e-6)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu_by_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3, 5])
@pytest.mark.parametrize("width", [64, 112, 1536, 2050])
@pytest.mark.parametrize(
    ("gate", "formula"), [(activation.silu_mul, silu), (activation.gelu_mul, gelu_by_tanh)]
)
def test_a_gate_gives_a_row_the_same_bits_in_any_batch(
    gate: Callable[[Tensor], Tensor],
    formula: Callable[[Tensor], Tensor],
    width: int,
    threads: int,
    dtype: torch.dtype,
) -> None:
    torch.set_num_threads(threads)
    gate_up = torch.randn(97, 2 * width).to(dtype)
    together = gate(gate_up)
    for row in range(0, 97, 7):
        assert torch.equal(gate(gate_up[row : row + 2])[0], together[row])
    expected = formula(gate_up[:, :width].double()) * gate_up[:, width:].double()
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(together.double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("linear", {"factor": 3.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 8192}),
        ("llama3", {"factor": 32.0, "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ],
)  # fmt: skip
def test_frequencies_equal_transformers(kind: str, rope: dict[str, float]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=576,
        num_attention_heads=9,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": kind, "rope_theta": 100000.0} | rope,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    scaling = RopeScaling(
        kind,  # type: ignore[arg-type]
        rope["factor"],
        int(rope.get("original_max_position_embeddings", 0)),
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 4.0),
    )
    found, attention_factor = frequencies(64, 100000.0, scaling)
    assert torch.equal(found, expected)
    assert attention_factor == pytest.approx(factor)


def test_factors_of_the_checkpoint_divide_frequencies() -> None:
    factors = torch.tensor([1.0, 2.0, 8.0, 32.0])
    plain, _ = frequencies(8, 500.0, None)
    found, _ = frequencies(8, 500.0, RopeScaling("factors"), factors)
    assert torch.equal(found * factors, plain)


def test_tables_know_the_positions_that_were_asked_for() -> None:
    """To the bit what they are when all is computed at once; behind them no memory is touched."""
    turn, length = frequencies(32, 10_000.0, None), 2 * BLOCK_POSITIONS + 7
    grown = GrowingTables(*turn, context_tokens=length)
    whole = tables(*turn, positions=range(length))
    for reached, known in ((1, BLOCK_POSITIONS), (BLOCK_POSITIONS + 1, 2 * BLOCK_POSITIONS),
                           (5, 2 * BLOCK_POSITIONS), (length, length)):  # fmt: skip
        grown.reach(reached)
        for found, expected in zip((grown.cos, grown.sin), whole, strict=True):
            assert torch.equal(found[:known], expected[:known])
            assert not found[known:].any()
    with pytest.raises(AssertionError, match="within the context"):
        grown.reach(length + 1)


def test_rotation_turns_halves_by_position() -> None:
    inverse, factor = frequencies(10, 100.0, None)
    rotary = Rotary(inverse, factor, context_tokens=50, device=CPU)
    x = torch.randn(3, 2, 10)
    positions = torch.tensor([0, 7, 49])
    found = rotate(x, *rotary.at(positions))
    pairs = torch.complex(x[..., :5], x[..., 5:])
    turned = pairs * torch.polar(torch.ones(3, 1, 5), positions[:, None, None] * inverse)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[0], x[0])


@cache
def self_tested_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    *,
    windows: tuple[int | None, ...] = (None,),
) -> Attention:
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        num_layers=2,
        null_page=40,
        context_tokens=512,
        dtype=dtype,
        device=CPU,
        windows=windows,
    )


def make_attention(*shape: Any, **windows: Any) -> Attention:
    """One of its own, which a test may change; the self-test runs once a shape."""
    return copy.copy(self_tested_attention(*shape, **windows))


def plain_attention(
    q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None = None
) -> Tensor:
    """q [tokens, heads, dim], keys and values [kv heads, length, dim] in fp32."""
    group = q.shape[1] // keys.shape[0]
    keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
    scores = q.transpose(0, 1) @ keys.transpose(1, 2)
    positions = start + torch.arange(len(q))[:, None]
    seen = torch.arange(keys.shape[1])[None]
    hidden = (seen > positions) | (seen <= positions - (window or 1 << 30))
    scores = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (scores @ values).transpose(0, 1)


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 12), (5, 5, 10), (7, 1, 16), (4, 1, 256)]
)
@pytest.mark.parametrize("window", [None, 5, 40, 90])
def test_paged_attention_equals_the_formula(
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    atol: float,
    is_wide: bool,
) -> None:
    page_size = 16
    attention = make_attention(heads, kv_heads, dim, page_size, dtype)
    attention.is_wide = attention.is_wide and is_wide
    # Short blocks, so that these spans are long enough for some to be left out.
    attention.shapes = replace(attention.shapes, key_block=64, may_skip=True)
    torch.manual_seed(1)
    arena = torch.randn(41, 2, 2, kv_heads, page_size, dim).to(dtype)
    arena[40] = 0
    spans = [
        Span(0, 1, 4, [3]),
        Span(1, 1, 40, [7, 1, 9]),
        Span(2, 21, 0, [0, 2]),
        Span(23, 37, 150, [11, 12, 30, 31, 32, 33, 5, 6, 8, 10, 20, 21]),
    ]
    total = 60
    q = (torch.randn(total, heads, dim) * dim**-0.5).to(dtype)
    out = attention(
        q,
        arena,
        layer=1,
        calls=attention.plan(spans, window),
        out=torch.zeros(total, heads * dim, dtype=dtype),
    )
    for span in spans:
        kv = arena[list(span.pages), 1].float().permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)
        kv = kv[:, :, : span.start + span.num_rows]
        rows = slice(span.first_row, span.first_row + span.num_rows)
        expected = plain_attention(q[rows].float(), kv[0], kv[1], span.start, window)
        torch.testing.assert_close(
            out[rows].float().view(-1, heads, dim), expected, atol=atol, rtol=atol
        )


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("window", [None, 40])
def test_attention_over_codes_is_that_over_what_they_mean(
    window: int | None, precision: str
) -> None:
    kv_heads, page_size, dim = 2, 16, 12
    attention = make_attention(6, kv_heads, dim, page_size, torch.float32)
    torch.manual_seed(1)
    layout = PageLayout(precision, 2, kv_heads, page_size, dim)
    codes = Arena(layout, attention.null_page, device=CPU)
    values = torch.randn(attention.null_page, 2, 2, kv_heads, page_size, dim)
    for held, part in zip(codes.by_token, page_values.quantise(values, precision), strict=True):
        held[:-1] = part.view(torch.uint8).view(*held[:-1].shape)
    meant = page_values.dequantise(codes.pages.flatten(0, 3), layout)
    spans = [Span(0, 1, 4, [3]), Span(1, 1, 40, [7, 1, 9]), Span(2, 37, 20, [11, 12, 30, 31])]
    queries = torch.randn(39, 6, dim)
    calls = attention.plan(spans, window)
    found, expected = (
        attention(queries, pages, layer=1, calls=calls, out=torch.zeros(39, 6 * dim), codes=of)
        for pages, of in (
            (codes.pages, layout),
            (meant.view(attention.null_page + 1, 2, 2, kv_heads, page_size, dim), None),
        )
    )
    assert found.any()
    assert torch.equal(found, expected)


def test_key_lengths_are_a_coarse_grid_of_64_key_tiles() -> None:
    assert [key_tiles(tiles) for tiles in (1, 4, 5, 16, 17, 63, 65, 500)] == [
        1, 4, 6, 16, 20, 64, 80, 512,
    ]  # fmt: skip


def test_unwritten_keys_do_not_reach_a_result() -> None:
    """Masked lanes still multiply by zero, so the padding page must be finite, and is zero."""
    attention = make_attention(4, 2, 8, 16, torch.float32)
    arena = torch.zeros(41, 2, 2, 2, 16, 8)
    arena[3] = torch.randn_like(arena[3])
    q = torch.randn(1, 4, 8)
    calls = attention.plan([Span(0, 1, 9, [3])])
    out = attention(q, arena, layer=0, calls=calls, out=torch.zeros(1, 32)).clone()
    arena[3, :, :, :, 10:] = 1e4
    again = attention(q, arena, layer=0, calls=calls, out=torch.zeros(1, 32))
    assert torch.equal(out, again)


@pytest.mark.parametrize("is_wide", [True, False])
def test_key_blocks_before_the_window_are_not_read(is_wide: bool) -> None:
    """Single rows of two sequences, and a chunk whose second tile starts a block later."""
    attention = make_attention(4, 1, 16, 16, torch.float32)
    attention.is_wide = is_wide
    attention.shapes = replace(attention.shapes, key_block=64, may_skip=True)
    torch.manual_seed(1)
    arena = torch.randn(41, 2, 2, 1, 16, 16)
    arena[40] = 0
    spans = [Span(0, 1, 200, [*range(13)]), Span(1, 1, 290, [*range(13, 32)])]
    spans.append(Span(2, 150, 110, [*range(20, 37)]))
    q = torch.randn(152, 4, 16)
    plan = attention.plan(spans, 30)
    assert [call.sequences for call in plan] == [2, 1]
    assert [tile.first_key for tile in plan[1].tiles] == [0, 128]

    def run() -> Tensor:
        return attention(q, arena, layer=1, calls=plan, out=torch.zeros(152, 64))

    expected = run()
    arena[[*range(8), *range(13, 29)]] = float("nan")  # up to keys 128 and 256
    assert torch.equal(run()[:2], expected[:2])


def test_rows_within_their_window_share_the_calls_of_full_layers() -> None:
    attention = make_attention(4, 1, 16, 16, torch.float32, windows=(None, 64))
    short, long = Span(0, 1, 63, [*range(4)]), Span(1, 1, 64, [*range(5)])
    same, other = attention.plans([short]), attention.plans([short, long])
    assert same[64] is same[None]
    assert other[64] is not other[None]


def test_row_tiles_cover_batches_with_admitted_sizes_only() -> None:
    tiles = RowTiles((4, 16, 64))
    assert tiles.cover(1) == (4,)
    assert tiles.cover(16) == (16,)
    assert tiles.cover(17) == (64,)
    assert tiles.cover(130) == (64, 64, 4)
    assert tiles.cover(0) == ()


def test_admission_refuses_sizes_and_bases_that_disagree() -> None:
    """A kernel that is off at 8 rows, and one that depends on the row's place below 16."""
    sample = torch.randn(64, 3)

    def off_at_eight(x: Tensor) -> Tensor:
        return x + 1e-7 if len(x) == 8 else x * 1.0

    def uneven(x: Tensor) -> Tensor:
        return x + 1e-7 * torch.arange(len(x))[:, None] if len(x) < 16 else x * 1.0

    sizes = (2, 8, 16, 32, 64)
    assert admit([(off_at_eight, sample)], sizes=sizes).sizes == (2, 16, 32, 64)
    assert admit([(uneven, sample)], sizes=sizes).sizes == (16, 32, 64)
    assert admit([(off_at_eight, sample), (uneven, sample)], sizes=sizes).sizes == (16, 32, 64)

    def always_uneven(x: Tensor) -> Tensor:
        return x + torch.arange(len(x))[:, None]

    assert admit([(always_uneven, sample)], sizes=sizes).sizes == (1,)
