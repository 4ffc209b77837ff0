"""The model families that are served, as far as their files go: names, defaults, tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.execute.weights.facts import CheckpointError, ModelConfig, TensorInfo

QKV = ("q_proj", "k_proj", "v_proj")  # one product, all with a bias or none
ATTENTION = (*QKV, "o_proj")
FFN = ("gate_proj", "up_proj", "down_proj")
SOFTCAPS = ("final_logit_softcapping", "attn_logit_softcapping")
# GGUF's parts of a layer that are named alike in every family.
GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class Family:
    """name is ours and GGUF's architecture; fields and tensors are named as Hugging Face does."""

    name: str
    model_types: tuple[str, ...]  # of config.json
    activation: tuple[str, str]  # the field of config.json and its only value
    defaults: Mapping[str, object] = field(default_factory=dict)  # where config.json is silent
    biases: frozenset[str] = frozenset()  # projections that always have one
    gguf_parts: Mapping[str, str] = field(default_factory=lambda: GGUF_PARTS)
    has_head_norms: bool = False  # of each head's query and key
    has_sandwich_norms: bool = False  # after attention and feed-forward, beside those before
    has_windows: bool = False  # most layers see the last tokens only
    # How GGUF files differ from Hugging Face's beside the names:
    gguf_turns_pairs: bool = False  # rows of q and k lie as rotated pairs, not as halves
    gguf_norm_shift: float = 0.0  # was added to the norms' weights


LLAMA = Family("llama", ("llama",), ("hidden_act", "silu"), gguf_turns_pairs=True)
QWEN2 = Family(
    "qwen2",
    ("qwen2",),
    ("hidden_act", "silu"),
    defaults={"num_key_value_heads": 32},
    biases=frozenset(QKV),
)
QWEN3 = Family(
    "qwen3",
    ("qwen3",),
    ("hidden_act", "silu"),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    gguf_parts=GGUF_PARTS | HEAD_NORMS,
    has_head_norms=True,
)
GEMMA3 = Family(
    "gemma3",
    ("gemma3_text", "gemma3"),
    ("hidden_activation", "gelu_pytorch_tanh"),
    # Published configs of the text part name little more than sizes.
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    gguf_parts=GGUF_PARTS
    | HEAD_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    has_head_norms=True,
    has_sandwich_norms=True,
    has_windows=True,
    gguf_norm_shift=1.0,
)
FAMILIES = {family.name: family for family in (LLAMA, QWEN2, QWEN3, GEMMA3)}


def family_of(field: str, value: object, *, by_model_type: bool) -> Family:
    """The family that a file names in that field; raises CheckpointError."""
    known = {
        name: family
        for family in FAMILIES.values()
        for name in (family.model_types if by_model_type else (family.name,))
    }
    if not isinstance(value, str) or value not in known:
        raise CheckpointError(
            field,
            found="nothing" if value is None else repr(value),
            allowed=", ".join(known),
            remedy="Choose a dense model of one of these families, e.g. smollm2-135m.",
        )
    return known[value]


def refuse(field: str, found: object, *, allowed: str, family: Family) -> CheckpointError:
    """A field whose value is not served, though the family is."""
    return CheckpointError(
        field,
        found=repr(found),
        allowed=allowed,
        remedy=f"Choose another checkpoint of the {family.name} family without this.",
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a model needs, by Hugging Face name."""
    hidden, ffn, dim = config.hidden_size, config.ffn_size, config.head_dim
    family = FAMILIES[config.architecture]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.rope_scaling is not None and config.rope_scaling.type == "factors":
        shapes["rope_freqs.weight"] = (dim // 2,)
    parts = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (config.num_heads * dim, hidden),
        "self_attn.k_proj": (config.num_kv_heads * dim, hidden),
        "self_attn.v_proj": (config.num_kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, config.num_heads * dim),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    if family.has_head_norms:
        parts |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    if family.has_sandwich_norms:
        parts |= {"pre_feedforward_layernorm": (hidden,), "post_feedforward_layernorm": (hidden,)}
    for layer in range(config.num_layers):
        for part, shape in parts.items():
            shapes[f"model.layers.{layer}.{part}.weight"] = shape
            if part.rpartition(".")[2] in config.biases:
                shapes[f"model.layers.{layer}.{part}.bias"] = shape[:1]
    return shapes


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo], path: Path) -> None:
    """Raises CheckpointError where heads do not fit or a layer's tensors are not the family's."""
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
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        info = tensors.get(name)
        if info is None or info.shape != shape:
            raise CheckpointError(
                name,
                found="no such tensor" if info is None else f"shape {list(info.shape)}",
                allowed=f"shape {list(shape)}",
                remedy=f"{path.name} is incomplete or of another family; fetch it again.",
            )
    for name in tensors:
        # A tensor that nobody reads would be a model that is not the one in the file.
        is_read = name in shapes or name.endswith(".rotary_emb.inv_freq")
        if name.startswith(("model.layers.", "blk.")) and not is_read:
            raise CheckpointError(
                name,
                found="a tensor of no use here",
                allowed=f"the tensors of {config.num_layers} {config.architecture} layers",
                remedy=f"{path.name} is of another family or quantisation; choose another.",
            )
