"""Finds stop strings in a stream of text and holds back no more than it must.

An Aho-Corasick automaton (Aho and Corasick, CACM 18(6), 1975): time is linear in the text and in
the stop strings together, however many there are. The depth of its state is the length of the
longest suffix that is a proper prefix of some stop string: exactly what must not be sent yet.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class Stops:
    """Text before the first stop string. The match that ends first wins, then the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: at least one, none empty."""
        if not stops or not all(stops):
            raise ValueError("stop strings: found none or an empty one, want non-empty strings")
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends in this state, 0 if none
        for stop in stops:
            self._insert(stop)
        self._fallback = self._link()
        self._first = re.compile(f"[{''.join(re.escape(char) for char in self._next[0])}]")
        self._state = 0
        self._held = ""
        self.is_matched = False

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = following
        self._match[state] = len(stop)

    def _link(self) -> list[int]:
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                fallback[following] = self._step(fallback, fallback[state], char)
                queue.append(following)
            self._match[state] = self._match[state] or self._match[fallback[state]]
        return fallback

    def _step(self, fallback: list[int], state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = fallback[state]
        return self._next[state].get(char, 0)

    def push(self, text: str) -> str:
        """The text that may be sent now; after a match nothing more ever comes."""
        if self.is_matched:
            return ""
        state = self._state
        place = 0
        while place < len(text):
            if state == 0:
                candidate = self._first.search(text, place)
                if candidate is None:
                    break
                place = candidate.start()
            state = self._step(self._fallback, state, text[place])
            place += 1
            if self._match[state]:
                self.is_matched = True
                seen = self._held + text[:place]
                self._held = ""
                return seen[: len(seen) - self._match[state]]
        self._state = state
        seen = self._held + text
        sendable = len(seen) - self._depth[state]
        self._held = seen[sendable:]
        return seen[:sendable]

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        held, self._held, self._state = self._held, "", 0
        return held
