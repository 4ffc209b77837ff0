"""Whether quantised pages serve a model: its logits over them beside those over bf16 ones, at load.

Keys with a few large channels lose the others to one scale a token. Such a model answers fluently
and wrongly, so it is refused by a number instead.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.execute.arena import Arena
from engine.execute.models.model import Model
from engine.schedule.plan import Row
from policies.contract.wire import Sampling

TOKENS = 192  # of the prompt, at most
POSITIONS = 64  # of them the last, whose logits are compared, at most
# Nats. SmolLM2-135M: 0.0005 with int8 and 0.004 with fp8; Gemma 3 270M: 0.01 and 0.009.
BOUND = 0.1


@dataclass(frozen=True, slots=True)
class Divergence:
    """Mean Kullback–Leibler divergence in nats of quantised pages' next tokens from bf16 ones'."""

    divergence: float
    bound: float
    positions: int
    seconds: float


def self_test(
    model: Model, arena: Arena, *, tokens: int, first_token: int | None, bound: float = BOUND
) -> Divergence:
    """Raises ConfigError beyond the bound. tokens: most of one step; first_token: what texts begin
    with, if anything. The pages are a few of the test's own; the arena's stay as they were."""
    began = time.perf_counter()
    prompt = _prompt(min(tokens, TOKENS), model.vocab_size, first_token)
    wanted, found = (
        torch.log_softmax(_logits(model, arena, precision, prompt), -1)
        for precision in ("bf16", arena.layout.precision)
    )
    model.read_from(arena)
    divergence = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    if not divergence <= bound:  # nor if it is no number
        raise ConfigError(
            "--kv-dtype",
            found=f"{arena.layout.precision}, whose pages move this model's next tokens by "
            f"{divergence:.3g} nats from those of bf16 pages",
            allowed=f"up to {bound:g} nats (mean of {len(wanted)} positions of a fixed prompt)",
            remedy="pass --kv-dtype bf16, or the other of fp8 and int8",
        )
    return Divergence(divergence, bound, len(wanted), time.perf_counter() - began)


def _logits(model: Model, arena: Arena, precision: str, prompt: array[int]) -> Tensor:
    """fp32 [positions, vocab] of the prompt's last tokens, over pages of that precision."""
    layout = replace(arena.layout, precision=precision)
    count = len(prompt)
    pages = list(range(-(-count // layout.page_size)))
    few = Arena(layout, len(pages), device=arena.pages.device)
    model.read_from(few)
    row = Row(
        sequence_id=0,
        start=0,
        token_ids=prompt,
        page_table=(pages,),
        generations=([0] * len(pages),),
        sampling=Sampling(max_tokens=1, temperature=0.0),
        num_completion=0,
        samples=False,
    )
    (first,) = model.forward([row])
    compared = min(count, POSITIONS, model.head_rows)
    return model.head(range(first + count - compared, first + count)).logits.clone()


def _prompt(count: int, vocab_size: int, first_token: int | None) -> array[int]:
    """Any tokens, the same everywhere: the generator is none of a library's (Knuth, 1997, MMIX).

    Models that were never without their first token attend to it, and to noise where it is absent.
    """
    state, ids = 1, array("I")
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        ids.append((state >> 33) % vocab_size)
    if first_token is not None:
        ids[0] = first_token
    return ids
