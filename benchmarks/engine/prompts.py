"""Rows of prompts: their rate, the first token cold and warm, and lanes that share one prompt."""

from __future__ import annotations

from statistics import median

from benchmarks.beside import Beside, Figure, compared
from benchmarks.engine.bench import SUFFIXES, Bench, Measured
from benchmarks.engine.loop import PAGE_SIZE

PREFILLS = ((512, None), (2048, "cpu_per_token_prefill_2048"))
WARM_PROMPT = 2000
FORKED_LANES = 8
LONG = 1000  # tokens that take a slow peer many seconds


def add_rows(bench: Bench) -> None:
    for length, cpu_name in PREFILLS:
        _add_prefill(bench, length, cpu_name)
    if bench.wants("ttft_cold_2000", "ttft_warm_2000", "warm_over_cold"):
        _add_first_token(bench)
    if bench.wants(f"fork_n{FORKED_LANES}"):
        _add_fork(bench)


def _cold(bench: Bench, length: int) -> Measured:
    rounds = bench.rounds(quick=2 if length > LONG else 3)
    prompts = bench.prompts(rounds, length)
    return bench.measure(lambda engine, number: engine.first_token(prompts[number]), rounds=rounds)


def _add_prefill(bench: Bench, length: int, cpu_name: str | None) -> None:
    name = f"prefill_{length}"
    if not bench.wants(name, cpu_name or name):
        return
    measured = _cold(bench, length)
    if bench.wants(name):
        floor = bench.floor(batch=1, new=length, context=length)
        bench.add(name, measured, tokens=length, floor=floor)
    if cpu_name is not None and bench.wants(cpu_name):
        bench.add_cpu(cpu_name, measured, tokens=length)


def _add_first_token(bench: Bench) -> None:
    cold = _cold(bench, WARM_PROMPT)
    floor = bench.floor(batch=1, new=WARM_PROMPT, context=WARM_PROMPT)
    bench.add("ttft_cold_2000", cold, tokens=None, floor=floor)
    warm = bench.measure(lambda engine, _: engine.warm_first_token(), is_cheap=True)
    new = WARM_PROMPT - (WARM_PROMPT - 1) // PAGE_SIZE * PAGE_SIZE
    floor = bench.floor(batch=1, new=new, context=WARM_PROMPT)
    bench.add("ttft_warm_2000", warm, tokens=None, floor=floor)
    for compute, spents in warm.ours.items():
        times = median(spent.s for spent in cold.ours[compute]) / median(s.s for s in spents)
        name = f"warm_over_cold{SUFFIXES[compute]}"
        bench.add_row(compared(name, times, {"our own cold start": 1.0}, "×", more_is_better=True))


def _add_fork(bench: Bench) -> None:
    """Lanes of one request share its prompt; as many requests of their own share nothing."""
    length = 500 if bench.quick else 1000
    for compute, ours in bench.ours.items():
        forked: list[float] = []
        apart: list[float] = []
        bench.neighbours.cores()
        for _ in range(bench.rounds(quick=2)):
            prompt = bench.prompt(length)
            forked.append(ours.spend("first_forked_tokens", prompt, FORKED_LANES).s)
            apart.append(ours.spend("first_tokens", bench.prompts(FORKED_LANES, length)).s)
        ratio = median(other / one for other, one in zip(apart, forked, strict=True))
        peers = {f"{FORKED_LANES} requests of their own": Figure(median(apart), ratio)}
        detail = f"prompts of {length}, neighbours {bench.neighbours.cores():.1f} cores"
        name = f"fork_n{FORKED_LANES}{SUFFIXES[compute]}"
        bench.add_row(
            Beside(name, median(forked), "s", more_is_better=False, peers=peers, detail=detail)
        )
