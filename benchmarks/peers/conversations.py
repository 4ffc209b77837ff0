"""Conversations of agents, as every engine is given them. Standard library only.

All begin with the same system prompt and tools. A turn adds a text of its own (a question, a
tool's result) and sends all that was said before again, the engine's own answers among it.
"""

from __future__ import annotations


class Conversations:
    """texts[conversation][turn]: token ids; each turn is answered with answer_tokens tokens."""

    def __init__(self, shared: list[int], texts: list[list[list[int]]], answer_tokens: int) -> None:
        self.shared = shared
        self.answer_tokens = answer_tokens
        self._texts = texts
        self._turns = [0] * len(texts)
        self._said = [shared + turns[0] for turns in texts]

    def openings(self) -> list[list[int]]:
        """The first prompt of each conversation."""
        return [list(said) for said in self._said]

    def answered(self, conversation: int, answer: list[int]) -> list[int] | None:
        """The prompt of its next turn, whole; None: this one is over."""
        assert len(answer) == self.answer_tokens, f"{len(answer)} tokens of an answer"
        self._turns[conversation] += 1
        turn, turns = self._turns[conversation], self._texts[conversation]
        if turn == len(turns):
            return None
        self._said[conversation] += answer + turns[turn]
        return list(self._said[conversation])

    def total_tokens(self) -> int:
        """Prompt and completion tokens over all turns, prompts as they are sent: whole."""
        total = 0
        for turns in self._texts:
            said = len(self.shared)
            for text in turns:
                said += len(text) + self.answer_tokens
                total += said
        return total

    def new_tokens(self) -> int:
        """Prompt tokens that no cache can hold: the shared ones once, each text, each answer."""
        texts = sum(len(text) for turns in self._texts for text in turns)
        answers = sum(len(turns) - 1 for turns in self._texts) * self.answer_tokens
        return len(self.shared) + texts + answers
