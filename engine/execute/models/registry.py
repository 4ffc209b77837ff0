"""Which class wires which family, and what it is built with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.execute.kernels.registry import Kernels
from engine.execute.layers.attention import Attention
from engine.execute.layers.rotary import Rotary, frequencies
from engine.execute.models.decoder import Decoder
from engine.execute.models.gemma3 import Gemma3
from engine.execute.models.llama import Llama
from engine.execute.models.qwen3 import Qwen3
from engine.execute.weights.facts import Checkpoint, CheckpointError, RopeScaling

# The keys are those of weights.families.FAMILIES, which refuses all others by name.
MODELS: dict[str, type[Decoder]] = {
    "llama": Llama,
    "qwen2": Llama,
    "qwen3": Qwen3,
    "gemma3": Gemma3,
}


def build_model(
    checkpoint: Checkpoint,
    *,
    scaling: RopeScaling | None,
    context_tokens: int,
    attention: Attention,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> Decoder:
    """The checkpoint's weights, loaded and self-tested; scaling and context are the effective."""
    facts = checkpoint.config
    factors = None
    if scaling is not None and scaling.type == "factors":
        factors = checkpoint.read("rope_freqs.weight")
        if not bool((factors.isfinite() & (factors > 0)).all()):
            raise CheckpointError(
                "rope_freqs.weight",
                found="a factor that is no positive number",
                allowed="positive finite numbers",
                remedy="The file is damaged; fetch it again.",
            )
    rotary = {}
    for window in attention.windows:
        inverse, attention_factor = (
            frequencies(facts.head_dim, facts.rope_theta, scaling, factors)
            if window is None
            else frequencies(facts.head_dim, facts.local_rope_theta, None)
        )
        rotary[window] = Rotary(
            inverse, attention_factor, context_tokens=context_tokens, device=device
        )
    return MODELS[facts.architecture](
        checkpoint,
        attention=attention,
        rotary=rotary,
        kernels=kernels,
        dtype=dtype,
        device=device,
        progress=progress,
    )
