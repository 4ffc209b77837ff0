"""Keys and values of quantised pages in plain torch: codes and their scales; see store/quantise.py.

It serves where the CPU's own kernels do not: on a GPU, in fp32, without a compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.store.page_codec import SCALE_BYTES, PageLayout
from engine.store.quantise import LARGEST


def quantise(values: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """fp32 [..., dim] → codes uint8 [..., dim] and scales bf16 [...]."""
    largest = values.abs().amax(-1)  # a NaN, if there is one
    is_sane = largest.isfinite()
    quotients = torch.where(is_sane, largest, 0) / LARGEST[precision]
    bits = (quotients.view(torch.int32) + 0xFFFF) >> 16 << 16  # up
    scales = bits.view(torch.float32)
    has_codes = is_sane & (scales > 0)
    divisors = torch.where(has_codes, scales, 1)[..., None]
    scaled = torch.where(has_codes[..., None], values, 0) / divisors
    if precision == "int8":
        codes = scaled.round().to(torch.int8)
    else:
        codes = scaled.clamp_(-LARGEST["fp8"], LARGEST["fp8"]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), torch.where(is_sane, scales, torch.nan).to(torch.bfloat16)


def dequantise(heads: Tensor, layout: PageLayout) -> Tensor:
    """uint8 [n, head_bytes] → fp32 [n, page_size, dim]."""
    codes, scales = heads[:, : layout.codes_bytes], heads[:, layout.codes_bytes :]
    codes = codes.view(torch.int8 if layout.precision == "int8" else torch.float8_e4m3fn).float()
    scales = scales.contiguous().view(torch.bfloat16).float()
    return codes.view(-1, layout.page_size, layout.head_dim) * scales[..., None]


def write(kv: Tensor, pages: Tensor, places: Tensor, *, offset: int, layout: PageLayout) -> None:
    """Quantises new keys and values into their pages, in place.

    kv fp32 [tokens, 2, kv heads, dim]; pages uint8 [page][layer][K,V][head][head_bytes]; places
    and offset as for kernels.reference.write_pages, in tokens of heads.
    """
    codes, scales = quantise(kv, layout.precision)
    at = places.view(-1) + offset
    heads = pages.view(-1, layout.head_bytes)
    of_head, token = at // layout.page_size, at % layout.page_size
    stored = heads[:, : layout.codes_bytes].view(-1, layout.page_size, layout.head_dim)
    stored[of_head, token] = codes.view(-1, layout.head_dim)
    stored = heads[:, layout.codes_bytes :].view(-1, layout.page_size, SCALE_BYTES)
    stored[of_head, token] = scales.view(torch.uint8).view(-1, SCALE_BYTES)
