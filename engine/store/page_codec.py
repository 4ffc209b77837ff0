"""A page as bytes that can leave its arena: what they mean, and a header that proves them.

header, little endian: magic, version, payload bytes, generation, page key, SHA-256 of the layout
id, xxh3-128 over all of that and the payload. Whatever comes back from a tier or a node is decoded
against the key and layout that were asked for; anything else is a miss, with a reason.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import xxhash

from policies.contract.page_keys import KEY_BYTES

LAYOUT_VERSION = 1
MAGIC = b"KGPG"
VERSION = 1
_FIELDS = struct.Struct("<4sIQQ32s32s")
CHECKSUM_BYTES = 16
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
class Page:
    """A verified page."""

    generation: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class PageFault:
    """Not the page that was asked for: torn (cut or grown), foreign (another key or layout),
    corrupt (bits changed). To the cache it is a miss."""

    reason: Literal["torn", "foreign", "corrupt"]


def encode_page(
    payload: bytes | memoryview, *, page_key: bytes, layout: PageLayout, generation: int
) -> bytes:
    """Header and payload. Raises ValueError on a payload or key of the wrong length."""
    if len(payload) != layout.page_bytes:
        raise ValueError(f"payload has {len(payload)} bytes, want {layout.page_bytes}")
    if len(page_key) != KEY_BYTES:
        raise ValueError(f"page_key has {len(page_key)} bytes, want {KEY_BYTES}")
    fields = _FIELDS.pack(
        MAGIC, VERSION, len(payload), generation, page_key, _layout_digest(layout)
    )
    return b"".join((fields, _checksum(fields, payload), payload))


def decode_page(
    data: bytes | memoryview, *, page_key: bytes, layout: PageLayout
) -> Page | PageFault:
    """The page, its payload a view of data, or why it is not the one asked for."""
    view = memoryview(data)
    if len(view) != HEADER_BYTES + layout.page_bytes:
        return PageFault("torn" if bytes(view[:4]) == MAGIC[: len(view)] else "foreign")
    fields, payload = view[: _FIELDS.size], view[HEADER_BYTES:]
    if _checksum(fields, payload) != view[_FIELDS.size : HEADER_BYTES]:
        return PageFault("corrupt")
    magic, version, length, generation, key, digest = _FIELDS.unpack(fields)
    if (magic, version, length) != (MAGIC, VERSION, layout.page_bytes):
        return PageFault("foreign")
    if key != page_key or digest != _layout_digest(layout):
        return PageFault("foreign")
    return Page(generation, payload)


def _layout_digest(layout: PageLayout) -> bytes:
    return sha256(layout.layout_id.encode()).digest()


def _checksum(fields: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    checksum = xxhash.xxh3_128(fields)
    checksum.update(payload)
    return checksum.digest()
