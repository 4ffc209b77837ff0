"""Carries out step plans with a real model: batch, forward pass, sampling, tag verdict."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from engine.cores import own_cores
from engine.execute.arena import DTYPES, Arena
from engine.execute.batch import tag_pairs
from engine.execute.kernels.cpu.library import Library, load
from engine.execute.kernels.registry import Kernels, kernels_for
from engine.execute.logprobs import describe
from engine.execute.models.model import Model
from engine.execute.models.registry import build_model
from engine.execute.page_memory import page_memory as page_memory
from engine.execute.page_room import free_bytes, require_room
from engine.execute.page_self_test import Divergence, self_test
from engine.execute.sampling import Choice, sample
from engine.execute.weights import Checkpoint, CheckpointError, RopeScaling, open_checkpoint
from engine.schedule.plan import PageCopy, Row, StepPlan, StepResult
from engine.store.page_codec import PageLayout
from policies.contract.wire import Sampling, TokenLogprob

Precision = Literal["auto", "bf16", "fp32"]
KvPrecision = Literal["auto", "bf16", "fp32", "fp8", "int8"]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    num_pages: int
    page_size: int = 64
    dtype: Precision = "auto"  # bf16 where the CPU multiplies it, else fp32
    kv_dtype: KvPrecision = "auto"  # bf16
    compute: Literal["exact", "fast"] = "exact"
    kernels: Literal["auto", "torch"] = "auto"  # the CPU's own, where they can be built
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None  # None: a thread for each core
    step_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose forward pass is under way or done."""

    plan: StepPlan
    started: float  # time.perf_counter
    first_tokens: list[int]  # by plan row: the token row of its first token


@dataclass(slots=True)
class _Found:
    """What a step's rows are told, while it is gathered."""

    tokens: list[int | None]
    insane: set[int] = field(default_factory=set)  # rows whose logits are no numbers
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)


class Yarn(Protocol):
    """A catalogue entry's stretching of the context."""

    @property
    def factor(self) -> float: ...
    @property
    def original_context_tokens(self) -> int: ...


class ModelFiles(Protocol):
    """What the runner reads of an engine.config.ModelSpec."""

    @property
    def path(self) -> str: ...
    @property
    def rope_scaling(self) -> Yarn | None: ...
    @property
    def context_tokens(self) -> int | None: ...


def load_runner(
    spec: ModelFiles, config: RunnerConfig, progress: Progress | None = None
) -> ModelRunner:
    """Opens, checks, loads, self-tests and warms the model. Raises CheckpointError before serving,
    ConfigError for pages that memory does not hold, or quantised ones that fail the model.

    progress(stage, fraction in [0, 1]) is called with stages open, weights, self-test, warm-up.
    """
    tell = progress or (lambda stage, fraction: None)
    tell("open", 0.0)
    checkpoint = open_checkpoint(spec.path)
    tell("open", 1.0)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with torch.inference_mode():
        return ModelRunner(checkpoint, spec, config, tell)


def choose_device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def open_library(config: RunnerConfig, device: torch.device) -> Library | None:
    """The CPU's own kernels, unless the device, the precision or the machine asks for torch's."""
    if device.type != "cpu" or config.dtype == "fp32" or config.kernels == "torch":
        return None
    return load(threads=config.threads or own_cores().usable)


def choose_precision(wanted: Precision, device: torch.device) -> Literal["bf16", "fp32"]:
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16"
    return "bf16" if torch.cpu.get_capabilities().get("avx512_bf16") else "fp32"


def effective_rope(checkpoint: Checkpoint, spec: ModelFiles) -> tuple[RopeScaling | None, int]:
    """The stretching in force and the context in tokens; CheckpointError if it is too long."""
    facts = checkpoint.config
    scaling, most = facts.rope_scaling, facts.context_tokens
    if spec.rope_scaling is not None:
        stretched = spec.rope_scaling
        scaling = RopeScaling("yarn", stretched.factor, stretched.original_context_tokens)
        most = int(stretched.factor * stretched.original_context_tokens)
    context = spec.context_tokens or most
    if not 1 <= context <= most:
        raise CheckpointError(
            "context_tokens",
            found=context,
            allowed=f"1 to {most}",
            remedy="Ask for less, or choose an entry with rope scaling (smollm2-135m-32k).",
        )
    return scaling, context


class ModelRunner:
    """Implements plan.Runner. One thread uses it at a time."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelFiles, config: RunnerConfig, tell: Progress
    ) -> None:
        facts = checkpoint.config
        scaling, self.context_tokens = effective_rope(checkpoint, spec)
        device = choose_device(config.device)
        precision = choose_precision(config.dtype, device)
        self.kv_precision = "bf16" if config.kv_dtype == "auto" else config.kv_dtype
        self.vocab_size = facts.vocab_size
        self.weights_digest = checkpoint.weights_digest
        is_plain = checkpoint.precision in ("fp32", "f32", "fp16", "f16", "bf16")
        self.weights_precision = precision if is_plain else checkpoint.precision
        layout = PageLayout(
            self.kv_precision,
            facts.num_layers,
            facts.num_kv_heads,
            config.page_size,
            facts.head_dim,
        )
        self.layout_id, self.page_bytes = layout.layout_id, layout.page_bytes
        require_room(layout, config.num_pages, free_bytes(device))
        self.step_tokens = config.step_tokens
        self.arena = Arena(layout, config.num_pages, device=device)
        self._device = device
        self._kernels: Kernels = kernels_for(device)
        self._library = open_library(config, device)
        # No position lies behind the pool: a file's word alone must not size the rotary tables.
        self._room = min(config.num_pages * config.page_size, self.context_tokens)
        self.model: Model = build_model(
            checkpoint,
            scaling=scaling,
            context_tokens=self._room,
            arena=self.arena,
            kernels=self._kernels,
            library=self._library,
            max_rows=config.step_tokens,
            is_fast=config.compute == "fast",
            dtype=DTYPES[precision],
            device=device,
            tell=tell,
        )
        self.compute_precision = self.model.compute_precision
        self.arithmetic = self.model.arithmetic
        self._launched: Launched | None = None
        self.divergence: Divergence | None = None  # of quantised pages
        if layout.is_quantised:
            tell("self-test", 0.0)
            self.divergence = self_test(
                self.model,
                self.arena,
                tokens=min(self._room, self.step_tokens),
                first_token=facts.bos_token_id,
            )
            tell("self-test", 1.0)
        self._warm_up(tell)
        if device.type == "cpu":  # its pages take memory only when they are first written
            require_room(layout, config.num_pages, free_bytes(device))

    def _warm_up(self, tell: Progress) -> None:
        """First calls build what is built late; the null page's twin, page 0, is wiped after."""
        steps = self.model.warm_up_tokens
        for index, tokens in enumerate(steps):
            tell("warm-up", index / len(steps))
            count = min(tokens, self._room, self.step_tokens)
            pages = list(range(-(-count // self.arena.layout.page_size)))
            row = Row(
                sequence_id=0,
                start=0,
                token_ids=array("I", [0]) * count,
                page_table=(pages,),
                generations=([0] * len(pages),),
                sampling=Sampling(max_tokens=1, temperature=0.0),
                num_completion=0,
                samples=True,
            )
            self.execute(StepPlan(step=0, rows=(row,), assigned=(), zero_tails=()))
            self.arena.zero_tails([(page, 0) for page in pages])
        tell("warm-up", 1.0)

    def begin(self, sequence_id: int, prompt: array[int]) -> None:
        """Nothing is kept for a sequence: every row carries what it needs."""

    def end(self, sequence_id: int) -> None:
        """See begin."""

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass over all rows."""
        launched = self._begin(plan, self.model.forward)
        return self._judge(launched, self._find(launched))

    @property
    def runs_ahead(self) -> bool:
        """See plan.AheadRunner."""
        return self.model.runs_ahead

    def launch(self, plan: StepPlan) -> None:
        """See plan.AheadRunner."""
        self._launched = self._begin(plan, self.model.start)

    def collect(self, following: StepPlan | None) -> StepResult:
        """See plan.AheadRunner."""
        launched, self._launched = self._launched, None
        assert launched is not None, "nothing was launched"
        if following is not None:
            self.model.prepare(following.rows)
        self.model.wait()
        found = self._find(launched)
        if following is not None:
            following.follow(found.tokens)
            self.launch(following)
        return self._judge(launched, found)

    def _begin(self, plan: StepPlan, compute: Callable[[Sequence[Row]], list[int]]) -> Launched:
        """Carries out what the plan says of pages, then lets its rows be computed."""
        started = time.perf_counter()
        self.arena.assign(plan.assigned)
        if plan.copies:
            self.arena.copy((copy.source, copy.target) for copy in plan.copies)
        self.arena.zero_tails(plan.zero_tails)
        return Launched(plan, started, compute(plan.rows) if plan.rows else [])

    def _find(self, launched: Launched) -> _Found:
        """Chooses tokens, and takes all else that only the last forward can tell."""
        rows = launched.plan.rows
        found = _Found([None] * len(rows))
        sampling = [index for index, row in enumerate(rows) if row.samples]
        for at in range(0, len(sampling), self.model.head_rows):
            self._choose(launched, sampling[at : at + self.model.head_rows], found)
        for index, row in enumerate(rows):
            if row.prompt_logprobs is not None:
                entries = self._tell_prompt(row, launched.first_tokens[index])
                if all(math.isfinite(entry.logprob) for entry in entries):
                    found.prompt_logprobs[index] = entries
                else:
                    found.insane.add(index)
        return found

    def _judge(self, launched: Launched, found: _Found) -> StepResult:
        """Checks what was read; another step may compute meanwhile."""
        plan, rows = launched.plan, launched.plan.rows
        corrupt = self._corrupt_rows(rows, plan.copies)
        for index in corrupt | found.insane:
            found.tokens[index] = None
            found.logprobs.pop(index, None)
            found.prompt_logprobs.pop(index, None)
        return StepResult(
            plan.step,
            tuple(found.tokens),
            tuple(sorted(corrupt)),
            time.perf_counter() - launched.started,
            found.logprobs,
            found.prompt_logprobs,
            tuple(sorted(found.insane - corrupt)),
        )

    def _choose(self, launched: Launched, indices: list[int], found: _Found) -> None:
        """A token for each of these plan rows."""
        rows = [launched.plan.rows[index] for index in indices]
        last = [
            launched.first_tokens[index] + len(row.token_ids) - 1
            for index, row in zip(indices, rows, strict=True)
        ]
        head = self.model.head(last)
        best = head.best
        if best is None:
            tokens = self._sample(head.logits, rows, indices, found)
        else:  # it is the answer where nothing else is asked for
            tokens = best
            rest = [at for at, row in enumerate(rows) if not is_plain_greedy(row)]
            if rest:
                logits = head.logits if len(rest) == len(rows) else head.logits[rest]
                asking = [rows[at] for at in rest], [indices[at] for at in rest]
                for at, token in zip(rest, self._sample(logits, *asking, found), strict=True):
                    tokens[at] = token
        for index, token in zip(indices, tokens, strict=True):
            found.tokens[index] = token
            if token is None:
                found.insane.add(index)

    @torch.inference_mode()
    def _sample(
        self, logits: Tensor, rows: list[Row], indices: list[int], found: _Found
    ) -> list[int | None]:
        """As each row asks; logits fp32 [rows, vocab] are changed. indices: of the plan's rows."""
        asking = [at for at, row in enumerate(rows) if row.sampling.logprobs is not None]
        own = logits[asking] if asking else None  # sample changes what it is given
        choices = [Choice(row.sampling, row.num_completion, row.history) for row in rows]
        tokens = sample(logits, choices)
        if own is not None:
            chosen = [tokens[at] or 0 for at in asking]
            tops = [rows[at].sampling.logprobs or 0 for at in asking]
            told = describe(own, chosen, tops)
            found.logprobs.update(zip((indices[at] for at in asking), told, strict=True))
        return tokens

    @torch.inference_mode()
    def _tell_prompt(self, row: Row, first: int) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the prompt tokens that a row tells; first: its first token row."""
        told, history, top = row.prompt_logprobs, row.history, row.sampling.prompt_logprobs
        assert told is not None
        assert history is not None
        entries: list[TokenLogprob] = []
        for start in range(told.start, told.stop, self.model.head_rows):
            positions = range(start, min(start + self.model.head_rows, told.stop))
            # The logits before a token tell how likely it was.
            at = first + positions.start - 1 - row.start
            logits = self.model.head(range(at, at + len(positions))).logits
            targets = history[positions.start : positions.stop].tolist()
            entries += describe(logits, targets, [top or 0] * len(targets))
        return tuple(entries)

    def _corrupt_rows(self, rows: tuple[Row, ...], copies: tuple[PageCopy, ...]) -> set[int]:
        """Checked after the reads and before anything is emitted, in one batch."""
        if self._device.type == "cpu":
            foreign = self.arena.foreign
            corrupt = {
                index
                for index, row in enumerate(rows)
                for pages, held in zip(row.page_table, row.generations, strict=True)
                if foreign(pages, held)
            }
            # A copy's row read the source too.
            return corrupt.union(
                copy.row for copy in copies if foreign((copy.source,), [copy.generation])
            )
        pairs = tag_pairs(rows, copies, device=self._device)
        verdict = self._kernels.verify_tags(
            self.arena.tags, pairs.pages, pairs.generations, pairs.rows, num_rows=len(rows)
        )
        return set(verdict.nonzero().view(-1).tolist()) if bool(verdict.any()) else set()


def is_plain_greedy(row: Row) -> bool:
    """Whether the highest logit alone decides, and nothing is told of the others."""
    sampling = row.sampling
    return (
        sampling.temperature == 0
        and row.history is None
        and not sampling.logit_bias
        and row.num_completion >= sampling.min_tokens
        and sampling.logprobs is None
    )
