"""Builds the program of a step: the family's ops in their order, and the arrays between them.

What has no kernel (a product with plain weights, a head size that the attention kernel does not
take) is a callable between two slices of it: torch computes that op alone, and all others stay as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, c_float, c_int32, pointer

import torch
from torch import Tensor

from engine.execute.arena import Arena
from engine.execute.host_memory import zeros
from engine.execute.kernels.cpu import library as cpu
from engine.execute.kernels.cpu.library import Args, Library, Quants
from engine.execute.layers.attention import Attention, Call
from engine.execute.layers.linear import Linear
from engine.execute.layers.packed import Packer, Part
from engine.execute.layers.rotary import GrowingTables
from engine.execute.layers.row_tiles import SIZES, RowTiles, admit
from engine.execute.models.decoder import HEAD_SIZES, head_gain, read_bias
from engine.execute.models.wiring import Wiring
from engine.execute.native_step import NativeStep
from engine.execute.weights.facts import Checkpoint

Fallback = Callable[[NativeStep], None]

TILED_ROWS = 48  # from so many on two planes by AMX tiles take no longer than one without


class Activations:
    """Rows between two ops: fp32 for a product of torch's, integers for one of the kernels'.

    Both are reserved, and only what is used takes memory.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        has_low: bool,
        has_words: bool = False,
        has_counts: bool = False,
        few: int = 0,
    ) -> None:
        """See Quants in abi.h; counts and words come with a low plane."""
        self._has_words = has_words
        self.floats = zeros(rows, width, dtype=torch.float32)
        self.quants: Quants | None = None
        if width % 32 == 0:
            planes = zeros(2 if has_low else 1, rows, width, dtype=torch.int8)
            scales = zeros(rows, width // 32, dtype=torch.float32)
            sums = zeros(rows, width // 16, dtype=torch.float32)
            counts = zeros(rows, width // 32, 4, dtype=torch.int32) if has_counts else None
            self._planes, self._scales, self._sums, self._counts = planes, scales, sums, counts
            self.quants = Quants(
                high=planes[0].data_ptr(),
                low=planes[1].data_ptr() if has_low else None,
                scales=scales.data_ptr(),
                sums=sums.data_ptr(),
                width=width,
                few=few,
                counts=None if counts is None else counts.data_ptr(),
            )

    def targets(self, parts: Sequence[Part]) -> dict[str, object]:
        """The fields of an op that writes what these parts of a product read."""
        fields: dict[str, object] = {}
        if any(part.packed is None for part in parts):
            fields["out"] = self.floats.data_ptr()
        if any(part.packed is not None for part in parts):
            assert self.quants is not None, "packed weights have whole blocks of inputs"
            fields["quants"] = pointer(self.quants)
        return fields

    def quantize(self, rows: int) -> None:
        """The integers of the first rows' fp32, as quantize_row of kernels.cpp makes them."""
        assert self.quants is not None, "of whole blocks"
        has_low = len(self._planes) == 2 and rows >= self.quants.few
        counts = self._counts if has_low else None
        blocks = self.floats[:rows].view(rows, -1, 32)
        largest = blocks.abs().amax(-1, keepdim=True)
        if counts is not None:
            largest[:] = largest.amax(1, keepdim=True)
        limit = 32512 if has_low else 127
        is_sane = largest.isfinite()
        factor = torch.where(is_sane & (largest >= 1e-30), limit / largest, 0)
        self._scales[:rows] = torch.where(is_sane, largest / limit, torch.nan).squeeze(-1)
        values = torch.where(is_sane, blocks * factor, 0).round_().to(torch.int32)
        high = (values + 128) >> 8 if has_low else values
        if has_low and self._has_words:
            words = values.to(torch.int16).view(-1, 2, 4, 4)[..., [0, 2, 1, 3]]
            planes = words.contiguous().view(torch.int8).view(-1, 2, 32).transpose(0, 1)
        else:
            planes = torch.stack((high, values - (high << 8)))
        of_rows = self._planes[: 1 + has_low, :rows]
        of_rows[:] = planes[: 1 + has_low].reshape(of_rows.shape)
        sums = values.view(rows, -1, 2, 16).sum(-1)
        sums[..., 0] += sums[..., 1]  # of the whole block, and of its second half
        self._sums[:rows] = (sums * self._scales[:rows, :, None]).view(rows, -1)
        if counts is not None:
            by_plane = planes.sum(-1).permute(1, 2, 0)
            counts[:rows, :, :2], counts[:rows, :, 2:] = -7 * by_plane, by_plane << 16


class PagesInUse:
    """The arena whose pages a program's ops and callables write and read; it can be changed."""

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.ops: list[list[cpu.Rope | cpu.Attend]] = []  # by layer

    def be(self, arena: Arena) -> None:
        self.arena = arena
        for layer, ops in enumerate(self.ops):
            for op in ops:
                op.arena = addresses(arena, layer)


def addresses(arena: Arena, layer: int) -> cpu.Arena:
    layout = arena.layout
    return cpu.Arena(
        data=arena.pages.data_ptr(),
        page_stride=layout.page_bytes,
        layer_offset=layout.layer_bytes * layer,
        kv_heads=layout.num_kv_heads,
        page_size=layout.page_size,
        dim=layout.head_dim,
        precision=cpu.PRECISIONS.index(layout.precision),
    )


class Program:
    """Ops and callables in their order, and the arrays between them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        wiring: Wiring,
        library: Library,
        packer: Packer,
        *,
        max_rows: int,
        head_rows: int,
        context_tokens: int,
        tables: Mapping[int | None, GrowingTables],
        attention: Attention | None,
        calls: Mapping[int | None, list[Call]],
        is_fast: bool,
        dtype: torch.dtype,
    ) -> None:
        """See NativeDecoder. attention: torch's, if it serves; calls: a step's, by window."""
        config = self._config = checkpoint.config
        self._checkpoint, self._wiring, self._tables = checkpoint, wiring, tables
        self._torch, self._calls = attention, calls
        is_fast = is_fast and library.isa != "scalar"  # which has no product of bytes
        self._dtype = dtype
        self._packer = packer
        self._tiles: dict[tuple[object, ...], RowTiles] = {}
        self.kept: list[object] = []  # what ops point to; not the checkpoint and its vocabulary
        self.entries: list[Args | Fallback] = []
        self.pages = PagesInUse()
        self.head_at = 0
        self.precision = "int8" if is_fast else "int16"
        hidden, dim = config.hidden_size, config.head_dim
        rows = max_rows + SIZES[-1]  # torch's products run in padded tiles
        self._head_sizes = [size for size in HEAD_SIZES if size <= head_rows]

        def floats(count: int, width: int) -> Tensor:
            return self._keep(zeros(count, width, dtype=torch.float32))

        # Tiles multiply both planes as soon as others one, if rows are many.
        is_tiled = library.isa == "amx"
        few = TILED_ROWS if is_tiled and is_fast else 0

        def activations(width: int) -> Activations:
            has_low = is_tiled or not is_fast
            made = Activations(
                rows,
                width,
                has_low=has_low,
                has_words=library.has_words,
                has_counts=is_tiled,
                few=few,
            )
            self.kept.append(made)
            return made

        self._x, self._added = floats(rows, hidden), floats(rows, hidden)
        self._qkv = floats(rows, (config.num_heads + 2 * config.num_kv_heads) * dim)
        self._queries = floats(rows, config.num_heads * dim)
        self._gate_up = floats(rows, 2 * config.ffn_size)
        self._normed = activations(hidden)
        self._attended = activations(config.num_heads * dim)
        self._gated = activations(config.ffn_size)
        self._last = Activations(
            head_rows + HEAD_SIZES[-1],
            hidden,
            has_low=True,
            has_words=library.has_words,
            has_counts=is_tiled,
        )
        self.kept.append(self._last)
        self.logits = floats(head_rows + HEAD_SIZES[-1], config.vocab_size)
        self.best_ids: Array[c_int32] = (c_int32 * head_rows)()
        self.best_values: Array[c_float] = (c_float * head_rows)()
        self._threads = library.threads
        num_floats = library.functions.kagari_attention_scratch(
            rows, config.num_heads, dim, context_tokens, library.threads
        )
        self._scratch = self._keep(zeros(num_floats, dtype=torch.float32))
        # What the last product gave, not yet in the residual.
        self._to_add: dict[str, object] = {}

    # --- the model's parts ----------------------------------------------------------------------

    def embed(self) -> None:
        name, hidden = "model.embed_tokens.weight", self._config.hidden_size
        scale = self._wiring.embedding_scale(hidden)
        (self._embedding,) = self._packer.parts(self._checkpoint, [name])
        if self._embedding.packed is not None:
            table = pointer(self._embedding.packed)
            self.entries.append(cpu.Embed(table=table, out=self._x.data_ptr(), scale=scale))
            return
        # Scale and product are rounded to the weights' dtype, as in training.
        rounded = torch.tensor(scale, dtype=self._dtype)
        weight = self._checkpoint.read(name).to(self._dtype) * rounded
        x = self._x

        def look_up(step: NativeStep) -> None:
            ids = torch.frombuffer(step.ids, dtype=torch.int32)
            x[: step.num_rows] = weight.index_select(0, ids)

        self.entries.append(look_up)

    def layer(self, index: int) -> None:
        at, wiring = f"model.layers.{index}", self._wiring
        qkv, out, gate_up, down = (
            self._parts(at, names)
            for names in (wiring.qkv, (wiring.out,), wiring.gate_up, (wiring.down,))
        )
        self._norm(f"{at}.{wiring.attention_norm}", self._normed, qkv)
        self._product(at, qkv, self._normed, self._qkv)
        self._attention(index, at, out)
        self._product(at, out, self._attended, self._added)
        self._add_later(at, wiring.out_norm)
        self._norm(f"{at}.{wiring.ffn_norm}", self._normed, gate_up)
        self._product(at, gate_up, self._normed, self._gate_up)
        self.entries.append(
            cpu.Gate(
                in_=self._gate_up.data_ptr(),
                width=self._config.ffn_size,
                is_gelu=wiring.gate == "gelu",
                **self._gated.targets(down),
            )
        )
        self._product(at, down, self._gated, self._added)
        self._add_later(at, wiring.down_norm)

    def head(self) -> None:
        """The residual's last sum belongs to the body: the head may look at it again."""
        self.entries.append(self._norm_op(**self._to_add))
        self.head_at = len(self.entries)
        name = "lm_head.weight"
        tied = self._config.tied_head
        (part,) = (self._embedding,) if tied else self._packer.parts(self._checkpoint, [name])
        gain = self._gain("model.norm")
        self.entries.append(
            self._norm_op(gain=gain.data_ptr(), only_last=1, **self._last.targets([part]))
        )
        if part.packed is not None:
            self.entries.append(self._gemm(part, self._last, self.logits, None, only_last=1))
        else:
            weight = self._checkpoint.read(part.names[0])
            # bf16 logits tie, so the head stays fp32.
            self._plain(
                part, Linear(weight), self._last, self.logits, self._head_sizes, only_last=True
            )
        self.entries.append(
            cpu.Best(
                logits=self.logits.data_ptr(),
                ids=addressof(self.best_ids),
                values=addressof(self.best_values),
                columns=self._config.vocab_size,
            )
        )

    # --- ops ------------------------------------------------------------------------------------

    def _norm_op(self, **fields: object) -> cpu.Norm:
        config = self._config
        return cpu.Norm(
            x=self._x.data_ptr(), eps=config.norm_eps, width=config.hidden_size, **fields
        )

    def _norm(self, name: str, to: Activations, parts: Sequence[Part]) -> None:
        gain = self._gain(name).data_ptr()
        self.entries.append(self._norm_op(gain=gain, **self._to_add, **to.targets(parts)))
        self._to_add = {}

    def _add_later(self, at: str, norm: str | None) -> None:
        self._to_add = {"added": self._added.data_ptr()}
        if norm is not None:
            self._to_add["post"] = self._gain(f"{at}.{norm}").data_ptr()

    def _gain(self, name: str) -> Tensor:
        return self._keep(self._checkpoint.read(f"{name}.weight") + self._wiring.norm_shift)

    def _keep(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        self.kept.append(tensor)
        return tensor

    def _parts(self, at: str, names: Sequence[str]) -> list[Part]:
        return self._packer.parts(self._checkpoint, [f"{at}.{name}.weight" for name in names])

    def _product(self, at: str, parts: Sequence[Part], given: Activations, out: Tensor) -> None:
        for part in parts:
            names = [name.removeprefix(f"{at}.").removesuffix(".weight") for name in part.names]
            bias = read_bias(self._checkpoint, at, names)
            if bias is not None:
                self._keep(bias)
            if part.packed is not None:
                self.entries.append(self._gemm(part, given, out, bias))
                continue
            weights = [self._checkpoint.read(name).to(self._dtype) for name in part.names]
            linear = Linear(
                torch.cat(weights) if len(weights) > 1 else weights[0],
                None if bias is None else bias.to(self._dtype),
            )
            self._plain(part, linear, given, out, SIZES)

    def _gemm(
        self,
        part: Part,
        given: Activations,
        out: Tensor,
        bias: Tensor | None,
        *,
        only_last: int = 0,
    ) -> cpu.Gemm:
        return cpu.Gemm(
            weight=pointer(part.packed),
            in_=pointer(given.quants),
            bias=None if bias is None else bias.data_ptr(),
            out=out[:, part.columns.start :].data_ptr(),
            columns=len(part.columns),
            stride=out.shape[1],
            only_last=only_last,
        )

    def _plain(
        self,
        part: Part,
        linear: Linear,
        given: Activations,
        out: Tensor,
        sizes: Sequence[int],
        *,
        only_last: bool = False,
    ) -> None:
        """Torch's product, over row counts at which it gives every row the same bits."""
        dtype = torch.float32 if only_last else self._dtype
        if not only_last:
            self.precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        tiles = self._admitted(linear, dtype, sizes)
        floats = given.floats
        columns = slice(part.columns.start, part.columns.stop)

        def multiply(step: NativeStep) -> None:
            at = 0
            for size in tiles.cover(len(step.last) if only_last else step.num_rows):
                # Rows behind the last are another step's: nobody reads what becomes of them.
                out[at : at + size, columns] = linear(floats[at : at + size].to(dtype))
                at += size

        self.entries.append(multiply)

    def _admitted(self, linear: Linear, dtype: torch.dtype, sizes: Sequence[int]) -> RowTiles:
        """One matrix stands for all of its shape."""
        key = (linear.in_features, linear.out_features, linear.has_bias, dtype, sizes[-1])
        if key not in self._tiles:
            generator = torch.Generator().manual_seed(0)
            sample = torch.randn(sizes[-1], linear.in_features, generator=generator).to(dtype)
            self._tiles[key] = admit([(linear, sample)], sizes=sizes)
        return self._tiles[key]

    def _attention(self, index: int, at: str, out: Sequence[Part]) -> None:
        config = self._config
        window = config.windows[index]
        gain = head_gain(self._checkpoint, self._wiring, at)
        turns = self._tables[window]
        rope = cpu.Rope(
            qkv=self._qkv.data_ptr(),
            gain=None if gain is None else self._keep(gain).data_ptr(),
            cos=turns.cos.data_ptr(),
            sin=turns.sin.data_ptr(),
            queries=self._queries.data_ptr(),
            heads=config.num_heads,
            eps=config.norm_eps,
            query_scale=config.query_scale,
        )
        self.entries.append(rope)
        self.pages.ops.append([rope])
        if self._torch is not None:
            self.entries.append(self._torch_attention(index, window, self._torch, out))
            return
        attend = cpu.Attend(
            queries=self._queries.data_ptr(),
            heads=config.num_heads,
            window=window or 0,
            scratch=self._scratch.data_ptr(),
            scratch_floats=len(self._scratch),
            threads=self._threads,
            **self._attended.targets(out),
        )
        self.entries.append(attend)
        self.pages.ops[-1].append(attend)

    def _torch_attention(
        self, index: int, window: int | None, attention: Attention, out: Sequence[Part]
    ) -> Fallback:
        config, calls, attended = self._config, self._calls, self._attended
        queries = self._queries.view(-1, config.num_heads, config.head_dim)
        pages, is_packed = self.pages, any(part.packed is not None for part in out)

        def attend(step: NativeStep) -> None:
            rows, arena = step.num_rows, pages.arena
            assert arena is not None, "pages are known before a step"
            found = attention(
                queries[:rows].to(attention.dtype),
                arena.pages,
                layer=index,
                calls=calls[window],
                out=torch.empty(rows, attended.floats.shape[1], dtype=attention.dtype),
                codes=arena.layout if arena.layout.is_quantised else None,
            )
            attended.floats[:rows] = found
            if is_packed:
                attended.quantize(rows)

        return attend
