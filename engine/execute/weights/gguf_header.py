"""The header of a GGUF file: metadata and the list of tensors, bounded and never believed.

Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little endian. Every count and
length is compared with the size of the file before anything is allocated. Imports no torch: the
node agent reads vocabularies through it.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from engine.execute.weights.facts import CheckpointError

MAX_HEADER_BYTES = 64 << 20  # ten times that of Gemma's 262,144 tokens
MAX_ENTRIES = 1 << 16
MAX_NAME_BYTES = 1 << 12
# GGUF value type → (array typecode, struct letter)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]  # outermost first
    kind: int  # GGML type
    offset: int  # bytes from the aligned end of the header


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, object]  # numbers, bools, str, or a list of them
    tensors: tuple[TensorEntry, ...]
    head: bytes  # the header as it is in the file
    file_bytes: int

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the header and the file's size."""
        return sha256(self.file_bytes.to_bytes(8, "little") + self.head).hexdigest()


def read_header(path: Path) -> Header:
    """Raises CheckpointError when the file is truncated, hostile or not GGUF 2 or 3."""
    size = path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(file, size)
        metadata, tensors = _parse(reader)
        file.seek(0)
        return Header(metadata, tensors, file.read(reader.at), size)


def _parse(reader: _Reader) -> tuple[dict[str, object], tuple[TensorEntry, ...]]:
    magic = reader.take(4, "magic")
    if magic != b"GGUF":
        raise damaged("magic", repr(magic), "b'GGUF'")
    version = reader.number("I", "version")
    if version not in (2, 3):
        raise CheckpointError(
            "version",
            found=version,
            allowed="2 or 3, little endian",
            remedy="Convert the file with a current gguf tool.",
        )
    num_tensors = reader.count("Q", "tensor_count", MAX_ENTRIES)
    num_entries = reader.count("Q", "metadata_kv_count", MAX_ENTRIES)
    metadata: dict[str, object] = {}
    for _ in range(num_entries):
        key = reader.name("metadata key")
        metadata[key] = reader.value(reader.count("I", key, 1 << 31), key)
    return metadata, tuple(_tensor(reader) for _ in range(num_tensors))


def _tensor(reader: _Reader) -> TensorEntry:
    name = reader.name("tensor name")
    num_dims = reader.count("I", name, 4)
    shape = tuple(reader.count("Q", name, 1 << 40) for _ in range(num_dims))[::-1]
    return TensorEntry(
        name, shape, reader.count("I", name, 1 << 31), reader.count("Q", name, 1 << 62)
    )


def damaged(field: str, found: object, allowed: str) -> CheckpointError:
    return CheckpointError(
        field, found=found, allowed=allowed, remedy="The file is damaged; fetch it again."
    )


class _Reader:
    """Reads the header's values in order; every length is checked against what is left."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.limit = min(size, MAX_HEADER_BYTES)
        self.at = 0

    def take(self, count: int, field: str) -> bytes:
        if count > self.limit - self.at:
            raise damaged(
                field, f"{count} bytes at offset {self.at}", f"what fits in {self.limit} bytes"
            )
        data = self.file.read(count)
        if len(data) != count:
            raise damaged(field, f"end of file at offset {self.at + len(data)}", "a whole header")
        self.at += count
        return data

    def number(self, letter: str, field: str) -> int | float:
        (value,) = struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), field))
        return value

    def count(self, letter: str, field: str, most: int) -> int:
        value = self.number(letter, field)
        assert isinstance(value, int)
        if value > most:
            raise damaged(field, value, f"at most {most}")
        return value

    def string(self, field: str, most: int = MAX_HEADER_BYTES) -> str:
        data = self.take(self.count("Q", field, most), field)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise damaged(field, str(error), "UTF-8") from error

    def name(self, field: str) -> str:
        name = self.string(field, MAX_NAME_BYTES)
        if not name:
            raise damaged(field, "an empty name", f"1 to {MAX_NAME_BYTES} bytes")
        return name

    def value(self, kind: int, field: str) -> object:
        if kind == STRING:
            return self.string(field)
        if kind == BOOL:
            return self.number("B", field) != 0
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], field)
        if kind == ARRAY:
            return self._array(field)
        raise damaged(field, f"value type {kind}", "a type of GGUF version 3 (0 to 12)")

    def _array(self, field: str) -> object:
        kind = self.count("I", field, 1 << 31)
        count = self.count("Q", field, self.limit)
        if kind in NUMBERS:
            numbers = array(NUMBERS[kind])
            numbers.frombytes(self.take(count * numbers.itemsize, field))
            return numbers.tolist()
        if kind == BOOL:
            return [byte != 0 for byte in self.take(count, field)]
        if kind != STRING:
            raise damaged(field, f"array of type {kind}", "an array of numbers or strings")
        if count * 8 > self.limit - self.at:
            raise damaged(field, f"{count} strings", f"what fits in {self.limit} bytes")
        return self._strings(count, field)

    def _strings(self, count: int, field: str) -> list[str]:
        """As so many calls of string, which a vocabulary's hundred thousand would make slow."""
        read, length_of = self.file.read, struct.Struct("<Q").unpack
        found: list[str] = []
        at = self.at
        try:
            for _ in range(count):
                (length,) = length_of(read(8))
                at += 8 + length
                if at > self.limit:
                    raise damaged(field, f"{length} bytes", f"what fits in {self.limit} bytes")
                found.append(read(length).decode())
        except UnicodeDecodeError as error:
            raise damaged(field, str(error), "UTF-8") from error
        except struct.error:
            raise damaged(field, "the file's end", "a whole header") from None
        if self.file.tell() != at:
            raise damaged(field, "the file's end", "a whole header")
        self.at = at
        return found
