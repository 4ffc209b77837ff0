"""Rounds of ours and of each peer, interleaved; what becomes a row, and who is lost on the way."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from benchmarks.beside import Beside, Figure
from benchmarks.engine.floors import Weights, floor_s
from benchmarks.engine.machine import Machine, Neighbours
from benchmarks.peers.driven import DrivenEngine, PeerLost, Spent

BUSY_NEIGHBOURS = 0.2  # cores
HOPELESS = 2.0  # times the best peer's time: one round of it is enough
SUFFIXES = {"exact": "", "fast": "_fast"}  # of rows, by what ours computes

Ask = Callable[[DrivenEngine, int], Spent]  # the engine and the number of the round


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Measured:
    """What each took, round by round; a hopeless peer has the first round only."""

    ours: Mapping[str, list[Spent]]  # by what it computes
    peers: Mapping[str, list[Spent]]
    neighbours: float  # busy cores of others


@dataclass
class Bench:
    quick: bool
    only: str
    threads: int
    machine: Machine
    weights: Weights
    ours: dict[str, DrivenEngine] = field(default_factory=dict)  # by what it computes
    peers: dict[str, DrivenEngine] = field(default_factory=dict)
    reference: DrivenEngine | None = None  # transformers in fp32, among the peers or not
    results: list[Beside] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # peer's or row's name → why

    def __post_init__(self) -> None:
        self._random = random.Random(0)
        self.neighbours = Neighbours(self.own_s)

    # --- what is asked ------------------------------------------------------------------------

    def wants(self, *names: str) -> bool:
        """Whether any of these rows was asked for, under any suffix."""
        told = [f"{name}{SUFFIXES[compute]}" for name in names for compute in self.ours]
        return any(part in name for part in self.only.split(",") for name in told)

    def prompt(self, tokens: int) -> list[int]:
        size = self.weights.facts.vocab_size
        return [self._random.randrange(3, size) for _ in range(tokens)]

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        return [self.prompt(tokens) for _ in range(count)]

    def rounds(self, full: int = 7, quick: int = 3) -> int:
        return quick if self.quick else full

    # --- who is here --------------------------------------------------------------------------

    def own_s(self) -> float:
        """CPU of this benchmark, all its processes."""
        engines = {id(engine): engine for engine in (*self.ours.values(), *self.peers.values())}
        if self.reference is not None:
            engines[id(self.reference)] = self.reference
        return time.process_time() + sum(engine.cpu_s() for engine in engines.values())

    def leave_out(self, name: str, why: str) -> None:
        self.absent[name] = why
        say(f"{name}: absent, {why}")

    def lose(self, name: str, lost: PeerLost) -> None:
        peer = self.peers.pop(name)
        if peer is not self.reference:
            peer.close()
        self.leave_out(name, f"it ran, then: {lost}")

    def of_all(self, work: Callable[[DrivenEngine], None]) -> None:
        for ours in self.ours.values():
            work(ours)
        for name, peer in list(self.peers.items()):
            try:
                work(peer)
            except PeerLost as lost:
                self.lose(name, lost)

    # --- rounds and rows ----------------------------------------------------------------------

    def measure(
        self,
        ask: Ask,
        *,
        rounds: int | None = None,
        peers: Mapping[str, DrivenEngine] | None = None,
        is_cheap: bool = False,
    ) -> Measured:
        """peers: those to ask, by default all; is_cheap: hopeless ones have all rounds too."""
        mine: dict[str, list[Spent]] = {compute: [] for compute in self.ours}
        theirs: dict[str, list[Spent]] = {
            name: [] for name in (self.peers if peers is None else peers)
        }
        hopeless: set[str] = set()
        self.neighbours.cores()
        for number in range(rounds or self.rounds()):
            for compute, engine in self.ours.items():
                mine[compute].append(ask(engine, number))
            for name in [name for name in theirs if name not in hopeless]:
                try:
                    theirs[name].append(ask(self.peers[name], number))
                except PeerLost as lost:
                    self.lose(name, lost)
                    del theirs[name]
            if number == 0 and theirs and not is_cheap:
                best = min(spent[0].s for spent in theirs.values())
                hopeless = {name for name in theirs if theirs[name][0].s > HOPELESS * best}
        return Measured(mine, theirs, self.neighbours.cores())

    def add(
        self,
        name: str,
        measured: Measured,
        *,
        tokens: int | None,
        floor: Callable[[str], float],
        detail: str = "",
    ) -> None:
        """tokens: the row is a rate of so many tokens a run; None: it is the time itself.

        floor: seconds, by what ours computes."""
        unit = "s" if tokens is None else "tokens/s"

        def shown(seconds: float) -> float:
            return seconds if tokens is None else tokens / seconds

        for compute, mine in measured.ours.items():
            own = median(spent.s for spent in mine)
            figures = _figures(measured, compute, lambda spent: spent.s, shown)
            least = floor(compute)
            told = f"floor {least * 1e3:.2f} ms of {own * 1e3:.2f} ({least / own:.0%})"
            self._add(name, compute, shown(own), unit, figures, measured, (told, detail))

    def add_cpu(self, name: str, measured: Measured, *, tokens: int) -> None:
        """CPU time of all cores per token."""

        def shown(seconds: float) -> float:
            return seconds * 1e3 / tokens

        for compute, mine in measured.ours.items():
            own = shown(median(spent.cpu_s for spent in mine))
            figures = _figures(measured, compute, lambda spent: spent.cpu_s, shown)
            self._add(name, compute, own, "CPU ms/token", figures, measured, ())

    def _add(
        self,
        name: str,
        compute: str,
        own: float,
        unit: str,
        figures: Mapping[str, Figure],
        measured: Measured,
        details: tuple[str, ...],
    ) -> None:
        once = [peer for peer, spent in measured.peers.items() if len(spent) == 1]
        several = any(len(mine) > 1 for mine in measured.ours.values())
        told = [*filter(None, details), f"neighbours {measured.neighbours:.1f} cores"]
        if once and several:
            told.append(f"one round: {', '.join(once)}")
        self.add_row(
            Beside(
                f"{name}{SUFFIXES[compute]}",
                own,
                unit,
                more_is_better=unit == "tokens/s",
                peers=figures,
                detail=", ".join(told),
            ),
            is_busy=measured.neighbours > BUSY_NEIGHBOURS,
        )

    def add_row(self, row: Beside, *, is_busy: bool = False) -> None:
        self.results.append(row)
        say(f"{row}\n  {row.detail}" + (", busy" if is_busy else ""))

    def floor(
        self, *, batch: int, new: int, context: int, shared: int = 0
    ) -> Callable[[str], float]:
        return lambda compute: floor_s(
            self.weights,
            self.machine,
            compute,
            batch=batch,
            new=new,
            context=context,
            shared=shared,
        )


def _figures(
    measured: Measured,
    compute: str,
    part: Callable[[Spent], float],
    shown: Callable[[float], float],
) -> dict[str, Figure]:
    """Of each peer: the median, and the median of its rounds' ratios to ours."""
    mine = [part(spent) for spent in measured.ours[compute]]
    figures: dict[str, Figure] = {}
    for name, spents in measured.peers.items():
        theirs = [part(spent) for spent in spents]
        ratios = [their / my for their, my in zip(theirs, mine, strict=False)]
        figures[name] = Figure(shown(median(theirs)), median(ratios))
    return figures
