"""A page's bytes come back only as the page that was asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.store.page_codec import (
    HEADER_BYTES,
    Page,
    PageFault,
    PageLayout,
    decode_page,
    encode_page,
)

LAYOUT = PageLayout("bf16", num_layers=2, num_kv_heads=3, page_size=16, head_dim=4)
KEY = bytes(range(32))
PAYLOAD = bytes(at % 251 for at in range(LAYOUT.page_bytes))
BLOB = encode_page(PAYLOAD, page_key=KEY, layout=LAYOUT, generation=7)


def test_round_trip_keeps_payload_and_generation() -> None:
    page = decode_page(BLOB, page_key=KEY, layout=LAYOUT)
    assert isinstance(page, Page)
    assert (page.generation, bytes(page.payload)) == (7, PAYLOAD)


@settings(max_examples=150)
@given(bit=st.integers(0, len(BLOB) * 8 - 1))
def test_any_flipped_bit_is_detected(bit: int) -> None:
    damaged = bytearray(BLOB)
    damaged[bit // 8] ^= 1 << (bit % 8)
    assert decode_page(damaged, page_key=KEY, layout=LAYOUT) == PageFault("corrupt")


@settings(max_examples=50)
@given(length=st.integers(0, len(BLOB) - 1))
def test_a_torn_page_is_detected(length: int) -> None:
    assert decode_page(BLOB[:length], page_key=KEY, layout=LAYOUT) == PageFault("torn")
    assert decode_page(BLOB + b"x", page_key=KEY, layout=LAYOUT) == PageFault("torn")


def test_another_key_is_foreign_even_when_half_of_it_agrees() -> None:
    other = KEY[:16] + bytes(16)
    assert decode_page(BLOB, page_key=other, layout=LAYOUT) == PageFault("foreign")


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout("bf16", num_layers=3, num_kv_heads=2, page_size=16, head_dim=4),
        PageLayout("fp32", num_layers=1, num_kv_heads=3, page_size=16, head_dim=4),
        PageLayout("bf16", num_layers=2, num_kv_heads=3, page_size=64, head_dim=1),
    ],
)
def test_another_layout_of_the_same_size_is_foreign(layout: PageLayout) -> None:
    assert layout.page_bytes == LAYOUT.page_bytes
    assert layout.layout_id != LAYOUT.layout_id
    assert decode_page(BLOB, page_key=KEY, layout=layout) == PageFault("foreign")


def test_a_file_of_something_else_is_foreign() -> None:
    assert decode_page(b"PK\x03\x04" * 9, page_key=KEY, layout=LAYOUT) == PageFault("foreign")


def test_encoding_refuses_wrong_lengths() -> None:
    with pytest.raises(ValueError, match="payload has 3 bytes"):
        encode_page(b"abc", page_key=KEY, layout=LAYOUT, generation=1)
    with pytest.raises(ValueError, match="page_key has 31 bytes"):
        encode_page(PAYLOAD, page_key=KEY[:31], layout=LAYOUT, generation=1)
    assert len(BLOB) == HEADER_BYTES + LAYOUT.page_bytes
