"""A page as bytes that can leave its arena: what they mean, and a header that proves them.

header, little endian: magic, version, payload bytes, generation, depth, page key, parent, owner,
SHA-256 of the layout id, xxh3-128 of the payload; then xxh3-128 of all that, so that a header can
be believed before its payload is read. Whatever comes back from a tier or a node is checked against
the key and layout that were asked for; anything else is a miss, with a reason.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Literal

import numpy as np
import xxhash

from engine.store.tier import PageRecord
from policies.contract.page_keys import KEY_BYTES, OWNER_BYTES

Bytes = bytes | bytearray | memoryview

LAYOUT_VERSION = 1
MAGIC = b"KGPG"
VERSION = 2
CHECKSUM_BYTES = 16
_FIELDS = struct.Struct(f"<4sIQQQ{KEY_BYTES}s{KEY_BYTES}s{OWNER_BYTES}s32s{CHECKSUM_BYTES}s")
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES
PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1, "int8": 1}
QUANTISED = ("fp8", "int8")
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One page of the arena: [layer][K,V][kv head][token][dim], one contiguous run of bytes.

    Of quantised precisions (fp8: E4M3; int8) each head's codes [token][dim] are followed by a bf16
    scale of each token: value = code × scale. See engine/store/quantise.py.
    """

    precision: str  # a key of PRECISION_BYTES
    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int

    @property
    def is_quantised(self) -> bool:
        return self.precision in QUANTISED

    @property
    def codes_bytes(self) -> int:
        """Of a head's keys or values in a page, without their scales."""
        return self.page_size * self.head_dim * PRECISION_BYTES[self.precision]

    @property
    def head_bytes(self) -> int:
        return self.codes_bytes + (self.page_size * SCALE_BYTES if self.is_quantised else 0)

    @property
    def layer_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def layout_id(self) -> str:
        """What the bytes mean, not who computed them: equal ids may be copied bit for bit."""
        return (
            f"kv{LAYOUT_VERSION}-{self.precision}-layers0:{self.num_layers}"
            f"-heads0:{self.num_kv_heads}-page{self.page_size}-dim{self.head_dim}"
        )


@dataclass(frozen=True, slots=True)
class Header:
    """A believed header: whose the payload behind it must be, and what it must hash to."""

    record: PageRecord
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """A verified page."""

    record: PageRecord
    payload: memoryview


@dataclass(frozen=True, slots=True)
class PageFault:
    """Not the page that was asked for: torn (cut or grown), foreign (another key or layout),
    corrupt (bits changed). To the cache it is a miss."""

    reason: Literal["torn", "foreign", "corrupt"]


def encode_page(
    record: PageRecord, payload: Bytes, *, layout: PageLayout, into: memoryview
) -> None:
    """Header and payload in one run, HEADER_BYTES + page_bytes. Raises ValueError on a payload,
    record or buffer of the wrong length."""
    if len(into) != HEADER_BYTES + layout.page_bytes:
        raise ValueError(f"buffer has {len(into)} bytes, want {HEADER_BYTES + layout.page_bytes}")
    into[:HEADER_BYTES] = encode_header(record, payload, layout=layout)
    copy_bytes(payload, into[HEADER_BYTES:])


def decode_page(data: Bytes, *, page_key: bytes, layout: PageLayout) -> Page | PageFault:
    """The page, its payload a view of data, or why it is not the one asked for."""
    view = memoryview(data)
    if len(view) != HEADER_BYTES + layout.page_bytes:
        return PageFault("torn" if bytes(view[:4]) == MAGIC[: len(view)] else "foreign")
    payload = view[HEADER_BYTES:]
    header = check_page(view[:HEADER_BYTES], payload, page_key=page_key, layout=layout)
    return header if isinstance(header, PageFault) else Page(header.record, payload)


def check_page(
    header: Bytes, payload: Bytes, *, page_key: bytes, layout: PageLayout
) -> Header | PageFault:
    """decode_page for a header and a payload that lie apart."""
    found = decode_header(header, layout=layout)
    if isinstance(found, PageFault):
        return found
    if found.record.key != page_key:
        return PageFault("foreign")
    if len(payload) != layout.page_bytes:
        return PageFault("torn")
    return found if payload_checksum(payload) == found.checksum else PageFault("corrupt")


def encode_header(record: PageRecord, payload: Bytes, *, layout: PageLayout) -> bytes:
    """HEADER_BYTES that prove payload. Raises ValueError as encode_page does."""
    if len(payload) != layout.page_bytes:
        raise ValueError(f"payload has {len(payload)} bytes, want {layout.page_bytes}")
    for name, value, length in (
        ("page key", record.key, KEY_BYTES),
        ("parent", record.parent, KEY_BYTES),
        ("owner", record.owner, OWNER_BYTES),
    ):
        if len(value) != length:
            raise ValueError(f"{name} has {len(value)} bytes, want {length}")
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        len(payload),
        record.generation,
        record.depth,
        record.key,
        record.parent,
        record.owner,
        layout_digest(layout),
        payload_checksum(payload),
    )
    return fields + xxhash.xxh3_128_digest(fields)


def decode_header(header: Bytes, *, layout: PageLayout) -> Header | PageFault:
    """What a header says, believed of itself; the payload is still to be checked against it."""
    view = memoryview(header)
    if len(view) != HEADER_BYTES:
        return PageFault("torn")
    fields = view[: _FIELDS.size]
    if xxhash.xxh3_128_digest(fields) != view[_FIELDS.size :]:
        return PageFault("corrupt" if view[:4] == MAGIC else "foreign")
    magic, version, length, generation, depth, key, parent, owner, digest, checksum = (
        _FIELDS.unpack(fields)
    )
    if (magic, version, length) != (MAGIC, VERSION, layout.page_bytes):
        return PageFault("foreign")
    if digest != layout_digest(layout):
        return PageFault("foreign")
    return Header(PageRecord(key, parent, depth, owner, generation), checksum)


def payload_checksum(payload: Bytes) -> bytes:
    """xxh3-128, CHECKSUM_BYTES; other threads run meanwhile."""
    return xxhash.xxh3_128_digest(payload)


def copy_bytes(source: Bytes, target: memoryview) -> None:
    """memcpy that other threads run beside: numpy lets the interpreter go, slices do not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


@lru_cache(maxsize=16)
def layout_digest(layout: PageLayout) -> bytes:
    return sha256(layout.layout_id.encode()).digest()
