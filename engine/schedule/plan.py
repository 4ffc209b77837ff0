"""What a step will do and what it did, as values: the seam between the scheduler and a runner."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from policies.contract.wire import Sampling, TokenLogprob


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: compute token_ids at positions start, start+1, …

    page_table and generations hold one list a group (a tuple of one until a family needs more),
    the pages of positions [0, start + len(token_ids)) in order; nobody changes these lists, for a
    sequence that grows gets new ones. history, all tokens so far, is the sequence's own live array,
    for reading until the result is there; a row has it only if its penalties or prompt_logprobs
    need it.
    """

    sequence_id: int
    start: int
    token_ids: array[int]
    page_table: tuple[list[int], ...]
    generations: tuple[list[int], ...]
    sampling: Sampling
    num_completion: int  # completion tokens so far: min_tokens and the noise position
    samples: bool  # the last token is the newest: choose its successor
    history: array[int] | None = None
    prompt_logprobs: range | None = None  # prompt positions to tell of, from the logits before each


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A fork's own copy of the page that its prompt ends in. The source is read by this row."""

    row: int
    source: int
    generation: int  # of the source
    target: int  # assigned in the same plan


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step planned ahead follows the step before it, row by row: rows[i] computes the one token
    that row follows[i] of that step is about to choose, and follow() must fill it in."""

    step: int
    rows: tuple[Row, ...]
    assigned: tuple[tuple[int, int], ...]  # (page_id, generation) to write to the tag array first
    zero_tails: tuple[tuple[int, int], ...]  # (page_id, first unwritten offset) after the writes
    copies: tuple[PageCopy, ...] = ()  # after assigned, before zero_tails and the rows
    follows: tuple[int, ...] = ()

    def follow(self, tokens: Sequence[int | None]) -> None:
        """Fill in what the rows of the step before chose.

        A row that follows a corrupt one computes some token in vain: its sequence is over.
        """
        for row, index in zip(self.rows, self.follows, strict=True):
            row.token_ids[0] = tokens[index] or 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """tokens[i] belongs to rows[i]: the sampled token, or None where the row does not sample.

    None for a row that samples means "not yet": its last position counts as not computed and is
    planned again; the positions before it are computed. corrupt lists the indices of rows whose
    page tags did not match, insane of others whose logits are not finite: they end with an error
    and publish nothing. logprobs and prompt_logprobs hold, by row index, what rows that ask for
    them are told; not of those that end so.
    """

    step: int
    tokens: tuple[int | None, ...]
    corrupt: tuple[int, ...] = ()
    compute_s: float = 0.0
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    insane: tuple[int, ...] = ()


class Runner(Protocol):
    """What carries out plans: the model (execute/runner.py) or a script (script.py)."""

    def begin(self, sequence_id: int, prompt: array[int]) -> None:
        """A sequence was accepted; called before its first row."""

    def end(self, sequence_id: int) -> None:
        """A sequence is over; forget what was kept for it."""

    def execute(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """A runner that computes a step beside its caller; execute is launch and collect at once."""

    @property
    def runs_ahead(self) -> bool:
        """Whether launch returns before the step is computed. Then every row that samples gets its
        token: none is "not yet"."""

    def launch(self, plan: StepPlan) -> None:
        """Begin a step while none is under way."""

    def collect(self, following: StepPlan | None) -> StepResult:
        """Wait for the step under way, and begin the one that follows it as soon as its tokens are
        known. Raises what went wrong in either; then none is under way."""
