"""What a checkpoint says of itself before a weight is read: config, tensors, digest; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from policies.contract.checkpoint_text import MAX_VOCAB as MAX_VOCAB  # of whoever reads files

if TYPE_CHECKING:
    from torch import Tensor

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_CONTEXT = 1 << 26


class CheckpointError(Exception):
    """The files cannot be served: the field, what was found, what is allowed, a remedy."""

    def __init__(self, field: str, *, found: object, allowed: str, remedy: str) -> None:
        shown = str(found)
        self.field = field
        self.found = shown if len(shown) <= 200 else f"{shown[:200]}…"
        self.allowed = allowed
        self.remedy = remedy
        super().__init__(f"{field}: found {self.found}; allowed: {allowed}. {remedy}")


RopeType = Literal["linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions are stretched; "factors" divides frequencies by a tensor of the checkpoint."""

    type: RopeType
    factor: float = 1.0
    original_context_tokens: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # the family, a key of families.FAMILIES
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_tokens: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied_head: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    query_scale: float  # of queries before they meet keys
    windows: tuple[int | None, ...]  # a layer: keys that a token sees, its own included; None: all
    local_rope_theta: float  # of layers with a window, whose positions are never stretched
    biases: frozenset[str]  # projections that add one, e.g. "q_proj"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as it lies in a file; shape is row-major, precision e.g. "q4_1"."""

    shape: tuple[int, ...]
    precision: str
    num_bytes: int


class Blocks(NamedTuple):
    """A matrix as GGML packed it: its rows' blocks one after the other, and which of them is which.

    kind is GGML's number of the format, data uint8 [bytes], a copy that the caller owns. Row i in
    Hugging Face's order is row order[i] of data; None: the orders are the same.
    """

    kind: int
    data: Tensor
    order: list[int] | None


class Checkpoint(Protocol):
    """An opened checkpoint. Tensor names are Hugging Face's, whatever the format."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def metadata(self) -> Mapping[str, object]: ...
    @property
    def weights_digest(self) -> str:
        """Hex SHA-256 of names, shapes, file sizes and headers."""

    @property
    def precision(self) -> str:
        """Of most parameters, e.g. "q4_1"."""

    def read(self, name: str) -> Tensor:
        """The tensor as fp32 on the CPU, a copy that the caller owns. Imports torch."""

    def read_blocks(self, name: str) -> Blocks | None:
        """The tensor as it is packed in the file; None where it lies there as plain numbers."""


def digest_of(tensors: Mapping[str, TensorInfo], headers: Iterable[tuple[int, bytes]]) -> str:
    """weights_digest of the contract: headers are (file size, header bytes) in file order."""
    digest = sha256()
    for name in sorted(tensors):
        info = tensors[name]
        digest.update(f"{name}\0{info.shape}\0{info.precision}\n".encode())
    for size, header in headers:
        digest.update(size.to_bytes(8, "little"))
        digest.update(sha256(header).digest())
    return digest.hexdigest()


def main_precision(tensors: Mapping[str, TensorInfo]) -> str:
    """The precision that holds most bytes' worth of parameters."""
    parameters: dict[str, int] = {}
    for info in tensors.values():
        count = 1
        for size in info.shape:
            count *= size
        parameters[info.precision] = parameters.get(info.precision, 0) + count
    return max(parameters, key=lambda name: parameters[name], default="none")


def whole(
    field: str, value: object, *, low: int = 1, high: int = MAX_WIDTH, default: int | None = None
) -> int:
    """value as an int in [low, high]; raises CheckpointError."""
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise CheckpointError(
            field,
            found="nothing" if value is None else repr(value),
            allowed=f"a whole number from {low} to {high}",
            remedy="The file is damaged or not a model of a known family; fetch it again.",
        )
    return value


def real(field: str, value: object, *, default: float | None = None) -> float:
    """value as a finite positive float; raises CheckpointError."""
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < float(value) < 1e30:
        raise CheckpointError(
            field,
            found="nothing" if value is None else repr(value),
            allowed="a positive finite number",
            remedy="The file is damaged or not a model of a known family; fetch it again.",
        )
    return float(value)
