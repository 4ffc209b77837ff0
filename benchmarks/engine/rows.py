"""The whole run: start everyone, measure row after row, and tell what was absent."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

import torch

from benchmarks.beside import JsonRow, absent_rows
from benchmarks.engine import agents, decode, engines, memory, prompts, quality, step_cost
from benchmarks.engine.bench import Bench, say
from benchmarks.engine.floors import weights_of
from benchmarks.engine.machine import measure_machine
from engine.execute.weights import open_checkpoint


def run(options: argparse.Namespace) -> list[JsonRow]:
    checkpoint = open_checkpoint(options.model)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    weights = weights_of(checkpoint)
    machine = measure_machine(weights.stored_bytes)
    threads = torch.get_num_threads()
    bench = Bench(options.quick, options.only, threads, machine, weights)
    say(f"{threads} threads, {machine}, {weights.stored_bytes / 1e6:.0f} MB of weights a step")
    with ExitStack() as stack:
        engines.start(bench, options, checkpoint, stack)
        memory.add_row(bench, options.model)
        for part in (decode, prompts, agents, step_cost):
            # Once more, in case a neighbour was busy the last time.
            bench.machine = bench.machine.or_better(measure_machine(weights.stored_bytes))
            part.add_rows(bench)
        quality.add_rows(bench, options.model, checkpoint)
    say(f"{bench.machine}")
    rows = [row for result in bench.results for row in result.rows()]
    return rows + absent_rows(bench.absent)
