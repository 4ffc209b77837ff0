"""How GGML packs weights into blocks, and the way back to fp32; torch only when unpacking.

Formats as in llama.cpp's ggml-common.h: a block holds 32 or 256 weights beside its scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BLOCKS = 1 << 17  # unpacked at a time, so that temporaries stay small


def _half(blocks: Tensor, at: int, count: int = 1) -> Tensor:
    import torch

    return blocks[:, at : at + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[b, n] bytes → [b, 2n]: all low nibbles, then all high ones."""
    import torch

    return torch.cat((packed & 15, packed >> 4), 1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[b, 4] bytes → [b, 32] of 0 or 16."""
    import torch

    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, :, None] >> shifts) & 1).reshape(len(packed), 32) << 4


def _f32(blocks: Tensor) -> Tensor:
    import torch

    return blocks.contiguous().view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return _half(blocks, 0)


def _bf16(blocks: Tensor) -> Tensor:
    import torch

    return blocks.contiguous().view(torch.bfloat16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (quants.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * quants.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    import torch

    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[b, 12] bytes → the eight 6-bit scales and the eight 6-bit minima of a K block."""
    import torch

    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 6) << 4)), 1)
    minima = torch.cat((high & 63, (rest >> 4) | ((high >> 6) << 4)), 1)
    return scales.float(), minima.float()


def _k_affine(blocks: Tensor, quants: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks[:, 4:16])
    scales = (_half(blocks, 0) * scales)[:, :, None]
    minima = (_half(blocks, 2) * minima)[:, :, None]
    return (scales * quants.reshape(-1, 8, 32).float() - minima).reshape(-1, 256)


def _k_nibbles(packed: Tensor) -> Tensor:
    """[b, 128] bytes → [b, 8, 32]: each 32 bytes give a group of low, then of high nibbles."""
    import torch

    packed = packed.reshape(-1, 4, 32)
    return torch.stack((packed & 15, packed >> 4), 2).reshape(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    import torch

    shifts = torch.arange(8, dtype=torch.uint8)[None, :, None]
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:]) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    import torch

    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), 2).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_half(blocks, 208) * scales)[:, :, None] * quants).reshape(-1, 256)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    name: str
    weights: int  # in a block
    num_bytes: int  # of a block
    unpack: Callable[[Tensor], Tensor]  # uint8 [blocks, num_bytes] → fp32 [blocks, weights]


FORMATS = {
    0: BlockFormat("f32", 1, 4, _f32),
    1: BlockFormat("f16", 1, 2, _f16),
    2: BlockFormat("q4_0", 32, 18, _q4_0),
    3: BlockFormat("q4_1", 32, 20, _q4_1),
    6: BlockFormat("q5_0", 32, 22, _q5_0),
    7: BlockFormat("q5_1", 32, 24, _q5_1),
    8: BlockFormat("q8_0", 32, 34, _q8_0),
    12: BlockFormat("q4_k", 256, 144, _q4_k),
    13: BlockFormat("q5_k", 256, 176, _q5_k),
    14: BlockFormat("q6_k", 256, 210, _q6_k),
    30: BlockFormat("bf16", 1, 2, _bf16),
}


def unpack(form: BlockFormat, data: Tensor) -> Tensor:
    """uint8 [bytes] → fp32 [weights], a new tensor."""
    import torch

    blocks = data.view(-1, form.num_bytes)
    weights = torch.empty(len(blocks), form.weights)
    step = CHUNK_BLOCKS if form.weights > 1 else CHUNK_BLOCKS * 32
    for start in range(0, len(blocks), step):
        weights[start : start + step] = form.unpack(blocks[start : start + step])
    return weights.view(-1)
