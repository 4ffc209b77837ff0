"""The forward pass in torch ops: decoder layers over paged keys and values, embedding to head.

It serves where the CPU's own kernels do not (program.py): on a GPU, in fp32, without a compiler.
A family's wiring says what its layers are made of; the parts themselves are in layers/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execute.arena import Arena
from engine.execute.arithmetic import torch_arithmetic
from engine.execute.batch import Batch, build_batch
from engine.execute.kernels.registry import Kernels
from engine.execute.layers import page_values
from engine.execute.layers.activation import gelu_mul, silu_mul
from engine.execute.layers.attention import Attention
from engine.execute.layers.linear import Linear
from engine.execute.layers.norm import RmsNorm
from engine.execute.layers.rotary import Rotary, rotate
from engine.execute.layers.row_tiles import RowTiles, admit
from engine.execute.models.model import HEAD_ROWS, Head
from engine.execute.models.wiring import Wiring
from engine.execute.weights.facts import Checkpoint
from engine.schedule.plan import Row

GATES = {"silu": silu_mul, "gelu": gelu_mul}
HEAD_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # logits are wide: few rows at a time
MOST_LOGITS = 8 << 20  # of one product: a wide vocabulary takes fewer rows yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    attention_norm: RmsNorm
    qkv: Linear  # q, k and v in one product
    head_norm: RmsNorm | None = None  # of each head's query and key
    out: Linear
    out_norm: RmsNorm | None = None
    ffn_norm: RmsNorm
    gate_up: Linear
    gate: Callable[[Tensor], Tensor]
    down: Linear
    down_norm: RmsNorm | None = None

    def after_attention(self, attended: Tensor) -> Tensor:
        """[rows, heads × dim] → what to add to the residual."""
        added = self.out(attended)
        return added if self.out_norm is None else self.out_norm(added.float())

    def feed_forward(self, x: Tensor) -> Tensor:
        """fp32 residual [rows, hidden] → what to add to it."""
        added = self.down(self.gate(self.gate_up(self.ffn_norm(x))))
        return added if self.down_norm is None else self.down_norm(added.float())


class Decoder:
    """A models.model.Model. Residual in fp32, products in `dtype`, logits in fp32. rotary: by the
    layers' window."""

    head_rows = HEAD_ROWS
    warm_up_tokens = (1, 16, 512)  # torch's kernels by numbers of rows
    runs_ahead = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        wiring: Wiring,
        *,
        attention: Attention,
        rotary: Mapping[int | None, Rotary],
        kernels: Kernels,
        arena: Arena,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
    ) -> None:
        config = self.config = checkpoint.config
        self._checkpoint, self._wiring = checkpoint, wiring
        self.vocab_size = config.vocab_size
        self.attention, self.rotary, self._kernels = attention, rotary, kernels
        self._dtype, self._device = dtype, device
        self.read_from(arena)
        self.compute_precision = "bf16" if dtype == torch.bfloat16 else "fp32"
        self.arithmetic = f"{self.compute_precision}-{torch_arithmetic(device)}"
        self.layers: list[Layer] = []
        for layer in range(config.num_layers):
            self.layers.append(self._load_layer(f"model.layers.{layer}"))
            progress((layer + 1) / (config.num_layers + 1))
        embedding = checkpoint.read("model.embed_tokens.weight")
        head = embedding if config.tied_head else checkpoint.read("lm_head.weight")
        # bf16 logits tie, so the head stays fp32.
        self._head = Linear(head.to(device))
        # Scale and product are rounded to the weights' dtype, as in training.
        scale = torch.tensor(wiring.embedding_scale(config.hidden_size), dtype=dtype, device=device)
        self._embedding = embedding.to(device, dtype) * scale
        self._norm = self._load_norm("model.norm", dtype=torch.float32)
        self.tiles, self.head_tiles = self._admit_tiles()
        self._hidden = torch.empty(0)
        progress(1.0)

    def _load_layer(self, at: str) -> Layer:
        wiring = self._wiring

        def norm_after(name: str | None) -> RmsNorm | None:
            # What follows it, the residual, is fp32.
            return None if name is None else self._load_norm(f"{at}.{name}", dtype=torch.float32)

        return Layer(
            attention_norm=self._load_norm(f"{at}.{wiring.attention_norm}"),
            qkv=self._load_linear(at, *wiring.qkv),
            head_norm=None if wiring.head_norms is None else self._load_head_norm(at),
            out=self._load_linear(at, wiring.out),
            out_norm=norm_after(wiring.out_norm),
            ffn_norm=self._load_norm(f"{at}.{wiring.ffn_norm}"),
            gate_up=self._load_linear(at, *wiring.gate_up),
            gate=GATES[wiring.gate],
            down=self._load_linear(at, wiring.down),
            down_norm=norm_after(wiring.down_norm),
        )

    def _load_linear(self, at: str, *names: str) -> Linear:
        return load_linear(self._checkpoint, at, names, dtype=self._dtype, device=self._device)

    def _load_norm(self, name: str, *, dtype: torch.dtype | None = None) -> RmsNorm:
        weight = self._read(f"{name}.weight") + self._wiring.norm_shift
        return RmsNorm(weight, self.config.norm_eps, dtype=dtype or self._dtype)

    def _load_head_norm(self, at: str) -> RmsNorm:
        """What follows it, rotation, is computed in fp32."""
        gain = head_gain(self._checkpoint, self._wiring, at)
        assert gain is not None
        return RmsNorm(gain.to(self._device), self.config.norm_eps, dtype=torch.float32)

    def _read(self, name: str) -> Tensor:
        return self._checkpoint.read(name).to(self._device)

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
                (lambda x: torch.cat(self._project(layer, x), 1), residual),
                (layer.after_attention, attended),
                (layer.feed_forward, residual),
            ]
        )
        sizes = [size for size in HEAD_SIZES if size * config.vocab_size <= MOST_LOGITS] or [1]
        head = admit([(lambda x: self._head(self._norm(x)), residual[: sizes[-1]])], sizes=sizes)
        return body, head

    def _project(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 residual [rows, hidden] → queries and keys [rows, heads + kv heads, dim], values
        [rows, kv heads, dim]."""
        config = self.config
        count = config.num_heads + config.num_kv_heads
        turned = count * config.head_dim
        qkv = layer.qkv(layer.attention_norm(x))
        qk = qkv[:, :turned].view(-1, count, config.head_dim)
        if layer.head_norm is not None:
            qk = layer.head_norm(qk.float())
        return qk, qkv[:, turned:].view(-1, config.num_kv_heads, config.head_dim)

    def read_from(self, arena: Arena) -> None:
        """See models.model.Model."""
        self._arena = arena
        self.attention.null_page = arena.null_page

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> list[int]:
        """See models.model.Model."""
        batch = build_batch(rows, self.attention, self.tiles)
        self._hidden = self._decode(batch, self._arena)
        return batch.first_tokens

    def prepare(self, rows: Sequence[Row]) -> None:
        """See models.model.Model."""

    def start(self, rows: Sequence[Row]) -> list[int]:
        """See models.model.Model."""
        return self.forward(rows)

    def wait(self) -> None:
        """See models.model.Model."""

    @torch.inference_mode()
    def head(self, token_rows: Sequence[int]) -> Head:
        """See models.model.Model."""
        rows = torch.tensor(token_rows, device=self._device)
        return Head(self._logits(rows), len(rows), None)

    def _decode(self, batch: Batch, arena: Arena) -> Tensor:
        """The residual after the last layer, fp32 [padded, hidden]; keys and values are written."""
        x = self._embedding.index_select(0, batch.token_ids).float()
        pieces = x.split(batch.pieces)
        turns = {}
        for window, rotary in self.rotary.items():
            cos, sin = rotary.at(batch.positions)
            turns[window] = list(zip(cos.split(batch.pieces), sin.split(batch.pieces), strict=True))
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        padded = x.shape[0]
        queries = x.new_empty(padded, heads, dim, dtype=self._dtype)
        layout, pages = arena.layout, arena.pages
        kv_dtype = torch.float32 if layout.is_quantised else pages.dtype
        kv = x.new_empty(padded, 2, kv_heads, dim, dtype=kv_dtype)
        # Padding rows are not attended: they stay zero, hence finite.
        attended = x.new_zeros(padded, heads * dim, dtype=self._dtype)
        query_pieces, kv_pieces = queries.split(batch.pieces), kv.split(batch.pieces)
        attended_pieces = attended.split(batch.pieces)
        written = kv[: batch.num_tokens]
        layer_rows = 2 * kv_heads * layout.page_size
        for index, (layer, window) in enumerate(zip(self.layers, config.windows, strict=True)):
            for piece, (cos, sin), q, new in zip(
                pieces, turns[window], query_pieces, kv_pieces, strict=True
            ):
                qk, values = self._project(layer, piece)
                qk = rotate(qk, cos, sin)
                torch.mul(qk[:, :heads], config.query_scale, out=q)
                new[:, 0].copy_(qk[:, heads:])
                new[:, 1].copy_(values)
            offset = index * layer_rows
            if layout.is_quantised:
                page_values.write(written, pages, batch.places, offset=offset, layout=layout)
            else:
                self._kernels.write_pages(written, pages, batch.places, offset=offset)
            self.attention(
                queries,
                pages,
                layer=index,
                calls=batch.calls[window],
                out=attended,
                codes=layout if layout.is_quantised else None,
            )
            for piece, seen in zip(pieces, attended_pieces, strict=True):
                piece.add_(layer.after_attention(seen))
                piece.add_(layer.feed_forward(piece))
        return x

    def _logits(self, rows: Tensor) -> Tensor:
        """fp32 [rows, vocab] of the residual's rows, int64 [rows]."""
        count = len(rows)
        pieces = self.head_tiles.cover(count)
        spare = sum(pieces) - count
        if spare:
            rows = torch.cat((rows, rows.new_zeros(spare)))
        found = [
            self._head(self._norm(piece))
            for piece in self._hidden.index_select(0, rows).split(pieces)
        ]
        return (found[0] if len(found) == 1 else torch.cat(found))[:count]


def load_linear(
    checkpoint: Checkpoint,
    at: str,
    names: Sequence[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """One product for all these projections, with their biases where they have any."""
    # One tensor is fp32 at a time; only the packed form of the product stays.
    weights = [checkpoint.read(f"{at}.{name}.weight").to(device, dtype) for name in names]
    bias = read_bias(checkpoint, at, names)
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    return Linear(weight, None if bias is None else bias.to(device, dtype))


def read_bias(checkpoint: Checkpoint, at: str, names: Sequence[str]) -> Tensor | None:
    """fp32; that of all these projections, which all have one or none, see families.py."""
    if names[0].rpartition(".")[2] not in checkpoint.config.biases:
        return None
    return torch.cat([checkpoint.read(f"{at}.{name}.bias") for name in names])


def head_gain(checkpoint: Checkpoint, wiring: Wiring, at: str) -> Tensor | None:
    """fp32 [heads + kv heads, dim] of the norms of queries and keys, where the family has them."""
    if wiring.head_norms is None:
        return None
    counts = (checkpoint.config.num_heads, checkpoint.config.num_kv_heads)
    weights = [
        checkpoint.read(f"{at}.{name}.weight").expand(count, -1)
        for name, count in zip(wiring.head_norms, counts, strict=True)
    ]
    return torch.cat(weights) + wiring.norm_shift
