"""Pages from one precision to another, and what the codes of quantised ones mean, in numpy.

A token's key or value of a head is codes under one scale: value = code × scale. The scale is the
largest size ÷ the largest code (127; 448 of E4M3, Micikevicius et al., 2022) in bf16, rounded up,
so that no code is clipped. Zeros have the scale 0, a vector with a NaN or infinity the scale NaN.
The CPU's kernels and engine/execute/layers/page_values.py make the same codes of the same fp32.
"""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from engine.store.page_codec import SCALE_BYTES, PageLayout

LARGEST = {"int8": 127.0, "fp8": 448.0}  # code
Floats = NDArray[numpy.float32]
Bytes = NDArray[numpy.uint8]


def convert(payload: bytes | memoryview, given: PageLayout, wanted: PageLayout) -> bytes:
    """A page's bytes in another precision. Raises ValueError where more than that differs, or on a
    payload of another length.

    From fp32 each value is rounded once. A page that was computed in fp32 and kept in bf16 has been
    rounded before, so its codes may differ from those that an engine would have written itself.
    """
    grid = "num_layers", "num_kv_heads", "page_size", "head_dim"
    for name in grid:
        if getattr(given, name) != getattr(wanted, name):
            raise ValueError(f"{name}: {getattr(given, name)} and {getattr(wanted, name)}")
    if len(payload) != given.page_bytes:
        raise ValueError(f"payload has {len(payload)} bytes, want {given.page_bytes}")
    if given.precision == wanted.precision:
        return bytes(payload)
    return _bytes_of(_values_of(payload, given), wanted.precision)


def quantise(values: Floats, precision: str) -> tuple[Bytes, NDArray[numpy.uint16]]:
    """values [..., dim] → codes [..., dim] and their scales [...], the bits of bf16."""
    sizes = numpy.abs(values)
    largest = sizes.max(-1)
    is_sane = numpy.isfinite(largest)
    limit = numpy.float32(LARGEST[precision])
    scales = (numpy.where(is_sane, largest, 0) / limit).astype(numpy.float32)
    bits = ((scales.view(numpy.uint32) + 0xFFFF) >> 16).astype(numpy.uint16)
    has_codes = is_sane & (bits > 0)
    divisors = numpy.where(has_codes, _from_bf16(bits), numpy.float32(1))[..., None]
    scaled = (numpy.where(has_codes[..., None], values, 0) / divisors).astype(numpy.float32)
    if precision == "int8":
        codes = numpy.rint(scaled).astype(numpy.int8).view(numpy.uint8)
    else:
        codes = _to_e4m3(scaled)
    return codes, numpy.where(is_sane, bits, 0x7FC0).astype(numpy.uint16)


def dequantise(codes: Bytes, scales: NDArray[numpy.uint16], precision: str) -> Floats:
    """codes [..., dim] and scales [...] as bf16's bits → values [..., dim]."""
    integers = codes.view(numpy.int8).astype(numpy.float32) if precision == "int8" else _E4M3[codes]
    return integers * _from_bf16(scales)[..., None]


def _values_of(payload: bytes | memoryview, layout: PageLayout) -> Floats:
    """fp32 [heads of all layers, token, dim]."""
    shape = -1, layout.page_size, layout.head_dim
    if layout.precision == "fp32":
        return numpy.frombuffer(payload, numpy.float32).reshape(shape)
    if layout.precision == "bf16":
        return _from_bf16(numpy.frombuffer(payload, numpy.uint16)).reshape(shape)
    heads = numpy.frombuffer(payload, numpy.uint8).reshape(-1, layout.head_bytes)
    codes = heads[:, : layout.codes_bytes].reshape(shape)
    scales = numpy.ascontiguousarray(heads[:, layout.codes_bytes :]).view(numpy.uint16)
    return dequantise(codes, scales, layout.precision)


def _bytes_of(values: Floats, precision: str) -> bytes:
    if precision == "fp32":
        return values.tobytes()
    if precision == "bf16":
        return _to_bf16(values).tobytes()
    codes, scales = quantise(values, precision)
    heads = len(values)
    parts = codes.reshape(heads, -1), scales.view(numpy.uint8).reshape(heads, -1)
    assert parts[1].shape[1] == values.shape[1] * SCALE_BYTES, "a scale a token"
    return numpy.concatenate(parts, 1).tobytes()


def _from_bf16(bits: NDArray[numpy.uint16]) -> Floats:
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def _to_bf16(values: Floats) -> NDArray[numpy.uint16]:
    """To nearest, ties to even; a NaN stays one."""
    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return numpy.where(numpy.isnan(values), 0x7FC0, rounded).astype(numpy.uint16)


def _to_e4m3(values: Floats) -> Bytes:
    """To nearest, ties to even; no size above 448 by more than a rounding."""
    bits = values.view(numpy.uint32)
    sizes = bits & 0x7FFFFFFF
    normal = ((sizes + 0x7FFFF + (sizes >> 20 & 1)) >> 20) - (120 << 3)
    # Below 2⁻⁶ codes are multiples of 2⁻⁹, which the sum rounds to.
    raised = numpy.abs(values) + numpy.float32(2**14)
    subnormal = raised.view(numpy.uint32) - numpy.float32(2**14).view(numpy.uint32)
    codes = numpy.where(sizes < 0x3C800000, subnormal, normal)
    return (codes | bits >> 24 & 0x80).astype(numpy.uint8)


def _e4m3_values() -> Floats:
    codes = numpy.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = numpy.where(
        exponents > 0, (8 + mantissas) * 2.0 ** (exponents - 10), mantissas * 2.0**-9
    )
    sizes[codes & 127 == 127] = numpy.nan
    return numpy.where(codes > 127, -sizes, sizes).astype(numpy.float32)


_E4M3 = _e4m3_values()
