"""GGUF files: tensors by Hugging Face's names, in its layout and with its values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.execute.weights.facts import (
    Blocks,
    CheckpointError,
    TensorInfo,
    digest_of,
    main_precision,
    whole,
)
from engine.execute.weights.families import LLAMA, Family, check_tensors, family_of
from engine.execute.weights.ggml_blocks import FORMATS, BlockFormat, unpack
from engine.execute.weights.gguf_config import parse_metadata
from engine.execute.weights.gguf_header import Header, TensorEntry, damaged, read_header

if TYPE_CHECKING:
    from torch import Tensor

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}


def hf_name(name: str, family: Family = LLAMA) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in family.gguf_parts:
        return f"model.layers.{parts[1]}.{family.gguf_parts[parts[2]]}.{parts[3]}"
    return name


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int
    kind: int  # GGML type
    form: BlockFormat


class GgufCheckpoint:
    """A GGUF file whose header was checked; see facts.Checkpoint. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        header = read_header(path)
        self.metadata = header.metadata
        architecture = "general.architecture"
        self._family = family_of(architecture, self.metadata.get(architecture), by_model_type=False)
        self._place(header)
        self.config = parse_metadata(self._family, self.metadata, self.tensors)
        check_tensors(self.config, self.tensors, path)
        self.weights_digest = digest_of(self.tensors, [(header.file_bytes, header.head)])
        self.precision = main_precision(self.tensors)

    def _place(self, header: Header) -> None:
        alignment = whole(
            "general.alignment", self.metadata.get("general.alignment"), high=1 << 20, default=32
        )
        start = -(-len(header.head) // alignment) * alignment
        for entry in header.tensors:
            name, form = hf_name(entry.name, self._family), _form(entry)
            num_bytes = math.prod(entry.shape) * form.num_bytes // form.weights
            if entry.offset % alignment or start + entry.offset + num_bytes > header.file_bytes:
                raise damaged(
                    name,
                    f"{num_bytes} bytes at offset {start + entry.offset} of {header.file_bytes}",
                    f"an aligned place inside the file ({alignment} bytes)",
                )
            if name in self.tensors:
                raise damaged(name, "the name twice", "each tensor once")
            self.tensors[name] = TensorInfo(entry.shape, form.name, num_bytes)
            self._places[name] = _Place(start + entry.offset, entry.kind, form)

    def read(self, name: str) -> Tensor:
        """See facts.Checkpoint.read; as Hugging Face has it: rows of q and k as halves that turn,
        norms' weights without what the conversion added."""
        info, place = self.tensors[name], self._places[name]
        weights = unpack(place.form, self._read_bytes(name)).view(info.shape)
        if name.endswith("norm.weight") and self._family.gguf_norm_shift:
            return weights.sub_(self._family.gguf_norm_shift)
        count = self._turned_heads(name)
        if count is not None:
            pairs = weights.view(count, self.config.head_dim // 2, 2, -1)
            weights = pairs.transpose(1, 2).reshape(info.shape)
        return weights

    def read_blocks(self, name: str) -> Blocks | None:
        """See facts.Checkpoint.read_blocks. Rows hold whole blocks: any order of them is exact."""
        place, count, order = self._places[name], self._turned_heads(name), None
        if place.form.weights == 1:
            return None
        if count is not None:
            half = self.config.head_dim // 2
            order = [
                (head * half + at) * 2 + part
                for head in range(count)
                for part in range(2)
                for at in range(half)
            ]
        return Blocks(place.kind, self._read_bytes(name), order)

    def _turned_heads(self, name: str) -> int | None:
        """The heads of a tensor whose rows lie as rotated pairs, where others have halves."""
        if not self._family.gguf_turns_pairs:
            return None
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        return heads.get(name.split(".")[-2])

    def _read_bytes(self, name: str) -> Tensor:
        import torch

        num_bytes = self.tensors[name].num_bytes
        data = torch.empty(num_bytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(self._places[name].offset)
            got = file.readinto(memoryview(data.numpy()))  # type: ignore[arg-type]
        if got != num_bytes:
            raise damaged(name, f"{got} bytes", f"{num_bytes} bytes")
        return data


def _form(entry: TensorEntry) -> BlockFormat:
    form = FORMATS.get(entry.kind)
    if form is None:
        raise CheckpointError(
            entry.name,
            found=f"GGML type {entry.kind}",
            allowed=", ".join(known.name for known in FORMATS.values()),
            remedy="Take a file with another quantisation of this model, e.g. Q8_0.",
        )
    if not entry.shape or min(entry.shape) < 1 or entry.shape[-1] % form.weights:
        raise damaged(
            entry.name, f"shape {list(entry.shape)}", f"rows of {form.weights} × n {form.name}"
        )
    return form
