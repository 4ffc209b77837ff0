"""Conversations of agents: each turn sends all again, and every engine is given the same tokens."""

from __future__ import annotations

import pytest

from benchmarks.peers.conversations import Conversations


def test_a_turn_sends_what_was_said_before_with_the_engines_own_answer() -> None:
    conversations = Conversations([1, 2], [[[3], [4, 5]], [[6], [7]]], answer_tokens=2)
    assert conversations.openings() == [[1, 2, 3], [1, 2, 6]]
    assert conversations.answered(0, [90, 91]) == [1, 2, 3, 90, 91, 4, 5]
    assert conversations.answered(0, [92, 93]) is None
    assert conversations.answered(1, [94, 95]) == [1, 2, 6, 94, 95, 7]


def test_tokens_are_counted_as_sent_and_as_no_cache_can_hold() -> None:
    conversations = Conversations([1, 2], [[[3], [4, 5]], [[6], [7]]], answer_tokens=2)
    assert conversations.total_tokens() == (3 + 2) + (7 + 2) + (3 + 2) + (6 + 2)
    assert conversations.new_tokens() == 2 + 3 + 2 + 2 * 2


def test_an_answer_of_another_length_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="1 tokens of an answer"):
        Conversations([1], [[[2]]], answer_tokens=2).answered(0, [3])


def test_llama_cpp_is_given_only_what_its_sequences_lack() -> None:
    """Its batches, with a context that answers 7 to everything."""
    fed: dict[int, list[int]] = {}
    widest = 0

    class Context:
        def forget_all(self) -> None:
            fed.clear()

        def prefill(self, prompt: list[int]) -> int:
            fed[0] = list(prompt)
            return 7

        def copy(self, source: int, target: int) -> None:
            fed[target] = list(fed[source])

        def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
            nonlocal widest
            widest = max(widest, len(rows))
            for token, position, sequence, _ in rows:
                assert position == len(fed[sequence])
                fed[sequence].append(token)
            self.wanted = sum(wants for *_, wants in rows)

        def greedy(self, rows: int) -> list[int]:
            assert rows == self.wanted
            return [7] * rows

    from benchmarks.peers import llama_cpp_batches

    texts = [[[3] * 5, [4]], [[5] * 9, [6, 6]], [[8], [9]]]
    llama_cpp_batches.converse(Context(), Conversations([1, 2], texts, 2), batch_tokens=4)
    assert fed == {
        0: [1, 2, *[3] * 5, 7, 7, 4, 7],
        1: [1, 2, *[5] * 9, 7, 7, 6, 6, 7],
        2: [1, 2, 8, 7, 7, 9, 7],
    }
    assert widest == 4
