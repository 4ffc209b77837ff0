"""The Llama family: wiring only; what each part does is in layers/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execute.batch import Batch
from engine.execute.kernels.registry import Kernels
from engine.execute.layers.activation import silu_mul
from engine.execute.layers.attention import Attention
from engine.execute.layers.linear import Linear
from engine.execute.layers.norm import RmsNorm
from engine.execute.layers.rotary import Rotary, rotate
from engine.execute.layers.row_tiles import RowTiles, admit
from engine.execute.weights.facts import Checkpoint

HEAD_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # logits are wide: few rows at a time


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    attention_norm: RmsNorm
    qkv: Linear  # q, k and v in one product
    out: Linear
    ffn_norm: RmsNorm
    gate_up: Linear
    down: Linear

    def feed_forward(self, x: Tensor) -> Tensor:
        """fp32 residual [rows, hidden] → what to add to it, in the weights' dtype."""
        return self.down(silu_mul(self.gate_up(self.ffn_norm(x))))


class Llama:
    """Residual in fp32, products in `dtype`, logits in fp32."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        attention: Attention,
        rotary: Rotary,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
    ) -> None:
        config = self.config = checkpoint.config
        self._attention, self._rotary, self._kernels = attention, rotary, kernels
        self._dtype, self._device = dtype, device
        self._scale = config.head_dim**-0.5
        self.layers: list[LlamaLayer] = []
        for layer in range(config.num_layers):
            self.layers.append(self._load_layer(checkpoint, layer))
            progress((layer + 1) / (config.num_layers + 1))
        embedding = checkpoint.read("model.embed_tokens.weight")
        head = embedding if config.tied_head else checkpoint.read("lm_head.weight")
        # bf16 logits tie, so the head stays fp32.
        self._head = Linear(head.to(device))
        self._embedding = embedding.to(device, dtype)
        self._norm = self._load_norm(checkpoint, "model.norm", torch.float32)
        self.tiles, self.head_tiles = self._admit_tiles()
        progress(1.0)

    def _load_layer(self, checkpoint: Checkpoint, layer: int) -> LlamaLayer:
        at = f"model.layers.{layer}"

        def linear(*names: str) -> Linear:
            # One tensor is fp32 at a time; only the packed form of the product stays.
            parts = [
                checkpoint.read(f"{at}.{name}.weight").to(self._device, self._dtype)
                for name in names
            ]
            return Linear(torch.cat(parts) if len(parts) > 1 else parts[0])

        return LlamaLayer(
            attention_norm=self._load_norm(checkpoint, f"{at}.input_layernorm", self._dtype),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out=linear("self_attn.o_proj"),
            ffn_norm=self._load_norm(checkpoint, f"{at}.post_attention_layernorm", self._dtype),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )

    def _load_norm(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> RmsNorm:
        weight = checkpoint.read(f"{name}.weight").to(self._device)
        return RmsNorm(weight, self.config.norm_eps, dtype=dtype)

    def _admit_tiles(self) -> tuple[RowTiles, RowTiles]:
        """All layers have the same shapes, so the first stands for them."""
        layer, config = self.layers[0], self.config
        generator = torch.Generator().manual_seed(0)

        def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(count, width, generator=generator).to(self._device, dtype)

        residual = rows(512, config.hidden_size, torch.float32)
        attended = rows(512, layer.out.in_features, self._dtype)
        body = admit(
            [
                (lambda x: layer.qkv(layer.attention_norm(x)), residual),
                (layer.out, attended),
                (layer.feed_forward, residual),
            ]
        )
        head = admit(
            [(lambda x: self._head(self._norm(x)), residual[: HEAD_SIZES[-1]])], sizes=HEAD_SIZES
        )
        return body, head

    def forward(self, batch: Batch, arena: Tensor) -> Tensor:
        """The residual after the last layer, fp32 [padded, hidden]; keys and values are written."""
        x = self._embedding.index_select(0, batch.token_ids).float()
        pieces = x.split(batch.pieces)
        cos, sin = self._rotary.at(batch.positions)
        turns = list(zip(cos.split(batch.pieces), sin.split(batch.pieces), strict=True))
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        padded = x.shape[0]
        queries = x.new_empty(padded, heads, dim, dtype=self._dtype)
        kv = x.new_empty(padded, 2, kv_heads, dim, dtype=arena.dtype)
        # Padding rows are not attended: they stay zero, hence finite.
        attended = x.new_zeros(padded, heads * dim, dtype=self._dtype)
        query_pieces, kv_pieces = queries.split(batch.pieces), kv.split(batch.pieces)
        attended_pieces = attended.split(batch.pieces)
        written = kv[: batch.num_tokens]
        layer_rows = 2 * kv_heads * arena.shape[-2]
        turned = (heads + kv_heads) * dim
        for index, layer in enumerate(self.layers):
            for piece, (c, s), q, new in zip(pieces, turns, query_pieces, kv_pieces, strict=True):
                qkv = layer.qkv(layer.attention_norm(piece))
                qk = rotate(qkv[:, :turned].view(-1, heads + kv_heads, dim), c, s)
                torch.mul(qk[:, :heads], self._scale, out=q)
                new[:, 0].copy_(qk[:, heads:])
                new[:, 1].copy_(qkv[:, turned:].view(-1, kv_heads, dim))
            self._kernels.write_pages(written, arena, batch.places, offset=index * layer_rows)
            self._attention(queries, arena, layer=index, calls=batch.calls, out=attended)
            for piece, seen in zip(pieces, attended_pieces, strict=True):
                piece.add_(layer.out(seen))
                piece.add_(layer.feed_forward(piece))
        return x

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """fp32 [rows, vocab] of the residual's rows, int64 [rows]."""
        count = len(rows)
        pieces = self.head_tiles.cover(count)
        spare = sum(pieces) - count
        if spare:
            rows = torch.cat((rows, rows.new_zeros(spare)))
        found = [self._head(self._norm(piece)) for piece in x.index_select(0, rows).split(pieces)]
        return (found[0] if len(found) == 1 else torch.cat(found))[:count]
