"""Codes and scales against the plain formula, and pages from one precision to another."""

from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.store.page_codec import QUANTISED, PageLayout
from engine.store.quantise import LARGEST, Floats, convert, dequantise, quantise

LAYOUT = PageLayout("fp32", num_layers=2, num_kv_heads=3, page_size=16, head_dim=5)
WIDTH = 7
# Sizes of E4M3's codes 0 … 126 (Micikevicius et al., 2022, table 1); 127 is no number.
E4M3 = [
    (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10)
    for code in range(127)
]
numbers = st.floats(-(2.0**126), 2.0**126, width=32) | st.floats(-8, 8, width=32)
vectors = arrays(numpy.float32, (3, WIDTH), elements=numbers)


def plain_scale(largest: float, limit: float) -> float:
    """The least bf16 that is no less than the quotient, as fp32 has it."""
    quotient = numpy.float32(largest) / numpy.float32(limit)
    bits = int(quotient.view(numpy.uint32))
    bits += -bits % (1 << 16)
    return float(numpy.uint32(bits).view(numpy.float32))


def plain_code(value: float, precision: str) -> float:
    """The nearest code; of two the even one."""
    if precision == "int8":
        return float(round(value))
    nearest = min(range(127), key=lambda code: (abs(E4M3[code] - abs(value)), code & 1))
    return E4M3[nearest] if value >= 0 else -E4M3[nearest]


@settings(max_examples=200, deadline=None)
@given(values=vectors, precision=st.sampled_from(QUANTISED))
def test_codes_are_those_of_the_formula(values: Floats, precision: str) -> None:
    codes, scales = quantise(values, precision)
    assert (codes.shape, codes.dtype, scales.shape) == (values.shape, numpy.uint8, (3,))
    found = dequantise(codes, scales, precision)
    for vector, row in zip(values, found, strict=True):
        scale = plain_scale(float(numpy.abs(vector).max()), LARGEST[precision])
        for value, meant in zip(vector, row, strict=True):
            scaled = float(value / numpy.float32(scale)) if scale else 0.0
            assert abs(scaled) <= LARGEST[precision] * (1 + 1e-6), "nothing is clipped"
            assert meant == numpy.float32(plain_code(scaled, precision)) * numpy.float32(scale)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf, -numpy.inf])
def test_what_is_no_number_stays_none(precision: str, bad: float) -> None:
    values = numpy.ones((2, WIDTH), numpy.float32)
    values[1, 3] = bad
    found = dequantise(*quantise(values, precision), precision)
    assert numpy.isnan(found[1]).all()
    assert numpy.allclose(found[0], 1, rtol=2**-4)


def page_of(precision: str, seed: int) -> tuple[bytes, PageLayout]:
    layout = replace(LAYOUT, precision=precision)
    shape = 2 * 2 * 3, layout.page_size, layout.head_dim
    values = numpy.random.default_rng(seed).standard_normal(shape, dtype=numpy.float32)
    return convert(values.tobytes(), LAYOUT, layout), layout


@settings(max_examples=30, deadline=None)
@given(
    given=st.sampled_from(("fp32", "bf16")),
    wanted=st.sampled_from(QUANTISED),
    seed=st.integers(0, 1 << 30),
)
def test_a_page_comes_back_within_a_code(given: str, wanted: str, seed: int) -> None:
    page, layout = page_of(given, seed)
    codes = replace(LAYOUT, precision=wanted)
    converted = convert(page, layout, codes)
    assert len(converted) == codes.page_bytes == 2 * 2 * 3 * 16 * (5 + 2)
    before, after = (
        numpy.frombuffer(convert(*pair, LAYOUT), numpy.float32).reshape(-1, 5)
        for pair in ((page, layout), (converted, codes))
    )
    largest = numpy.abs(before).max(-1, keepdims=True)
    step = (
        largest / 127 if wanted == "int8" else numpy.maximum(abs(before) / 8, largest / 448 / 512)
    )
    assert (numpy.abs(after - before) <= 0.51 * step * (1 + 2**-7)).all()
    # Scales lie behind each head's codes, tokens in order.
    head = numpy.frombuffer(converted, numpy.uint8).reshape(-1, codes.head_bytes)[1]
    scales = head[codes.codes_bytes :].view(numpy.uint16).astype(numpy.uint32) << 16
    expected = [plain_scale(size, LARGEST[wanted]) for size in largest[16:32, 0]]
    assert scales.view(numpy.float32).tolist() == expected


@pytest.mark.parametrize("precision", QUANTISED)
def test_bf16_and_back_is_what_the_codes_mean(precision: str) -> None:
    page, layout = page_of(precision, 4)
    bf16 = replace(LAYOUT, precision="bf16")
    exact = numpy.frombuffer(convert(page, layout, LAYOUT), numpy.float32)
    rounded = numpy.frombuffer(convert(page, layout, bf16), numpy.uint16)
    found = (rounded.astype(numpy.uint32) << 16).view(numpy.float32)
    assert numpy.allclose(found, exact, rtol=2**-8, atol=0)
    assert convert(page, layout, layout) == page


def test_other_differences_are_refused() -> None:
    page, layout = page_of("bf16", 1)
    with pytest.raises(ValueError, match="page_size: 16 and 32"):
        convert(page, layout, replace(layout, precision="fp8", page_size=32))
    with pytest.raises(ValueError, match=f"payload has 3 bytes, want {layout.page_bytes}"):
        convert(b"abc", layout, replace(layout, precision="fp8"))


@pytest.mark.parametrize("precision", QUANTISED)
def test_nearly_twice_as_many_fit(precision: str) -> None:
    codes = PageLayout(precision, num_layers=30, num_kv_heads=3, page_size=64, head_dim=64)
    assert replace(codes, precision="bf16").page_bytes / codes.page_bytes == 128 / 66
    assert precision in codes.layout_id
