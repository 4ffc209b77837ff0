"""An engine for drivers' tests that computes nothing: `… SECONDS` is what each answer says."""

from __future__ import annotations

import sys

from benchmarks.peers.conversations import Conversations
from benchmarks.peers.driver import serve


class Scripted:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._asked = 0
        self._batch = 0

    def about(self) -> str:
        return f"{self._seconds:g} s"

    def first_token(self, prompt: list[int]) -> float:
        self._asked += 1
        return self._seconds * len(prompt)

    def warm_first_token(self) -> float:
        return self._seconds

    def start_decoding(self, prompts: list[list[int]]) -> None:
        self._batch = len(prompts)

    def steps(self, count: int) -> list[float]:
        assert self._batch, "nothing decodes"
        return [self._seconds] * count

    def stop_decoding(self) -> None:
        self._batch = 0

    def agents(self, shared: list[int], texts: list[list[list[int]]], answer_tokens: int) -> float:
        conversations = Conversations(shared, texts, answer_tokens)
        for index, prompt in enumerate(conversations.openings()):
            following: list[int] | None = prompt
            while following is not None:
                following = conversations.answered(index, [0] * answer_tokens)
        return self._seconds * conversations.total_tokens()

    # --- what only ours is asked ------------------------------------------------------------------

    def pages_mb(self, tokens: int) -> float:
        return tokens / 1e3

    def first_tokens(self, prompts: list[list[int]]) -> float:
        return self._seconds * sum(map(len, prompts))

    def first_forked_tokens(self, prompt: list[int], lanes: int) -> float:
        return self._seconds * (len(prompt) + lanes)

    def kernel_shares(self, count: int) -> list[tuple[float, float]] | None:
        if not self._seconds:
            return None
        return [(self._seconds, self._seconds * 0.95)] * count

    def steps_with_overlap(self, count: int) -> list[float]:
        return [self._seconds / 1.5] * count

    def prepare_mixed(self, prompts: list[list[int]], chunk: list[int]) -> None:
        assert len(chunk) < len(prompts) * len(prompts[0])

    def mixed_steps(self) -> tuple[float, float, float]:
        return self._seconds * 3, self._seconds, self._seconds * 2

    def prepare_shared(self, prefix: list[int], ends: list[list[int]]) -> None:
        assert len(prefix) > len(ends[0])

    def shared_steps(self) -> tuple[float, float]:
        return self._seconds * 2, self._seconds * 3


if __name__ == "__main__":
    serve(lambda: Scripted(float(sys.argv[1])))
