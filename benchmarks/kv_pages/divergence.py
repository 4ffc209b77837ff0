"""Rows of quality: next-token distributions over pages of each precision beside those over fp32."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.beside import Beside, compared
from benchmarks.engine.quality import prose
from benchmarks.steps import model_spec
from engine.execute.arena import Arena
from engine.execute.models.model import Model
from engine.execute.runner import ModelRunner, RunnerConfig, load_runner
from engine.execute.weights import open_checkpoint
from engine.schedule.plan import Row
from engine.store.page_codec import QUANTISED
from policies.contract.wire import Sampling

TOKENS = (20_000, 4_000)  # full, quick
PIECE = 1_000  # tokens of one context
PAGE_SIZE = 64
COMPARED = ("bf16", *QUANTISED)


@dataclass(slots=True)
class _Found:
    nats: float = 0.0
    same_best: int = 0


def rows(model: Path, *, quick: bool, threads: int | None) -> Iterator[Beside]:
    tokens = TOKENS[quick]
    with tempfile.TemporaryDirectory() as cache:
        ids = prose(model, open_checkpoint(model), Path(cache), characters=tokens * 8)[:tokens]
    assert len(ids) == tokens, f"{len(ids)} tokens of prose"
    spec = model_spec(model)
    config = RunnerConfig(
        num_pages=-(-PIECE // PAGE_SIZE),
        page_size=PAGE_SIZE,
        kv_dtype="fp32",
        device="cpu",
        threads=threads,
        step_tokens=PIECE,
    )
    runner = load_runner(spec, config)
    found = compare(runner, [ids[at : at + PIECE] for at in range(0, tokens, PIECE)])
    for precision in QUANTISED:
        told = ", ".join(f"{name} {each.same_best / tokens:.2%}" for name, each in found.items())
        yield compared(
            f"divergence/{precision}",
            found[precision].nats / tokens,
            {"bf16": found["bf16"].nats / tokens},
            "nats of KL",
            more_is_better=False,
            detail=f"from fp32 pages, {tokens} tokens of Python's documentation in contexts of "
            f"{PIECE}; same best token: {told}",
        )


def compare(runner: ModelRunner, pieces: list[list[int]]) -> dict[str, _Found]:
    """By precision: nats summed over all positions, and where the best token is the same."""
    arenas = {
        precision: Arena(
            replace(runner.arena.layout, precision=precision),
            runner.arena.num_pages,
            device=torch.device("cpu"),
        )
        for precision in COMPARED
    }
    found = {precision: _Found() for precision in COMPARED}
    for piece in pieces:
        wanted = list(_distributions(runner.model, runner.arena, piece))
        for precision, arena in arenas.items():
            for likely, told in zip(
                wanted, _distributions(runner.model, arena, piece), strict=True
            ):
                found[precision].nats += float((likely.exp() * (likely - told)).sum())
                found[precision].same_best += int((likely.argmax(-1) == told.argmax(-1)).sum())
    runner.model.read_from(runner.arena)
    return found


def _distributions(model: Model, arena: Arena, ids: list[int]) -> Iterator[torch.Tensor]:
    """Log probabilities after each token, some rows at a time; a cold prompt in one step."""
    model.read_from(arena)
    pages = list(range(arena.num_pages))
    row = Row(
        sequence_id=0,
        start=0,
        token_ids=array("I", ids),
        page_table=(pages,),
        generations=([0] * len(pages),),
        sampling=Sampling(max_tokens=1, temperature=0.0),
        num_completion=0,
        samples=False,
    )
    (first,) = model.forward([row])
    for at in range(first, first + len(ids), model.head_rows):
        head = model.head(range(at, min(at + model.head_rows, first + len(ids))))
        yield torch.log_softmax(head.logits, -1)
