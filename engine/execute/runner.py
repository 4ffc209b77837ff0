"""Carries out step plans with a real model: batch, forward pass, sampling, tag verdict."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from engine.execute.arena import DTYPES, Arena
from engine.execute.batch import build_batch, tag_pairs
from engine.execute.kernels.registry import Kernels, kernels_for
from engine.execute.layers.attention import Attention
from engine.execute.logprobs import describe
from engine.execute.models.registry import build_model
from engine.execute.sampling import Choice, sample
from engine.execute.weights import Checkpoint, CheckpointError, RopeScaling, open_checkpoint
from engine.schedule.plan import PageCopy, Row, StepPlan, StepResult
from engine.store.page_codec import PageLayout
from policies.contract.wire import Sampling, TokenLogprob

Precision = Literal["auto", "bf16", "fp32"]
Progress = Callable[[str, float], None]
WARM_UP_TOKENS = (1, 16, 512)
PROMPT_LOGITS_ROWS = 64  # at a time: a whole chunk's logits would be hundreds of megabytes


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    num_pages: int
    page_size: int = 64
    dtype: Precision = "auto"  # bf16 where the CPU multiplies it, else fp32
    kv_dtype: Precision = "auto"  # bf16
    compute: Literal["exact"] = "exact"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None  # None: torch's own choice
    step_tokens: int = 2048


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
    """Opens, checks, loads, self-tests and warms the model. Raises CheckpointError before serving.

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
        self.compute_precision = precision
        layout = PageLayout(
            self.kv_precision,
            facts.num_layers,
            facts.num_kv_heads,
            config.page_size,
            facts.head_dim,
        )
        self.layout_id, self.page_bytes = layout.layout_id, layout.page_bytes
        self.step_tokens = config.step_tokens
        self.arena = Arena(layout, config.num_pages, device=device)
        self._device = device
        self._kernels: Kernels = kernels_for(device)
        tell("self-test", 0.0)
        self.attention = Attention(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            page_size=config.page_size,
            num_layers=facts.num_layers,
            null_page=self.arena.null_page,
            context_tokens=self.context_tokens,
            dtype=DTYPES[precision],
            device=device,
            windows=facts.windows,
        )
        tell("self-test", 1.0)
        # No position lies behind the pool: a file's word alone must not size the rotary tables.
        self._room = min(config.num_pages * config.page_size, self.context_tokens)
        self.model = build_model(
            checkpoint,
            scaling=scaling,
            context_tokens=self._room,
            attention=self.attention,
            kernels=self._kernels,
            dtype=DTYPES[precision],
            device=device,
            progress=lambda fraction: tell("weights", fraction),
        )
        self._warm_up(tell)

    def _warm_up(self, tell: Progress) -> None:
        """First calls build kernels; the null page's twin, page 0, is wiped afterwards."""
        for index, tokens in enumerate(WARM_UP_TOKENS):
            tell("warm-up", index / len(WARM_UP_TOKENS))
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

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass over all rows. corrupt holds indices of plan.rows: of pages with another
        generation than expected, or of logits that are not numbers."""
        started = time.perf_counter()
        self.arena.assign(plan.assigned)
        self.arena.copy((copy.source, copy.target) for copy in plan.copies)
        self.arena.zero_tails(plan.zero_tails)
        if not plan.rows:
            return StepResult(plan.step, ())
        batch = build_batch(plan.rows, self.attention, self.model.tiles)
        hidden = self.model.forward(batch, self.arena.pages)
        tokens: list[int | None] = [None] * len(plan.rows)
        insane: set[int] = set()
        logprobs: dict[int, TokenLogprob] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        for index, row in enumerate(plan.rows):
            if row.prompt_logprobs is not None:
                entries = self._tell_prompt(row, hidden, batch.first_tokens[index])
                if all(math.isfinite(entry.logprob) for entry in entries):
                    prompt_logprobs[index] = entries
                else:
                    insane.add(index)
        if batch.sampling_rows:
            logits = self.model.logits(hidden, batch.last_tokens)
            rows = [plan.rows[index] for index in batch.sampling_rows]
            choices = [Choice(row.sampling, row.num_completion, row.history) for row in rows]
            asking = [at for at, row in enumerate(rows) if row.sampling.logprobs is not None]
            own = logits[asking] if asking else None  # sample changes what it is given
            for index, token in zip(batch.sampling_rows, sample(logits, choices), strict=True):
                tokens[index] = token
                if token is None:
                    insane.add(index)
            if own is not None:
                indices = [batch.sampling_rows[at] for at in asking]
                chosen = [tokens[index] or 0 for index in indices]
                tops = [rows[at].sampling.logprobs or 0 for at in asking]
                logprobs = dict(zip(indices, describe(own, chosen, tops), strict=True))
        corrupt = self._corrupt_rows(plan.rows, plan.copies) | insane
        for index in corrupt:
            tokens[index] = None
            logprobs.pop(index, None)
            prompt_logprobs.pop(index, None)
        return StepResult(
            plan.step,
            tuple(tokens),
            tuple(sorted(corrupt)),
            time.perf_counter() - started,
            logprobs,
            prompt_logprobs,
        )

    def _tell_prompt(self, row: Row, hidden: Tensor, first: int) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the prompt tokens that a row tells; first: its first token row."""
        told, history, top = row.prompt_logprobs, row.history, row.sampling.prompt_logprobs
        assert told is not None
        assert history is not None
        entries: list[TokenLogprob] = []
        for start in range(told.start, told.stop, PROMPT_LOGITS_ROWS):
            positions = range(start, min(start + PROMPT_LOGITS_ROWS, told.stop))
            # The logits before a token tell how likely it was.
            at = first + positions.start - 1 - row.start
            rows = torch.arange(at, at + len(positions), device=self._device)
            logits = self.model.logits(hidden, rows)
            targets = history[positions.start : positions.stop].tolist()
            entries += describe(logits, targets, [top or 0] * len(targets))
        return tuple(entries)

    def _corrupt_rows(self, rows: tuple[Row, ...], copies: tuple[PageCopy, ...]) -> set[int]:
        """Checked after the reads and before anything is emitted, in one batch."""
        pairs = tag_pairs(rows, copies, device=self._device)
        verdict = self._kernels.verify_tags(
            self.arena.tags, pairs.pages, pairs.generations, pairs.rows, num_rows=len(rows)
        )
        return set(verdict.nonzero().view(-1).tolist()) if bool(verdict.any()) else set()
