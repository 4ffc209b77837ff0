"""A page's bytes come back only as the page that was asked for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.store.page_codec import (
    HEADER_BYTES,
    Page,
    PageFault,
    PageLayout,
    check_page,
    decode_header,
    decode_page,
    encode_header,
    encode_page,
    payload_checksum,
)
from engine.store.tier import PageRecord

LAYOUT = PageLayout("bf16", num_layers=2, num_kv_heads=3, page_size=16, head_dim=4)
KEY = bytes(range(32))
RECORD = PageRecord(KEY, parent=KEY[::-1], depth=3, owner=bytes(range(50, 66)), generation=7)
PAYLOAD = bytes(at % 251 for at in range(LAYOUT.page_bytes))


def encoded(record: PageRecord = RECORD, payload: bytes = PAYLOAD) -> bytes:
    into = bytearray(HEADER_BYTES + LAYOUT.page_bytes)
    encode_page(record, payload, layout=LAYOUT, into=memoryview(into))
    return bytes(into)


BLOB = encoded()


def test_round_trip_keeps_payload_and_record() -> None:
    page = decode_page(BLOB, page_key=KEY, layout=LAYOUT)
    assert isinstance(page, Page)
    assert (page.record, bytes(page.payload)) == (RECORD, PAYLOAD)


def test_header_and_payload_may_lie_apart() -> None:
    header = encode_header(RECORD, PAYLOAD, layout=LAYOUT)
    assert header + PAYLOAD == BLOB
    found = decode_header(header, layout=LAYOUT)
    assert found == check_page(header, PAYLOAD, page_key=KEY, layout=LAYOUT)
    assert not isinstance(found, PageFault)
    assert (found.record, found.checksum) == (RECORD, payload_checksum(PAYLOAD))


@settings(max_examples=150)
@given(bit=st.integers(0, len(BLOB) * 8 - 1))
def test_any_flipped_bit_is_detected(bit: int) -> None:
    damaged = bytearray(BLOB)
    damaged[bit // 8] ^= 1 << (bit % 8)
    reason = "foreign" if bit < 4 * 8 else "corrupt"  # without its magic it is anything
    assert decode_page(damaged, page_key=KEY, layout=LAYOUT) == PageFault(reason)


@settings(max_examples=50)
@given(length=st.integers(0, len(BLOB) - 1))
def test_a_torn_page_is_detected(length: int) -> None:
    assert decode_page(BLOB[:length], page_key=KEY, layout=LAYOUT) == PageFault("torn")
    assert decode_page(BLOB + b"x", page_key=KEY, layout=LAYOUT) == PageFault("torn")
    header, payload = BLOB[:HEADER_BYTES], PAYLOAD[: length % len(PAYLOAD)]
    assert check_page(header, payload, page_key=KEY, layout=LAYOUT) == PageFault("torn")


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
    assert decode_header(BLOB[:HEADER_BYTES], layout=layout) == PageFault("foreign")


def test_a_file_of_something_else_is_foreign() -> None:
    assert decode_page(b"PK\x03\x04" * 9, page_key=KEY, layout=LAYOUT) == PageFault("foreign")
    assert decode_header(bytes(HEADER_BYTES), layout=LAYOUT) == PageFault("foreign")


def test_encoding_refuses_wrong_lengths() -> None:
    with pytest.raises(ValueError, match="payload has 3 bytes"):
        encoded(payload=b"abc")
    with pytest.raises(ValueError, match="page key has 31 bytes"):
        encoded(replace(RECORD, key=KEY[:31]))
    with pytest.raises(ValueError, match="parent has 0 bytes"):
        encoded(replace(RECORD, parent=b""))
    with pytest.raises(ValueError, match="owner has 32 bytes"):
        encoded(replace(RECORD, owner=KEY))
    with pytest.raises(ValueError, match="buffer has 9 bytes"):
        encode_page(RECORD, PAYLOAD, layout=LAYOUT, into=memoryview(bytearray(9)))
