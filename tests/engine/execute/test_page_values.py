"""Quantised pages in plain torch: the codes of the codec, read and written in place."""

import math

import numpy
import pytest
import torch

from engine.execute.arena import Arena
from engine.execute.layers import page_values
from engine.store import quantise
from engine.store.page_codec import QUANTISED, PageLayout

LAYER = 1


def layout_of(precision: str, *, dim: int = 10) -> PageLayout:
    return PageLayout(precision, num_layers=3, num_kv_heads=2, page_size=16, head_dim=dim)


def wide_values(*shape: int) -> torch.Tensor:
    """Of sizes far apart, zeros and what is no number among them."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(*shape, generator=random)
    values *= 10 ** (torch.rand(*shape[:-1], 1, generator=random) * 80 - 45)
    values *= 10 ** (-4 * torch.rand(*shape, generator=random))
    flat = values.view(-1, shape[-1])
    flat[0], flat[1] = 0, -0.0
    flat[2, 3], flat[3, 0] = math.nan, math.inf
    return values


@pytest.mark.parametrize("precision", QUANTISED)
def test_codes_and_scales_are_the_codecs(precision: str) -> None:
    values = wide_values(300, 11)
    codes, scales = page_values.quantise(values, precision)
    expected = quantise.quantise(values.numpy(), precision)
    assert torch.equal(codes, torch.from_numpy(expected[0]))
    sane = ~scales.isnan()
    assert sane.tolist() == [index not in (2, 3) for index in range(300)]
    bits = torch.from_numpy(expected[1].view(numpy.int16))
    assert torch.equal(scales.view(torch.int16)[sane], bits[sane])


@pytest.mark.parametrize("precision", QUANTISED)
def test_what_is_written_is_read(precision: str) -> None:
    layout = layout_of(precision)
    arena = Arena(layout, 5, device=torch.device("cpu"))
    arena.pages.fill_(255)
    kv = torch.randn(7, 2, 2, 10, generator=torch.Generator().manual_seed(1))
    pages, tokens = torch.tensor([4, 0, 4, 4, 2, 2, 3]), torch.tensor([0, 15, 3, 15, 7, 8, 1])
    halves = torch.arange(4).view(2, 2)
    places = (pages[:, None, None] * (3 * 4) + halves) * 16 + tokens[:, None, None]
    page_values.write(kv, arena.pages, places, offset=LAYER * 4 * 16, layout=layout)
    heads = arena.pages.flatten(0, 3)
    read = page_values.dequantise(heads, layout).view(6, 3, 2, 2, 16, 10)
    found = read[pages, LAYER, :, :, tokens]
    expected = torch.from_numpy(
        quantise.dequantise(*quantise.quantise(kv.numpy(), precision), precision)
    )
    assert torch.equal(found, expected)
    for held in arena.by_token:
        held[pages, LAYER, :, :, tokens] = 255
    assert bool((arena.pages == 255).all()), "nothing else is written"


@pytest.mark.parametrize("precision", QUANTISED)
def test_an_arena_of_codes_wipes_copies_and_loads_whole_tokens(precision: str) -> None:
    layout = layout_of(precision)
    arena = Arena(layout, 3, device=torch.device("cpu"))
    assert bytes(arena.bytes_of(0)) == bytes(layout.page_bytes)
    payload = numpy.random.default_rng(0).integers(1, 127, layout.page_bytes, numpy.uint8).tobytes()
    arena.load(1, payload)
    assert bytes(arena.bytes_of(1)) == payload
    arena.copy([(1, 2)])
    arena.zero_tails([(1, 9)])
    assert bytes(arena.bytes_of(2)) == payload
    for held, whole in zip(
        (part[1] for part in arena.by_token), (part[2] for part in arena.by_token), strict=True
    ):
        assert torch.equal(held[..., :9, :], whole[..., :9, :])
        assert not held[..., 9:, :].any()
        assert whole[..., 9:, :].all()
    with pytest.raises(ValueError, match=f"want {layout.page_bytes}"):
        arena.load(0, payload[:-1])
