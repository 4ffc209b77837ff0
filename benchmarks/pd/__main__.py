"""Time to first token and per token of two one-core engines: mixed at three chunks, and split.

`python -m benchmarks.pd [--quick] [--json FILE] [--model NAME] [--seed N]`. The same
agents play against a Kagari of two nodes each way, in turn; the answers must be the same. How often
cold prompts come is chosen by what an engine was measured to compute here, and told.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.beside import Beside, absent_rows, compared
from benchmarks.children import cpu_s
from benchmarks.engine.machine import Neighbours
from benchmarks.pd import cores
from benchmarks.pd.figures import FIGURES, Felt, Objective, highest
from benchmarks.pd.load import Answer, Shape, play, prefill_rate
from gateway.demo.stack import Stack

SPLIT = "split"
WAYS = {
    "no chunking": ("--nodes", "2", "--step-tokens", "8192"),
    "chunk 512": ("--nodes", "2", "--step-tokens", "512"),
    "chunk 256": ("--nodes", "2", "--step-tokens", "256"),
    SPLIT: ("--prefill", "1", "--decode", "1", "--split", "always"),
}
ASKED = {"chunk 512": 3.0, "chunk 256": 1.5}  # of time per token, p90
COLD_SHARE = 0.6  # of one engine's time: cold prompts alone
MOST_LOAD = 2.0
SEARCH_S = 60.0
SLO_LOAD = "slo_load"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one short run, no search of loads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue")
    parser.add_argument("--seed", type=int, default=20261130, help="of texts, lengths, pauses")
    options = parser.parse_args(arguments)
    cores.keep_off_engines()
    measured = Measured(options.model, options.seed, quick=options.quick)
    for way in WAYS:
        measured.measure(way)
    rows = measured.rows()
    for row in rows:
        print(row, flush=True)
    for way, least in ASKED.items():
        times = measured.smoother(way)
        print(f"time per token, p90: {times:.1f} × better than {way}, asked {least:g} ×")
    if options.json is not None:
        told_rows = [json_row for row in rows for json_row in row.rows()]
        options.json.write_text(json.dumps(told_rows + absent_rows(measured.absent), indent=1))
    return 0


class Measured:
    """What was felt by each way so far."""

    def __init__(self, model: str, seed: int, *, quick: bool) -> None:
        self._model, self._seed = model, seed
        self._seconds, self._num_loads = (40.0, 0) if quick else (90.0, 4)
        self._shape = Shape()
        self._objective: Objective | None = None
        self._texts: dict[str, str] = {}
        self._felt: dict[str, Felt] = {}
        self._slo_load: dict[str, float] = {}
        self._neighbours: list[str] = []
        self.absent = {SLO_LOAD: "left out by --quick"} if quick else {}

    def measure(self, way: str) -> None:
        """Raises AssertionError where an answer differs from that of another way."""
        with self._kagari(way) as (stack, neighbours):
            objective = self._objective or self._choose_load(stack)
            neighbours.cores()
            answers = self._play(stack, way, 1.0, seed=self._seed, seconds=self._seconds)
            self._neighbours.append(f"{way}: neighbours had {neighbours.cores():.1f} cores")
            self._check(way, answers)
            self._felt[way] = Felt.of(answers)
            if self._num_loads:
                self._slo_load[way] = self._highest_load(stack, way, objective, answers)

    @contextmanager
    def _kagari(self, way: str) -> Iterator[tuple[Stack, Neighbours]]:
        with tempfile.TemporaryDirectory(prefix="kagari-pd-") as folder:
            flags = ("--port", "0", "--model", self._model, "--threads", "1", *WAYS[way])
            with Stack(Path(folder, "home"), *flags) as stack:
                ours = [*stack.ready["pids"].values(), *cores.pin_engines(stack)]
                yield stack, Neighbours(lambda: sum(map(cpu_s, [os.getpid(), *ours])))

    def _choose_load(self, stack: Stack) -> Objective:
        """Cold prompts keep one engine busy for COLD_SHARE of the time, where it has no other."""
        rate = prefill_rate(stack, self._shape)
        cold_per_s = COLD_SHARE * rate / mean(self._shape.cold_tokens)
        self._shape = replace(self._shape, cold_per_s=cold_per_s)
        self._objective = Objective(rate)
        say(f"{cores.told()}\nload 1: {self._shape}\nobjective: {self._objective}")
        return self._objective

    def _play(
        self, stack: Stack, way: str, load: float, *, seed: int, seconds: float
    ) -> list[Answer]:
        began = time.monotonic()
        answers = play(stack, self._shape.times(load), seed=seed, seconds=seconds)
        prompts = sum(answer.reply.prompt_tokens for answer in answers)
        cached = sum(answer.reply.cached_tokens for answer in answers)
        paths = Counter(answer.reply.path for answer in answers)
        say(
            f"{way}, load {load:g}: {len(answers)} requests in {seconds:.0f} s (the last "
            f"ended after {time.monotonic() - began:.0f} s), {prompts:,} prompt tokens, "
            f"{cached / prompts:.0%} cached, paths {dict(paths)}"
        )
        assert paths["split" if way == SPLIT else "mixed"] > 0.9 * len(answers), paths
        return answers

    def _check(self, way: str, answers: Sequence[Answer]) -> None:
        for answer in answers:
            known = self._texts.setdefault(answer.name, answer.reply.text)
            assert answer.reply.text == known, f"{way}: {answer.name} is answered differently"

    def _highest_load(
        self, stack: Stack, way: str, objective: Objective, at_load_1: Sequence[Answer]
    ) -> float:
        """Requests a second. Each load has its own seed: no session comes twice to a Kagari."""
        rate_by_load = {0.0: 0.0, 1.0: len(at_load_1) / self._seconds}

        def is_met(load: float) -> bool:
            if load == 1.0:
                return objective.is_met(at_load_1)
            seed = self._seed + round(load * 1000)
            answers = self._play(stack, way, load, seed=seed, seconds=SEARCH_S)
            rate_by_load[load] = len(answers) / SEARCH_S
            return objective.is_met(answers)

        return rate_by_load[highest(is_met, most=MOST_LOAD, runs=self._num_loads)]

    def smoother(self, way: str) -> float:
        """How many times better split is than a mixed way in time per token, p90."""
        p90 = FIGURES["time_per_token_p90"][1]
        return p90(self._felt[way]) / p90(self._felt[SPLIT])

    def rows(self) -> list[Beside]:
        detail = "; ".join([f"load 1: {self._shape}", *self._neighbours])
        rows = [
            _row(name, {way: figure(felt) for way, felt in self._felt.items()}, unit, detail)
            for name, (unit, figure) in FIGURES.items()
        ]
        if self._slo_load:
            rows.append(
                _row(SLO_LOAD, self._slo_load, "requests/s", f"{self._objective}", more=True)
            )
        return rows


def _row(
    name: str, by_way: dict[str, float], unit: str, detail: str, *, more: bool = False
) -> Beside:
    """A way that met the objective under no load is no peer, but told."""
    peers = {way: value for way, value in by_way.items() if way != SPLIT and value}
    none = [f"{way}: never" for way, value in by_way.items() if not value]
    return compared(
        name, by_way[SPLIT], peers, unit, more_is_better=more, detail="; ".join([detail, *none])
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1:]))
