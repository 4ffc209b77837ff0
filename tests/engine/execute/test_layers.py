"""Layers against plain formulas, and the self-test that admits row counts."""

import math

import pytest
import torch
from torch import Tensor

from engine.execute.layers import activation
from engine.execute.layers.attention import Attention, Span, key_tiles
from engine.execute.layers.linear import Linear
from engine.execute.layers.norm import RmsNorm
from engine.execute.layers.rotary import Rotary, frequencies, rotate
from engine.execute.layers.row_tiles import RowTiles, admit
from engine.execute.weights import RopeScaling

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


@pytest.mark.parametrize("threads", [1, 3, 5])
@pytest.mark.parametrize("width", [64, 112, 1536])
def test_silu_mul_gives_a_row_the_same_bits_in_any_batch(threads: int, width: int) -> None:
    torch.set_num_threads(threads)
    gate_up = torch.randn(97, 2 * width)
    together = activation.silu_mul(gate_up)
    for row in range(0, 97, 7):
        assert torch.equal(activation.silu_mul(gate_up[row : row + 2])[0], together[row])
    expected = torch.nn.functional.silu(gate_up[:, :width].double()) * gate_up[:, width:]
    torch.testing.assert_close(together, expected.float(), atol=1e-5, rtol=1e-5)


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


def make_attention(
    heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, context: int = 512
) -> Attention:
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        num_layers=2,
        null_page=40,
        context_tokens=context,
        dtype=dtype,
        device=CPU,
    )


def plain_attention(q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """q [tokens, heads, dim], keys and values [kv heads, length, dim] in fp32."""
    group = q.shape[1] // keys.shape[0]
    keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
    scores = q.transpose(0, 1) @ keys.transpose(1, 2)
    hidden = torch.arange(keys.shape[1])[None] > start + torch.arange(len(q))[:, None]
    scores = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (scores @ values).transpose(0, 1)


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 12), (5, 5, 10), (7, 1, 16)])
def test_paged_attention_equals_the_formula(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, atol: float, is_wide: bool
) -> None:
    page_size = 16
    attention = make_attention(heads, kv_heads, dim, page_size, dtype)
    attention.is_wide = attention.is_wide and is_wide
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
        calls=attention.plan(spans),
        out=torch.zeros(total, heads * dim, dtype=dtype),
    )
    for span in spans:
        kv = arena[list(span.pages), 1].float().permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)
        kv = kv[:, :, : span.start + span.num_rows]
        rows = slice(span.first_row, span.first_row + span.num_rows)
        expected = plain_attention(q[rows].float(), kv[0], kv[1], span.start)
        torch.testing.assert_close(
            out[rows].float().view(-1, heads, dim), expected, atol=atol, rtol=atol
        )


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
