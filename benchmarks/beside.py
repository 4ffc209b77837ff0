"""One measure of ours beside that of every peer present, and its rows in a benchmark's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

JsonRow = dict[str, object]


@dataclass(frozen=True, slots=True)
class Figure:
    """A peer's; ratio > 1 means ours is better."""

    value: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Beside:
    name: str
    ours: float
    unit: str
    more_is_better: bool
    peers: Mapping[str, Figure]  # name → figure; empty where none is present
    detail: str = ""

    @property
    def best(self) -> str | None:
        """The peer that does best: the one that counts."""
        if not self.peers:
            return None
        pick = max if self.more_is_better else min
        return pick(self.peers, key=lambda name: self.peers[name].value)

    def rows(self) -> list[JsonRow]:
        """The row beside the best peer, then one named NAME/PEER for each other."""
        best = self.best
        made: list[JsonRow] = [self._row(self.name, best)]
        made += [self._row(f"{self.name}/{name}", name) for name in self.peers if name != best]
        return made

    def _row(self, row_name: str, peer_name: str | None) -> JsonRow:
        figure = self.peers[peer_name] if peer_name is not None else None
        return {
            "name": row_name,
            "ours": self.ours,
            "peer": None if figure is None else figure.value,
            "peer_name": peer_name,
            "unit": self.unit,
            "ratio": None if figure is None else figure.ratio,
            "detail": self.detail,
        }

    def __str__(self) -> str:
        told = [
            f"{name} {figure.value:.4g} ({figure.ratio:.2f})" for name, figure in self.peers.items()
        ]
        return f"{self.name:16} ours {self.ours:.4g} {self.unit}; " + (", ".join(told) or "alone")


def compared(
    name: str,
    ours: float,
    peers: Mapping[str, float],
    unit: str,
    *,
    more_is_better: bool,
    detail: str = "",
) -> Beside:
    """With ratios of the figures themselves."""
    figures = {
        peer: Figure(value, ours / value if more_is_better else value / ours)
        for peer, value in peers.items()
    }
    return Beside(name, ours, unit, more_is_better, figures, detail)


def absent_rows(absent: Mapping[str, str]) -> list[JsonRow]:
    """What could not be measured, by name, with the reason and what brings it."""
    return [{"name": name, "absent": True, "why": why} for name, why in absent.items()]
