"""Reads the metadata of a GGUF file and digests its header; never reads its weights.

Follows the GGUF v2/v3 layout (github.com/ggml-org/ggml, docs/gguf.md). Every count and length is
checked against the bytes that are there before anything is allocated, so a truncated or hostile
header is an error and not a crash.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from node_agent.errors import NodeError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
MAX_DEPTH = 2  # an array of arrays is legal, deeper nesting is not seen
SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    values: dict[str, object]  # scalars, str or list
    digest: str  # hex SHA-256 of the header and the file's size


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise ValueError(f"{count} bytes wanted at offset {self.at}, file has {len(self.data)}")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def scalar(self, kind: int) -> int | float | bool:
        layout = SCALARS.get(kind)
        if layout is None:
            raise ValueError(f"value type {kind} at offset {self.at}")
        value: int | float | bool = layout.unpack(self.take(layout.size))[0]
        return value

    def u32(self) -> int:
        return int(self.scalar(4))

    def u64(self) -> int:
        return int(self.scalar(10))

    def string(self) -> str:
        return self.take(self.u64()).decode("utf-8", errors="strict")

    def value(self, kind: int, depth: int = 0) -> object:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(kind)
        if depth >= MAX_DEPTH:
            raise ValueError(f"arrays nested deeper than {MAX_DEPTH} at offset {self.at}")
        item, count = self.u32(), self.u64()
        layout = SCALARS.get(item)
        if layout is not None:
            return [entry[0] for entry in layout.iter_unpack(self.take(count * layout.size))]
        if count > len(self.data) - self.at:  # each item takes a byte at least
            raise ValueError(f"array of {count} items at offset {self.at}")
        return [self.value(item, depth + 1) for _ in range(count)]


def _read(cursor: _Cursor) -> GgufMetadata:
    if cursor.take(4) != MAGIC:
        raise ValueError("the first four bytes are not GGUF")
    version = cursor.u32()
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}")
    num_tensors, num_values = cursor.u64(), cursor.u64()
    values: dict[str, object] = {}
    for _ in range(num_values):
        key = cursor.string()
        values[key] = cursor.value(cursor.u32())
    for _ in range(num_tensors):
        cursor.take(cursor.u64())  # name
        cursor.take(8 * cursor.u32())  # dimensions
        cursor.take(4 + 8)  # type, offset
    digest = sha256(len(cursor.data).to_bytes(8, "little"))
    digest.update(cursor.data[: cursor.at])
    return GgufMetadata(values, digest.hexdigest())


def read_gguf_metadata(path: Path) -> GgufMetadata:
    """Raises NodeError when the file is absent, truncated or not GGUF version 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data))
    except (OSError, ValueError) as error:
        raise NodeError(
            f"checkpoint {path.name}",
            found=str(error),
            allowed="a whole GGUF file of version 2 or 3, little endian",
            remedy="pull or copy the file again",
        ) from error
