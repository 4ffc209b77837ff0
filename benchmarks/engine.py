"""The engine beside transformers, interleaved in one run: decode, prefill, time to first token.

Each round runs ours, then the peer in fp32, then in bf16, from the same dequantised weights; rows
give medians over rounds, and the peer is the better of its two dtypes. Ours goes through the real
scheduler. The floor printed per row is what this machine's memory and multipliers would allow.
`python -m benchmarks.engine [--quick] [--json FILE] [--model PATH] [--threads N]`
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import warnings
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.peer import transformers_llama
from engine.config import DEFAULT_STEP_TOKENS, ModelSpec, ScheduleConfig
from engine.execute.runner import ModelRunner, RunnerConfig, load_runner
from engine.execute.weights import ModelConfig, open_checkpoint
from engine.schedule.events import SequenceFailed, TokensProduced
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from policies.contract.wire import Sampling

DECODE_CONTEXT = 256
WARM_PROMPT = 2000
PAGE_SIZE = 64
NUM_PAGES = 640
ENDLESS = 1 << 12


@dataclass(frozen=True, slots=True)
class Result:
    """One row: ratio > 1 means ours is better."""

    name: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    ratio: float


class Ours:
    """The engine's own loop on one thread: plan, execute, apply."""

    def __init__(self, runner: ModelRunner, *, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._sequence = 0
        self._decoding: set[int] = set()
        self._scheduler = Scheduler(
            ScheduleConfig(
                num_pages=NUM_PAGES,
                page_size=PAGE_SIZE,
                context_tokens=runner.context_tokens,
                step_tokens=DEFAULT_STEP_TOKENS,
            )
        )

    def prompt(self, tokens: int) -> array[int]:
        return array("I", [self._random.randrange(3, self._vocab_size) for _ in range(tokens)])

    def submit(self, prompt: array[int], max_tokens: int) -> int:
        self._sequence += 1
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        self._runner.begin(self._sequence, prompt)
        new = NewSequence(self._sequence, prompt, bytes(32), sampling)
        self._scheduler.submit(new, time.monotonic())
        return self._sequence

    def step(self) -> set[int]:
        """One step; the sequences that got a token."""
        plan = self._scheduler.plan(time.monotonic())
        if plan is None:
            return set()
        events = self._scheduler.apply(self._runner.execute(plan), time.monotonic())
        assert not any(isinstance(event, SequenceFailed) for event in events), events
        return {event.sequence_id for event in events if isinstance(event, TokensProduced)}

    def first_token_s(self, prompt: array[int]) -> float:
        started = time.perf_counter()
        sequence_id = self.submit(prompt, 1)
        while sequence_id not in self.step():
            pass
        return time.perf_counter() - started

    def start_decoding(self, batch: int) -> None:
        """Distinct prompts, all prefilled: from now on a step is one token for each."""
        self._decoding = {self.submit(self.prompt(DECODE_CONTEXT), ENDLESS) for _ in range(batch)}
        waiting = set(self._decoding)
        while waiting:
            waiting -= self.step()

    def stop_decoding(self) -> None:
        for sequence_id in self._decoding:
            self._scheduler.abort(sequence_id, time.monotonic())
            self._runner.end(sequence_id)

    def step_s(self, steps: int) -> float:
        return median(timed(self.step) for _ in range(steps))


class Peer:
    """transformers with its own cache, greedy, one call a step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._token: torch.Tensor
        self._past: Any = None

    def _run(self, ids: torch.Tensor, past: Any = None) -> tuple[torch.Tensor, Any]:
        with torch.inference_mode():
            out = self._model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def first_token_s(self, prompt: array[int]) -> float:
        return timed(lambda: self._run(torch.tensor([prompt.tolist()])))

    def start_decoding(self, batch: int, prompt: array[int]) -> None:
        token, past = self._run(torch.tensor([prompt.tolist()]))
        past.batch_repeat_interleave(batch)
        self._token, self._past = token.repeat(batch, 1), past

    def step(self) -> None:
        self._token, self._past = self._run(self._token, self._past)

    def step_s(self, steps: int) -> float:
        return median(timed(self.step) for _ in range(steps))

    def keep(self, prompt: array[int]) -> None:
        """The prompt's cache is kept by hand: the best that it can do for a warm start."""
        _, self._past = self._run(torch.tensor([prompt.tolist()]))
        self._token = torch.tensor([prompt.tolist()[-1:]])

    def warm_first_token_s(self) -> float:
        self._past.crop(-1)
        return timed(lambda: self._run(self._token, self._past))


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    flops: float


def measure_machine() -> Machine:
    block = torch.ones(32 << 20)
    square = torch.randn(1024, 1024).to(torch.bfloat16)

    def best(work: Callable[[], object]) -> float:
        return min(timed(work) for _ in range(20))  # short and often, to slip between neighbours

    return Machine(
        bytes_per_s=block.numel() * 4 / best(block.sum),
        flops=2 * 1024**3 / best(lambda: square @ square),
    )


def floor_s(facts: ModelConfig, machine: Machine, *, batch: int, new: int, context: int) -> float:
    """The larger of bytes ÷ bandwidth and operations ÷ rate for one step."""
    width = facts.num_heads * facts.head_dim
    kv_width = facts.num_kv_heads * facts.head_dim
    layer = facts.hidden_size * (2 * width + 2 * kv_width + 3 * facts.ffn_size)
    weights = facts.num_layers * layer
    head = facts.vocab_size * facts.hidden_size
    seen = context * new - new * (new - 1) // 2  # keys over all new tokens of a sequence
    operations = 2 * batch * (new * weights + head + 2 * facts.num_layers * seen * width)
    stored = 2 * weights + 4 * head + batch * facts.num_layers * context * kv_width * 2 * 2
    return max(stored / machine.bytes_per_s, operations / machine.flops)


def busy_seconds() -> float:
    """CPU seconds spent by everybody since boot; 0 where /proc is absent."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    fields = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(path: Path, *, quick: bool, threads: int | None) -> list[Result]:
    rounds, steps = (3, 6) if quick else (7, 24)
    checkpoint = open_checkpoint(path)
    facts = checkpoint.config
    spec = ModelSpec(
        name="benchmark",
        identity="benchmark",
        path=str(path),
        format="gguf" if path.is_file() else "safetensors",
    )
    config = RunnerConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE, threads=threads, device="cpu")
    runner = load_runner(spec, config)
    ours = Ours(runner, vocab_size=facts.vocab_size)
    peers = {
        "transformers fp32": Peer(transformers_llama(checkpoint, dtype=torch.float32)),
        "transformers bf16": Peer(transformers_llama(checkpoint, dtype=torch.bfloat16)),
    }
    machine = measure_machine()
    say(
        f"{runner.compute_precision}, {torch.get_num_threads()} threads, "
        f"{machine.bytes_per_s / 1e9:.0f} GB/s read, {machine.flops / 1e9:.0f} GFLOP/s bf16"
    )
    results: list[Result] = []

    def measure(
        name: str,
        our_s: Callable[[], float],
        peer_s: Callable[[Peer], float],
        *,
        tokens: int | None,
        floor: float,
    ) -> float:
        """tokens: the row is a rate of so many tokens a run; None: it is the time itself."""
        mine: list[float] = []
        theirs: dict[str, list[float]] = {peer: [] for peer in peers}
        for _ in range(rounds):
            mine.append(our_s())
            for peer_name, peer in peers.items():
                theirs[peer_name].append(peer_s(peer))
        best = min(theirs, key=lambda peer_name: median(theirs[peer_name]))
        ratio = median(their / our for their, our in zip(theirs[best], mine, strict=True))
        our, their = median(mine), median(theirs[best])
        if tokens is None:
            row = Result(name, our, their, best, "s", ratio)
        else:
            row = Result(name, tokens / our, tokens / their, best, "tokens/s", ratio)
        results.append(row)
        say(
            f"{name:16} ours {row.ours:10.4g}  {best} {row.peer:10.4g} {row.unit:8} "
            f"ratio {ratio:6.2f}  floor {floor * 1e3:.1f} ms of {our * 1e3:.1f}"
        )
        return our

    started, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    for batch in (1, 8, 32):
        ours.start_decoding(batch)
        for peer in peers.values():
            peer.start_decoding(batch, ours.prompt(DECODE_CONTEXT))
        measure(
            f"decode_b{batch}",
            lambda: ours.step_s(steps),
            lambda peer: peer.step_s(steps),
            tokens=batch,
            floor=floor_s(facts, machine, batch=batch, new=1, context=DECODE_CONTEXT),
        )
        ours.stop_decoding()
    for length in (512, 2048):
        measure(
            f"prefill_{length}",
            lambda length=length: ours.first_token_s(ours.prompt(length)),  # type: ignore[misc]
            lambda peer, length=length: peer.first_token_s(ours.prompt(length)),  # type: ignore[misc]
            tokens=length,
            floor=floor_s(facts, machine, batch=1, new=length, context=length),
        )
    cold = measure(
        "ttft_cold_2000",
        lambda: ours.first_token_s(ours.prompt(WARM_PROMPT)),
        lambda peer: peer.first_token_s(ours.prompt(WARM_PROMPT)),
        tokens=None,
        floor=floor_s(facts, machine, batch=1, new=WARM_PROMPT, context=WARM_PROMPT),
    )
    known = ours.prompt(WARM_PROMPT)
    ours.first_token_s(known)
    for peer in peers.values():
        peer.keep(known)
    left = WARM_PROMPT - (WARM_PROMPT - 1) // PAGE_SIZE * PAGE_SIZE
    warm = measure(
        "ttft_warm_2000",
        lambda: ours.first_token_s(known),
        lambda peer: peer.warm_first_token_s(),
        tokens=None,
        floor=floor_s(facts, machine, batch=1, new=left, context=WARM_PROMPT),
    )
    results.append(
        Result("warm_over_cold", cold / warm, 1.0, "our own cold start", "×", cold / warm)
    )
    say(f"warm_over_cold   {cold / warm:.1f} times quicker")
    elapsed = time.perf_counter() - started
    others = (busy_seconds() - busy - (time.process_time() - own)) / elapsed
    if others > 0.2:
        say(f"neighbours kept {others:.1f} cores busy: read times as upper bounds, trust ratios")
    return results


def main() -> None:
    # The peer renames its arguments between versions; both names work meanwhile.
    warnings.simplefilter("ignore", FutureWarning)
    parser = argparse.ArgumentParser(description="The engine beside transformers, in one run.")
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 7")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file or a folder")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    models = Path(os.environ.get("KAGARI_MODELS", "~/.cache/kagari/models")).expanduser()
    path = arguments.model or models / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        parser.error(f"{path} is absent: run `kagari models pull smollm2-135m`")
    results = run(path, quick=arguments.quick, threads=arguments.threads)
    rows = json.dumps([asdict(result) for result in results], indent=1)
    if arguments.json:
        arguments.json.write_text(rows + "\n")
    else:
        print(rows)


if __name__ == "__main__":
    main()
