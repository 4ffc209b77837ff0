"""The seam between a runner and a forward pass, which is torch's (decoder.py) or the CPU's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.execute.arena import Arena
from engine.schedule.plan import Row

HEAD_ROWS = 64  # most logits at a time: those of a whole chunk would be hundreds of megabytes


class Head:
    """What the head says of some token rows; the logits may be changed, and live until the next
    forward or head.

    best: the first highest logit's token of each row, or None where a logit is not finite from
    above or no number; best itself is None where nobody looked.
    """

    __slots__ = ("_logits", "_rows", "best")

    def __init__(self, logits: Tensor, rows: int, best: list[int | None] | None) -> None:
        """rows: how many of the logits' first count."""
        self._logits, self._rows, self.best = logits, rows, best

    @property
    def logits(self) -> Tensor:
        """fp32 [rows, vocab]; sliced late, since a greedy step needs none."""
        return self._logits[: self._rows]


class Model(Protocol):
    """One forward pass at a time; its residual is kept until the next."""

    @property
    def compute_precision(self) -> str:
        """What goes into the body's products: bf16 or fp32, or int16 or int8 with a scale for each
        32 values."""

    @property
    def arithmetic(self) -> str:
        """Equal names: equal weights, tokens and options give equal bits, on any machine."""

    @property
    def warm_up_tokens(self) -> tuple[int, ...]:
        """Of the steps after which no other is slow because it is the first of its kind."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def head_rows(self) -> int:
        """Most rows of one call of head."""

    def read_from(self, arena: Arena) -> None:
        """From now on keys and values are written to and read from this one's pages, of the same
        size in tokens; the arena's memory stays the caller's to keep."""

    def forward(self, rows: Sequence[Row]) -> list[int]:
        """Computes all token rows and writes their keys and values; → of each plan row, the token
        row of its first token (the others follow it)."""

    @property
    def runs_ahead(self) -> bool:
        """Whether start returns before the token rows are computed."""

    def prepare(self, rows: Sequence[Row]) -> None:
        """These rows will be started next, with other token ids: lay them out beside what runs."""

    def start(self, rows: Sequence[Row]) -> list[int]:
        """Begins a forward; nothing else may be asked before wait."""

    def wait(self) -> None:
        """Until what was started is computed."""

    def head(self, token_rows: Sequence[int]) -> Head:
        """Of token rows of the last forward."""
