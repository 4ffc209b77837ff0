"""What a checkpoint says of itself before a weight is read: config, tensors, digest; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
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
    architecture: str
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


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as it lies in a file; shape is row-major, precision e.g. "q4_1"."""

    shape: tuple[int, ...]
    precision: str
    num_bytes: int


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


def llama_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors a Llama needs, by Hugging Face name."""
    hidden, ffn, dim = config.hidden_size, config.ffn_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.rope_scaling is not None and config.rope_scaling.type == "factors":
        shapes["rope_freqs.weight"] = (dim // 2,)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (config.num_heads * dim, hidden),
            f"{at}self_attn.k_proj.weight": (config.num_kv_heads * dim, hidden),
            f"{at}self_attn.v_proj.weight": (config.num_kv_heads * dim, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, config.num_heads * dim),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.gate_proj.weight": (ffn, hidden),
            f"{at}mlp.up_proj.weight": (ffn, hidden),
            f"{at}mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes


def check_llama(config: ModelConfig, tensors: Mapping[str, TensorInfo], path: Path) -> None:
    """Raises CheckpointError where heads do not fit or a tensor is missing or misshapen."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            "num_key_value_heads",
            found=f"{config.num_kv_heads} for {config.num_heads} heads",
            allowed="a divisor of the number of heads",
            remedy="The header is damaged; fetch the checkpoint again.",
        )
    if config.head_dim % 2:
        raise CheckpointError(
            "head_dim",
            found=config.head_dim,
            allowed="an even number",
            remedy="The header is damaged; fetch the checkpoint again.",
        )
    if config.num_layers > len(tensors):
        raise CheckpointError(
            "num_hidden_layers",
            found=f"{config.num_layers} layers, {len(tensors)} tensors",
            allowed="a tensor at least for each layer",
            remedy="The header is damaged; fetch the checkpoint again.",
        )
    for name, shape in llama_shapes(config).items():
        info = tensors.get(name)
        if info is None or info.shape != shape:
            raise CheckpointError(
                name,
                found="no such tensor" if info is None else f"shape {list(info.shape)}",
                allowed=f"shape {list(shape)}",
                remedy=f"{path.name} is incomplete or of another family; fetch it again.",
            )
