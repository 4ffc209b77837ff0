"""A measured row beside its budget, and what all measurements share."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.beside import Beside, compared
from gateway.text.model import TextModel

Pair = tuple[float, float]  # must, good


@dataclass(frozen=True)
class Row:
    """A budget and what was measured; unit of ours, must and good alike."""

    name: str
    ours: float
    must: float
    good: float
    unit: str
    more_is_better: bool = False
    detail: str = ""  # how it came about

    @property
    def ratio(self) -> float:
        return self.ours / self.must if self.more_is_better else self.must / max(self.ours, 1e-9)


@dataclass
class Bench:
    """What all measurements share."""

    quick: bool
    folder: Path
    bundle: bytes  # encoded
    text: TextModel
    mark_id: int
    rows: list[Row] = field(default_factory=list)
    besides: list[Beside] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # row's or peer's name → why

    def add(
        self,
        name: str,
        ours: float,
        must: float,
        good: float,
        unit: str,
        *,
        more_is_better: bool = False,
        detail: str = "",
    ) -> None:
        row = Row(name, ours, must, good, unit, more_is_better, detail)
        self.rows.append(row)
        print(
            f"{name}: {ours:.4g} {unit}, must {must:g}, ratio {row.ratio:.2f}",
            file=sys.stderr,
            flush=True,
        )
        if detail:
            print(f"  {detail}", file=sys.stderr, flush=True)

    def add_beside(
        self,
        name: str,
        ours: float,
        peers: dict[str, float],
        unit: str,
        *,
        more_is_better: bool = False,
        detail: str = "",
    ) -> None:
        made = compared(name, ours, peers, unit, more_is_better=more_is_better, detail=detail)
        self.besides.append(made)
        print(made, file=sys.stderr, flush=True)

    def leave_out(self, name: str, why: str) -> None:
        self.absent[name] = why
        print(f"{name}: absent, {why}", file=sys.stderr, flush=True)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
