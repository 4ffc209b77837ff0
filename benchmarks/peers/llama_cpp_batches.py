"""Conversations in llama.cpp: all sequences in one batch, as its server fills them.

The shared prefix is computed once and copied. Between turns a sequence keeps its cache, so a turn
computes the last answer's last token and its own text only. Decoding rows go first into a batch,
then prompts, shortest first.
"""

from __future__ import annotations

from typing import Protocol

from benchmarks.peers.conversations import Conversations

Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class Cache(Protocol):
    """What is needed of a llama_cpp_context.Context, whose module loads llama.cpp."""

    def forget_all(self) -> None: ...
    def prefill(self, prompt: list[int]) -> int: ...
    def copy(self, source: int, target: int) -> None: ...
    def decode(self, rows: list[Row]) -> None: ...
    def greedy(self, rows: int) -> list[int]: ...


def converse(context: Cache, conversations: Conversations, *, batch_tokens: int) -> None:
    shared, openings = conversations.shared, conversations.openings()
    context.forget_all()
    context.prefill(shared)
    for lane in range(1, len(openings)):
        context.copy(0, lane)
    cached = [len(shared)] * len(openings)
    pending = [prompt[len(shared) :] for prompt in openings]
    answers: list[list[int]] = [[] for _ in openings]
    while any(pending):
        rows: list[Row] = []
        asking: list[int] = []
        for lane in sorted(range(len(pending)), key=lambda lane: len(pending[lane])):
            part = pending[lane][: batch_tokens - len(rows)]
            pending[lane] = pending[lane][len(part) :]
            is_whole = bool(part) and not pending[lane]
            for index, token in enumerate(part):
                wants_logits = is_whole and index == len(part) - 1
                rows.append((token, cached[lane] + index, lane, wants_logits))
            cached[lane] += len(part)
            if is_whole:
                asking.append(lane)
        context.decode(rows)
        if not asking:
            continue
        for lane, token in zip(asking, context.greedy(len(asking)), strict=True):
            answers[lane].append(token)
            pending[lane] = [token]
            if len(answers[lane]) == conversations.answer_tokens:
                prompt = conversations.answered(lane, answers[lane])
                pending[lane] = [] if prompt is None else prompt[cached[lane] :]
                answers[lane] = []
