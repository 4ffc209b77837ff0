"""Hugging Face folders: config.json beside one or more safetensors files.

Format: 8 bytes little endian header length, a JSON header, then the data it places.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.execute.weights.config_json import damaged, parse_config
from engine.execute.weights.facts import (
    Blocks,
    CheckpointError,
    TensorInfo,
    digest_of,
    main_precision,
    whole,
)
from engine.execute.weights.families import check_tensors

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER_BYTES = 100 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 64 << 20
# safetensors' name → (ours, bytes)
PRECISIONS = {"F32": ("fp32", 4), "F16": ("fp16", 2), "BF16": ("bf16", 2)}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Where a model that also sees keeps its language model (newer and older transformers).
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def text_name(name: str) -> str:
    """The tensor's name in a model of text alone."""
    for prefix, plain in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def read_json(path: Path, most: int) -> dict[str, Any]:
    """A bounded JSON object; raises CheckpointError."""
    if not path.is_file():
        raise damaged(path.name, "no such file", "a file of the checkpoint's folder")
    size = path.stat().st_size
    if size > most:
        raise damaged(path.name, f"{size} bytes", f"at most {most} bytes")
    return _object(path.name, path.read_bytes())


def _object(field: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(field, f"bad JSON ({error})", "a JSON object") from error
    if not isinstance(value, dict):
        raise damaged(field, type(value).__name__, "a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    offset: int
    dtype: str


class FolderCheckpoint:
    """A folder whose headers were checked; see facts.Checkpoint. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, object] = dict(read_json(path / "config.json", MAX_CONFIG_BYTES))
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        headers = [self._parse(file) for file in _shards(path)]
        self.config = parse_config(self.metadata, has_head="lm_head.weight" in self.tensors)
        check_tensors(self.config, self.tensors, path)
        self.weights_digest = digest_of(self.tensors, headers)
        self.precision = main_precision(self.tensors)

    def _parse(self, path: Path) -> tuple[int, bytes]:
        if not path.is_file():
            raise damaged(path.name, "no such file", "every shard that the index names")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise damaged(
                    f"{path.name} header", f"{length} bytes", f"what fits in {size} bytes"
                )
            head = file.read(length)
        data_bytes = size - 8 - length
        for name, entry in _object(f"{path.name} header", head).items():
            if name == "__metadata__":
                continue
            name = text_name(name)
            if name in self.tensors:
                raise damaged(name, "the name twice", "each tensor once")
            info, begin, dtype = _entry(f"{path.name} {name}", entry, data_bytes)
            self.tensors[name] = info
            self._places[name] = _Place(path, 8 + length + begin, dtype)
        return size, head

    def read(self, name: str) -> Tensor:
        """See facts.Checkpoint.read."""
        import torch

        info, place = self.tensors[name], self._places[name]
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        data = torch.empty(info.num_bytes, dtype=torch.uint8)
        with place.path.open("rb") as file:
            file.seek(place.offset)
            got = file.readinto(memoryview(data.numpy()))  # type: ignore[arg-type]
        if got != info.num_bytes:
            raise damaged(name, f"{got} bytes", f"{info.num_bytes} bytes")
        return data.view(dtypes[place.dtype]).view(info.shape).float()

    def read_blocks(self, name: str) -> Blocks | None:
        """None: these files hold plain numbers only."""
        return None


def _shards(path: Path) -> list[Path]:
    if not (path / INDEX).is_file():
        return [path / SINGLE]
    names = read_json(path / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise damaged("weight_map", type(names).__name__, "an object of tensor → file")
    files = set(names.values())
    for file in files:
        # A shard is a plain name: a header must not lead outside its folder.
        if not isinstance(file, str) or "/" in file or "\\" in file or file in ("", ".", ".."):
            raise damaged("weight_map", repr(file), "file names inside the folder")
    return [path / file for file in sorted(files)]


def _entry(name: str, entry: object, data_bytes: int) -> tuple[TensorInfo, int, str]:
    if not isinstance(entry, dict):
        raise damaged(name, type(entry).__name__, "an object with dtype, shape, data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in PRECISIONS:
        raise CheckpointError(
            name,
            found=f"dtype {dtype!r}",
            allowed=", ".join(PRECISIONS),
            remedy="Take an unquantised checkpoint, or a GGUF file.",
        )
    if not isinstance(shape, list) or not 1 <= len(shape) <= 4:
        raise damaged(name, f"shape {shape!r}", "one to four sizes")
    precision, num_bytes = PRECISIONS[dtype]
    for size in shape:
        num_bytes *= whole(f"{name} shape", size, high=1 << 40)
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise damaged(name, f"data_offsets {offsets!r}", "[begin, end]")
    begin, end = (whole(f"{name} data_offsets", at, low=0, high=data_bytes) for at in offsets)
    if end - begin != num_bytes:
        raise damaged(name, f"{end - begin} bytes", f"{num_bytes} bytes for {shape}")
    return TensorInfo(tuple(shape), precision, num_bytes), begin, dtype
