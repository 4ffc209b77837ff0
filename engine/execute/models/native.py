"""The forward pass on the CPU's own kernels: one call a step runs the program (program.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

import torch

from engine.execute.arena import Arena
from engine.execute.arithmetic import torch_arithmetic
from engine.execute.kernels.cpu import library as cpu
from engine.execute.kernels.cpu.library import Args, Library
from engine.execute.layers.attention import Attention, Call, Span
from engine.execute.layers.packed import Packer
from engine.execute.layers.rotary import GrowingTables
from engine.execute.models.decoder import MOST_LOGITS
from engine.execute.models.model import HEAD_ROWS, Head
from engine.execute.models.program import Fallback, Program
from engine.execute.models.wiring import Wiring
from engine.execute.native_step import NativeStep
from engine.execute.weights.facts import Checkpoint
from engine.schedule.plan import Row


def takes_head_size(dim: int) -> bool:
    """Whether the attention kernel does; others are torch's."""
    return dim % 16 == 0 and dim <= 256


class NativeDecoder:
    """A models.model.Model on the CPU. One step at a time, of at most max_rows token rows."""

    warm_up_tokens = (1,)

    def __init__(
        self,
        checkpoint: Checkpoint,
        wiring: Wiring,
        *,
        library: Library,
        arena: Arena,
        tables: Mapping[int | None, GrowingTables],
        context_tokens: int,
        make_attention: Callable[[], Attention],
        max_rows: int,
        is_fast: bool,
        dtype: torch.dtype,
        progress: Callable[[float], None],
    ) -> None:
        """tables: by the layers' window. make_attention: torch's, made only if it is
        needed. is_fast: activations have 8 bits, but for the head's. dtype: of torch's products."""
        config = self.config = checkpoint.config
        self.vocab_size = config.vocab_size
        self.head_rows = max(1, min(HEAD_ROWS, MOST_LOGITS // config.vocab_size))
        self.max_rows = max_rows
        self.tables = tables
        self.context_tokens = context_tokens
        self.attention = None if takes_head_size(config.head_dim) else make_attention()
        self._library = library
        self._page_size = arena.layout.page_size
        self._calls: dict[int | None, list[Call]] = {}
        packer = Packer(library)
        program = Program(
            checkpoint,
            wiring,
            library,
            packer,
            max_rows=max_rows,
            head_rows=self.head_rows,
            context_tokens=context_tokens,
            tables=tables,
            attention=self.attention,
            calls=self._calls,
            is_fast=is_fast,
            dtype=dtype,
        )
        program.embed()
        for layer in range(config.num_layers):
            program.layer(layer)
            progress((layer + 1) / (config.num_layers + 1))
        program.head()
        self.compute_precision = program.precision
        self.fallbacks = sum(callable(entry) for entry in program.entries)
        self.arithmetic = f"{program.precision}-{library.arithmetic}"
        if self.fallbacks:
            self.arithmetic += f"-{dtype}-{torch_arithmetic(torch.device('cpu'))}"
        self._logits = program.logits
        self._best_ids, self._best_values = program.best_ids, program.best_values
        self._kept = program.kept, packer  # what the ops point to
        self._pages = program.pages
        self.read_from(arena)
        self._ops = cpu.program([entry for entry in program.entries if not callable(entry)])
        self._body = _slices(program.entries[: program.head_at], 0)
        first = sum(not callable(entry) for entry in program.entries[: program.head_at])
        self._head = _slices(program.entries[program.head_at :], first)
        self._whole = _slices(program.entries, 0)
        self._step = self._lay_out(())
        self._prepared: tuple[Sequence[Row], NativeStep] = (), self._step
        # One call computes all, and another thread can make it.
        self.runs_ahead = not self.fallbacks and library.threads > 1
        self._looked_at: list[int] | None = None
        progress(1.0)

    def read_from(self, arena: Arena) -> None:
        """See models.model.Model."""
        self._pages.be(arena)
        if self.attention is not None:
            self.attention.null_page = arena.null_page

    def forward(self, rows: Sequence[Row]) -> list[int]:
        """See models.model.Model; the head sees the last tokens of the rows that sample."""
        self._run(self._begin(self._lay_out(rows), rows))
        return self._step.first_tokens

    def prepare(self, rows: Sequence[Row]) -> None:
        """See models.model.Model."""
        if self.runs_ahead:
            self._prepared = rows, self._lay_out(rows)

    def start(self, rows: Sequence[Row]) -> list[int]:
        """See models.model.Model."""
        if not self.runs_ahead:
            return self.forward(rows)
        prepared, step = self._prepared
        if prepared is rows:
            step.take_ids(rows)
        else:
            step = self._lay_out(rows)
        (ops,) = self._begin(step, rows)
        assert isinstance(ops, range)
        self._library.start(self._ops, step.step, len(ops))
        return step.first_tokens

    def wait(self) -> None:
        """See models.model.Model."""
        self._library.finish()

    def _lay_out(self, rows: Sequence[Row]) -> NativeStep:
        step = NativeStep(
            rows,
            page_size=self._page_size,
            most_last=self.head_rows,
            context_tokens=self.context_tokens,
        )
        assert step.num_rows <= self.max_rows, (
            f"a step of {step.num_rows} token rows, allowed {self.max_rows} (step_tokens)"
        )
        for table in self.tables.values():
            table.reach(step.context_tokens)
        return step

    def _begin(self, step: NativeStep, rows: Sequence[Row]) -> list[range | Fallback]:
        """What is to be run of this step, the last one from now on."""
        most = max(step.ids)
        assert most < self.vocab_size, f"token {most}, allowed below {self.vocab_size}"
        if self.attention is not None:
            spans = [
                Span(first, len(row.token_ids), row.start, row.page_table[0])
                for first, row in zip(step.first_tokens, rows, strict=True)
            ]
            self._calls.update(self.attention.plans(spans))
        self._step = step
        self._looked_at = step.last.tolist()
        return self._whole if step.last else self._body

    def head(self, token_rows: Sequence[int]) -> Head:
        """See models.model.Model."""
        wanted = list(token_rows)
        assert len(wanted) <= self.head_rows, f"{len(wanted)} rows, allowed {self.head_rows}"
        if wanted != self._looked_at:
            self._step.look_at(wanted)
            self._run(self._head)
        self._looked_at = None  # the logits may be changed from now on
        count = len(wanted)
        tokens, values = self._best_ids[:count], self._best_values[:count]
        best = [
            token if isfinite(value) else None for token, value in zip(tokens, values, strict=True)
        ]
        return Head(self._logits, count, best)

    def _run(self, slices: Sequence[range | Fallback]) -> None:
        for part in slices:
            if isinstance(part, range):
                self._library.run(self._ops, self._step.step, start=part.start, count=len(part))
            else:
                with torch.inference_mode():
                    part(self._step)


def _slices(entries: Sequence[Args | Fallback], first: int) -> list[range | Fallback]:
    """Runs of ops by their indices in the program, whose `first` these start with."""
    found: list[range | Fallback] = []
    at = first
    for entry in entries:
        if callable(entry):
            found.append(entry)
            continue
        if found and isinstance(last := found[-1], range):
            found[-1] = range(last.start, at + 1)
        else:
            found.append(range(at, at + 1))
        at += 1
    return found
