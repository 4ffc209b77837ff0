"""How each family is wired, and which forward pass serves it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.execute.arena import Arena
from engine.execute.kernels.cpu.library import Library
from engine.execute.kernels.registry import Kernels
from engine.execute.layers.attention import Attention
from engine.execute.layers.rotary import GrowingTables, Rotary, frequencies
from engine.execute.models.decoder import Decoder
from engine.execute.models.gemma3 import GEMMA3
from engine.execute.models.llama import LLAMA
from engine.execute.models.model import Model
from engine.execute.models.native import NativeDecoder
from engine.execute.models.qwen3 import QWEN3
from engine.execute.models.wiring import Wiring
from engine.execute.weights.facts import Checkpoint, CheckpointError, RopeScaling

# The keys are those of weights.families.FAMILIES, which refuses all others by name.
WIRINGS: dict[str, Wiring] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
}


def build_model(
    checkpoint: Checkpoint,
    *,
    scaling: RopeScaling | None,
    context_tokens: int,
    arena: Arena,
    kernels: Kernels,
    library: Library | None,
    max_rows: int,
    is_fast: bool,
    dtype: torch.dtype,
    device: torch.device,
    tell: Callable[[str, float], None],
) -> Model:
    """The checkpoint's weights, loaded and self-tested; scaling and context are the effective.

    library: None for torch's forward pass; max_rows and is_fast are the other's. tell(stage,
    fraction) as in load_runner, of stages self-test and weights.
    """
    facts = checkpoint.config
    wiring = WIRINGS[facts.architecture]
    turns = _turns(checkpoint, scaling)

    def make_attention() -> Attention:
        return Attention(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            page_size=arena.layout.page_size,
            num_layers=facts.num_layers,
            null_page=arena.null_page,
            context_tokens=context_tokens,
            dtype=dtype,
            device=device,
            windows=facts.windows,
        )

    def weights_progress(fraction: float) -> None:
        tell("weights", fraction)

    tell("self-test", 0.0)
    if library is not None:
        tell("self-test", 1.0)
        return NativeDecoder(
            checkpoint,
            wiring,
            library=library,
            arena=arena,
            tables={
                window: GrowingTables(*turn, context_tokens=context_tokens)
                for window, turn in turns.items()
            },
            context_tokens=context_tokens,
            make_attention=make_attention,
            max_rows=max_rows,
            is_fast=is_fast,
            dtype=dtype,
            progress=weights_progress,
        )
    attention = make_attention()
    tell("self-test", 1.0)
    return Decoder(
        checkpoint,
        wiring,
        attention=attention,
        rotary={
            window: Rotary(*turn, context_tokens=context_tokens, device=device)
            for window, turn in turns.items()
        },
        kernels=kernels,
        arena=arena,
        dtype=dtype,
        device=device,
        progress=weights_progress,
    )


def _turns(
    checkpoint: Checkpoint, scaling: RopeScaling | None
) -> dict[int | None, tuple[Tensor, float]]:
    """What Rotary needs, by the layers' window."""
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
    return {
        window: frequencies(facts.head_dim, facts.rope_theta, scaling, factors)
        if window is None
        else frequencies(facts.head_dim, facts.local_rope_theta, None)
        for window in set(facts.windows)
    }
