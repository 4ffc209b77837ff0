"""Rotary position embedding, halves layout (Su et al., 2021), with Llama's stretchings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.execute.host_memory import zeros
from engine.execute.weights.facts import RopeScaling

BLOCK_POSITIONS = 1024  # of which GrowingTables gets to know at a time


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, factors: Tensor | None = None
) -> tuple[Tensor, float]:
    """Inverse frequencies fp32 [head_dim / 2] and the factor on cos and sin, as transformers has.

    factors [head_dim / 2] divides the frequencies where scaling.type is "factors".
    """
    powers = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    inverse = 1.0 / powers
    if scaling is None:
        return inverse, 1.0
    if scaling.type == "linear":
        return inverse / scaling.factor, 1.0
    if scaling.type == "factors":
        assert factors is not None
        return inverse / factors, 1.0
    if scaling.type == "llama3":
        return _llama3(inverse, scaling), 1.0
    return _yarn(powers, head_dim, theta, scaling)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long waves are divided, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / inverse
    longest = scaling.original_context_tokens / scaling.low_freq_factor
    shortest = scaling.original_context_tokens / scaling.high_freq_factor
    stretched = torch.where(wavelength > longest, inverse / scaling.factor, inverse)
    smooth = (scaling.original_context_tokens / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(is_between, between, stretched)


def _yarn(
    powers: Tensor, head_dim: int, theta: float, scaling: RopeScaling
) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023), "NTK by parts" and its attention temperature."""

    def dimension(rotations: float) -> float:
        turns = scaling.original_context_tokens / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2).float() - low) / (high - low), 0, 1)
    keep = 1 - ramp
    inverse = 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep
    attention = scaling.attention_factor
    if attention is None:
        attention = 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
    return inverse, attention


def tables(inverse: Tensor, attention_factor: float, *, positions: range) -> tuple[Tensor, Tensor]:
    """cos and sin, each fp32 [positions, dim / 2], of positions of the effective (not the
    original) context."""
    angles = torch.arange(positions.start, positions.stop).float()[:, None] * inverse[None]
    sin = angles.sin()
    return angles.cos_().mul_(attention_factor), sin.mul_(attention_factor)


class GrowingTables:
    """cos and sin, each fp32 [context, dim / 2], known up to the furthest position asked for: a
    long context takes memory only where it is used."""

    def __init__(self, inverse: Tensor, attention_factor: float, *, context_tokens: int) -> None:
        self.cos, self.sin = (
            zeros(context_tokens, len(inverse), dtype=torch.float32) for _ in range(2)
        )
        self._turn = inverse, attention_factor
        self._known = 0

    def reach(self, context_tokens: int) -> None:
        """Positions below context_tokens can be read from now on; the others' memory may be
        written, so that a step may read meanwhile."""
        assert context_tokens <= len(self.cos), "within the context"
        while self._known < context_tokens:
            self._grow()

    @torch.inference_mode()
    def _grow(self) -> None:
        known = range(self._known, min(self._known + BLOCK_POSITIONS, len(self.cos)))
        cos, sin = tables(*self._turn, positions=known)
        self.cos[known.start : known.stop], self.sin[known.start : known.stop] = cos, sin
        self._known = known.stop


class Rotary:
    """The tables, laid out for products with whole heads."""

    def __init__(
        self, inverse: Tensor, attention_factor: float, *, context_tokens: int, device: torch.device
    ) -> None:
        cos, sin = tables(inverse, attention_factor, positions=range(context_tokens))
        # [context, 1, dim]: ready to broadcast over heads; the sign of rotate-half is in the sine.
        self._cos = torch.cat((cos, cos), 1)[:, None].to(device)
        self._sin = torch.cat((-sin, sin), 1)[:, None].to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each fp32 [rows, 1, dim], for int64 [rows]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, dim] → fp32, turned by its rows' positions; plain products, no fused adds."""
    rows, heads, dim = x.shape
    x = x.float()
    swapped = x.view(rows, heads, 2, dim // 2).flip(2).view(rows, heads, dim)
    return (x * cos).add_(swapped.mul_(sin))
