"""How many uncached prompt tokens an engine still has to compute, as one gateway knows it.

    ours    each dispatch on credit, less what the engine's steps say is computed of it, until its
            first token or any other end: exact at every moment, and zero when we ask nothing of it
    queued  the part of ours that waits at the gateway: the engine has not heard of it
    others  what a report counted beyond ours at the step it was made in: up to a second old

A report is older than the steps that came since, so what left our side after its step is added
back before it is compared; else our own progress would come back as the work of others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_REMEMBERED = 4096  # changes since the last report: some seconds of steps


@dataclass(slots=True, eq=False)
class Credit:
    """One prompt's share of a backlog; 0 once it is no work any more."""

    tokens: int
    is_queued: bool = False  # at the gateway


class Backlog:
    """Of one engine, in one of its lives."""

    def __init__(self) -> None:
        self.ours = 0
        self.queued = 0
        self.others = 0
        self._step = 0  # of the newest frame
        self._left: deque[tuple[int, int]] = deque(maxlen=MAX_REMEMBERED)  # (known by step, tokens)

    @property
    def tokens(self) -> int:
        return self.ours + self.others

    @property
    def sent(self) -> int:
        """Of ours, what the engine was given."""
        return self.ours - self.queued

    def open(self, tokens: int) -> Credit:
        """Count uncached tokens as sent there, before anybody can send more."""
        self.ours += tokens
        return Credit(tokens)

    def enqueue(self, tokens: int) -> Credit:
        """Count them as work that will be sent there; `send` says when it is."""
        self.ours += tokens
        self.queued += tokens
        return Credit(tokens, is_queued=True)

    def resize(self, credit: Credit, tokens: int) -> None:
        """What a queued prompt will have to compute is known better now."""
        assert credit.is_queued, "what was sent is told of by steps"
        self._change(credit, tokens, self._step)

    def send(self, credit: Credit) -> None:
        """A queued prompt goes to the engine."""
        if credit.is_queued:
            credit.is_queued = False
            self.queued -= credit.tokens

    def advance(self, credit: Credit, tokens_left: int, step: int) -> None:
        """A step told how much of a prompt is left; more than expected if its hit was smaller."""
        self._step = max(self._step, step)
        if credit.tokens:  # else its end came first
            self._change(credit, max(1, tokens_left), self._step)

    def answer(self, credit: Credit, step: int) -> None:
        """Its first token came: the prompt is computed. Idempotent, as close is."""
        self._step = max(self._step, step)
        self._change(credit, 0, self._step)

    def close(self, credit: Credit) -> None:
        """It ended or was given up; the engine hears of it before its next step at best."""
        self._change(credit, 0, self._step + 1)

    def take_report(self, uncached_tokens: int, step: int) -> None:
        """What all gateways together had asked of the engine after that step."""
        while self._left and self._left[0][0] <= step:
            self._left.popleft()
        then = self.sent + sum([tokens for _, tokens in self._left])
        self.others = max(0, uncached_tokens - then)

    def _change(self, credit: Credit, tokens: int, step: int) -> None:
        left = credit.tokens - tokens
        if left:
            credit.tokens = tokens
            self.ours -= left
            if credit.is_queued:
                self.queued -= left
            else:
                self._left.append((step, left))
