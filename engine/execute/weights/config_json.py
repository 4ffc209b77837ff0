"""config.json of a Hugging Face folder → ModelConfig, for every family."""

from __future__ import annotations

from collections.abc import Mapping

from engine.execute.weights.facts import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_VOCAB,
    CheckpointError,
    ModelConfig,
    RopeScaling,
    real,
    whole,
)
from engine.execute.weights.families import (
    ATTENTION,
    FFN,
    SOFTCAPS,
    Family,
    family_of,
    refuse,
)

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW_PERIOD = 6  # of Gemma 3: the last layer of each six sees everything


def damaged(field: str, found: object, allowed: str) -> CheckpointError:
    return CheckpointError(
        field, found=found, allowed=allowed, remedy="The folder is damaged; fetch it again."
    )


def text_part(config: Mapping[str, object]) -> dict[str, object]:
    """The language model's fields: of a model that also sees, those of text_config."""
    part = config.get("text_config", {})
    if not isinstance(part, dict):
        raise damaged("text_config", type(part).__name__, "an object")
    return {
        key: value
        for fields in (config, part)
        for key, value in fields.items()
        if value is not None and key != "text_config"
    }


def parse_config(whole_config: Mapping[str, object], *, has_head: bool) -> ModelConfig:
    """Raises CheckpointError at the first field that is missing, damaged or not served."""
    given = text_part(whole_config)
    family = family_of("model_type", given.get("model_type"), by_model_type=True)
    config = {**family.defaults, **given}
    _refuse_what_is_not_served(config, family)
    hidden = whole("hidden_size", config.get("hidden_size"))
    heads = whole("num_attention_heads", config.get("num_attention_heads"))
    num_layers = whole("num_hidden_layers", config.get("num_hidden_layers"), high=MAX_LAYERS)
    head_dim = whole("head_dim", config.get("head_dim"), default=max(1, hidden // heads))
    eos, bos = config.get("eos_token_id"), config.get("bos_token_id")
    full_rope, local_theta = _ropes(config)
    theta, scaling = parse_rope(full_rope, config)
    return ModelConfig(
        architecture=family.name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=whole("num_key_value_heads", config.get("num_key_value_heads"), default=heads),
        head_dim=head_dim,
        ffn_size=whole("intermediate_size", config.get("intermediate_size")),
        vocab_size=whole("vocab_size", config.get("vocab_size"), high=MAX_VOCAB),
        context_tokens=whole(
            "max_position_embeddings", config.get("max_position_embeddings"), high=MAX_CONTEXT
        ),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=real("rms_norm_eps", config.get("rms_norm_eps"), default=1e-6),
        # A tied checkpoint may still carry a copy of the head; the config's word decides.
        tied_head=config.get("tie_word_embeddings") is True or not has_head,
        bos_token_id=None if bos is None else whole("bos_token_id", bos, low=0, high=MAX_VOCAB),
        eos_token_ids=tuple(
            whole("eos_token_id", one, low=0, high=MAX_VOCAB)
            for one in (eos if isinstance(eos, list) else [] if eos is None else [eos])
        ),
        query_scale=real(
            "query_pre_attn_scalar",
            config.get("query_pre_attn_scalar") if family.has_windows else None,
            default=head_dim,
        )
        ** -0.5,
        windows=_windows(config, family, num_layers),
        local_rope_theta=local_theta,
        biases=_biases(config, family),
    )


def _refuse_what_is_not_served(config: Mapping[str, object], family: Family) -> None:
    activation, only = family.activation
    unserved: dict[str, tuple[object, ...]] = {
        activation: (None, only),
        "quantization_config": (None,),
        "use_bidirectional_attention": (None, False),
        "use_sliding_window": (None, False),
        **dict.fromkeys(SOFTCAPS, (None,)),
    }
    for key, allowed in unserved.items():
        if config.get(key) not in allowed:
            raise refuse(key, config[key], allowed=" or ".join(map(repr, allowed)), family=family)


def _biases(config: Mapping[str, object], family: Family) -> frozenset[str]:
    found = family.biases
    for key, projections in (("attention_bias", ATTENTION), ("mlp_bias", FFN)):
        value = config.get(key, False)
        if not isinstance(value, bool):
            raise damaged(key, repr(value), "true or false")
        found |= frozenset(projections if value else ())
    return found


def _windows(
    config: Mapping[str, object], family: Family, num_layers: int
) -> tuple[int | None, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        period = whole(
            "sliding_window_pattern",
            config.get("sliding_window_pattern", config.get("_sliding_window_pattern")),
            default=WINDOW_PERIOD,
        )
        kinds = [
            SLIDING if family.has_windows and layer % period < period - 1 else FULL
            for layer in range(num_layers)
        ]
    allowed = (FULL, SLIDING) if family.has_windows else (FULL,)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise damaged("layer_types", kinds, f"a list of {num_layers}")
    for kind in kinds:
        if kind not in allowed:
            raise refuse("layer_types", kind, allowed=" or ".join(allowed), family=family)
    if SLIDING not in kinds:
        return (None,) * num_layers
    window = whole("sliding_window", config.get("sliding_window"), high=MAX_CONTEXT)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(config: Mapping[str, object]) -> tuple[Mapping[str, object], float]:
    """What turns full layers, and theta of layers with a window (transformers 5, or 4)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise damaged("rope_parameters", repr(rope), "an object")
    local: object = {}
    if FULL in rope or SLIDING in rope:
        local, rope = rope.get(SLIDING) or {}, rope.get(FULL) or {}
        if not isinstance(rope, dict) or not isinstance(local, dict):
            raise damaged("rope_parameters", repr(rope), "an object for each kind of layer")
    assert isinstance(local, dict)
    if local.get("rope_type", "default") != "default":
        raise CheckpointError(
            f"rope_parameters {SLIDING}",
            found=repr(local["rope_type"]),
            allowed="default",
            remedy="Choose a model whose window layers keep their positions as they are.",
        )
    theta = local.get("rope_theta", config.get("rope_local_base_freq"))
    return rope, real("rope_local_base_freq", theta, default=10_000.0)


def parse_rope(
    rope: Mapping[str, object], config: Mapping[str, object]
) -> tuple[float, RopeScaling | None]:
    """theta and scaling: rope_parameters (transformers 5), or rope_theta and rope_scaling (4)."""
    theta = real("rope_theta", rope.get("rope_theta", config.get("rope_theta")), default=10_000.0)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            "partial_rotary_factor",
            found=rope["partial_rotary_factor"],
            allowed="1.0",
            remedy="Choose a model whose heads turn in full width.",
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(
            "rope_type",
            found=repr(kind),
            allowed="default, linear, llama3 or yarn",
            remedy="Choose a model with one of these.",
        )
    factor = real("rope factor", rope.get("factor"))
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    original = whole(
        "original_max_position_embeddings",
        rope.get("original_max_position_embeddings", config.get("max_position_embeddings")),
        high=MAX_CONTEXT,
    )
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor,
            original,
            low_freq_factor=real("low_freq_factor", rope.get("low_freq_factor")),
            high_freq_factor=real("high_freq_factor", rope.get("high_freq_factor")),
        )
    given = rope.get("attention_factor")
    return theta, RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=real("beta_fast", rope.get("beta_fast"), default=32.0),
        beta_slow=real("beta_slow", rope.get("beta_slow"), default=1.0),
        attention_factor=None if given is None else real("attention_factor", given),
        truncate=rope.get("truncate", True) is not False,
    )
