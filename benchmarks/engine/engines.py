"""Starts ours and the peers, each in a process of its own, and keeps those that are sane."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.engine.bench import Bench, say
from benchmarks.engine.machine import quicker_precisions
from benchmarks.peers.catalogue import Absent, Present, find, peers_folder
from benchmarks.peers.driven import DrivenEngine, PeerLost
from benchmarks.peers.starts import (
    requantized,
    start_here,
    start_llama_cpp,
    start_transformers,
    start_vllm,
)
from benchmarks.peers.weights_folder import bf16_folder
from engine.__main__ import SPIN_COUNT
from engine.execute.weights import Checkpoint

VLLM_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SANE_PROMPT, SANE_TOKENS = 32, 16
SANE_GAP = 1.0  # nats; quantised activations split two near-equal tokens by 0.3 at most


class Insane(Exception):
    """Our own text is not the model's: no figure of it would mean anything."""


def start(
    bench: Bench, options: argparse.Namespace, checkpoint: Checkpoint, stack: ExitStack
) -> None:
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for compute in options.computes:
        ours = start_here(
            "benchmarks.engine.our_driver",
            options.model,
            compute,
            bench.threads,
            log=logs / f"ours-{compute}",
            environment={"GOMP_SPINCOUNT": SPIN_COUNT},  # as engines have it
        )
        stack.callback(ours.close)
        bench.ours[compute] = ours
        say(f"ours, {compute}: {ours.about}")
    _Peers(bench, options, checkpoint, stack, logs).start()
    _keep_sane(bench)


class _Peers:
    def __init__(
        self,
        bench: Bench,
        options: argparse.Namespace,
        checkpoint: Checkpoint,
        stack: ExitStack,
        logs: Path,
    ) -> None:
        self._bench = bench
        self._model: Path = options.model
        self._wanted: tuple[str, ...] = options.peers
        self._checkpoint = checkpoint
        self._stack = stack
        self._logs = logs
        # Which is better differs from CPU to CPU: both count, a quick run leaves out what never is.
        self._precisions: tuple[str, ...] = ("bf16", "fp32")
        if bench.quick:
            facts = checkpoint.config
            self._precisions = quicker_precisions(facts.hidden_size, facts.ffn_size)
            say(f"products are quickest in {', '.join(self._precisions)}: peers compute in these")

    def start(self) -> None:
        here = [found for name in self._wanted for found in self._present(name)]
        if here or "transformers" in self._wanted:
            self._start_transformers()
        for found in here:
            if found.peer.name == "llama.cpp":
                self._start_llama_cpp(found)
            else:
                self._start_vllm(found)

    def _present(self, name: str) -> list[Present]:
        """None where it is no peer with an environment of its own, or is named as absent."""
        if name == "transformers":
            return []
        match find(name):
            case Absent(_, why):
                self._bench.leave_out(name, why)
            case Present() if name == "llama.cpp" and self._model.is_dir():
                self._bench.leave_out(name, "it reads a GGUF file, and a folder is measured")
            case Present() as found:
                return [found]
        return []

    def _try(self, label: str, starter: Callable[[Path], DrivenEngine]) -> DrivenEngine | None:
        """starter is given a log. None: it does not start, and is named as absent."""
        began = time.perf_counter()
        try:
            engine = starter(self._logs / label.replace(" ", "-"))
        except PeerLost as lost:
            self._bench.leave_out(label, f"it does not start here: {lost}")
            return None
        self._stack.callback(engine.close)
        say(f"{label}: {engine.about}, started in {time.perf_counter() - began:.0f} s")
        return engine

    def _add(self, label: str, starter: Callable[[Path], DrivenEngine]) -> None:
        engine = self._try(label, starter)
        if engine is not None:
            self._bench.peers[label] = engine

    def _start_transformers(self) -> None:
        bench, model, threads = self._bench, self._model, self._bench.threads
        label = "transformers fp32"
        bench.reference = self._try(
            label, lambda log: start_transformers(model, "fp32", threads, log)
        )
        if "transformers" not in self._wanted:
            return
        if bench.reference is not None and "fp32" in self._precisions:
            bench.peers[label] = bench.reference
        if "bf16" in self._precisions:
            self._add(
                "transformers bf16", lambda log: start_transformers(model, "bf16", threads, log)
            )

    def _start_llama_cpp(self, here: Present) -> None:
        model, threads = self._model, self._bench.threads
        precision = self._checkpoint.precision
        self._add(
            f"llama.cpp {precision.upper()}",
            lambda log: start_llama_cpp(here, model, threads, log),
        )
        if precision == "q8_0":
            return
        target = peers_folder() / "weights" / f"{self._checkpoint.weights_digest[:16]}-q8_0.gguf"
        self._add(
            "llama.cpp Q8_0",
            lambda log: start_llama_cpp(
                here, requantized(here, model, target, threads), threads, log
            ),
        )

    def _start_vllm(self, here: Present) -> None:
        folder = bf16_folder(self._checkpoint, peers_folder() / "weights")
        threads = self._bench.threads
        for precision in self._precisions:
            self._add(
                f"vLLM {precision}",
                lambda log, precision=precision: start_vllm(  # type: ignore[misc]
                    here, folder, VLLM_DTYPES[precision], threads, log
                ),
            )


def _keep_sane(bench: Bench) -> None:
    """Each must go on with the model's own text as the fp32 reference would, or nearly.

    Raises Insane if ours does not."""
    reference = bench.reference
    if reference is None:
        return
    prompt = [1, *reference.greedy([1], SANE_PROMPT)]

    def gap(name: str, engine: DrivenEngine) -> float:
        told = engine.greedy(prompt, SANE_TOKENS)
        widest = max(float(nats) for nats in reference.call("gaps", prompt, told))
        say(f"{name}: its greedy tokens are at most {widest:.2f} nats below the reference's choice")
        return widest

    for compute, ours in bench.ours.items():
        if gap(f"ours, {compute}", ours) > SANE_GAP:
            raise Insane(f"{compute}: its text is not this model's, {SANE_GAP} nats off allowed")
    for name, peer in list(bench.peers.items()):
        try:
            off = gap(name, peer)
        except PeerLost as lost:
            bench.lose(name, lost)
            continue
        if off > SANE_GAP:
            why = f"its text is not this model's: {off:.2f} nats off, {SANE_GAP} allowed"
            bench.lose(name, PeerLost(why))
