"""Requests for modelled nodes: a trace's, overlaid and paced as one likes, and generated agents.

A page is a block of 512 tokens, as in the public traces; a key stands for a page and all before it,
and only full pages have one.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct

PAGE_TOKENS = 512
KEY_BYTES = 16  # as page events carry them


class TraceRow(Struct, frozen=True):
    """A line of the Mooncake traces (FAST'25). timestamp: ms; hash_ids: one each 512 tokens of the
    prompt, the last may be partial; equal ids mean an equal prefix up to and including it."""

    timestamp: float
    input_length: int
    hash_ids: list[int]
    output_length: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """at: seconds from the start; of a later turn, after the end of the turn before it (follows).
    keys: of the prompt's full pages, root first. new_tokens: those that no earlier prompt had."""

    at: float
    session: int
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[bytes]
    new_tokens: int
    has_signal: bool = False  # the client names its session
    follows: Request | None = None

    @property
    def max_hit_pages(self) -> int:
        """The last token is always computed."""
        return min(len(self.keys), (self.prompt_tokens - 1) // PAGE_TOKENS)


class Sessions:
    """Finds whose next turn a prompt is: it goes on from the last full page of an earlier one."""

    def __init__(self) -> None:
        self._by_end: dict[bytes, int] = {}
        self._next = 0

    def find(self, full: Sequence[bytes]) -> int:
        """full: keys of the prompt's full pages. One page is no evidence: many share a preamble."""
        number = self._next
        self._next += 1
        if len(full) < 2:
            return number
        known = (self._by_end[key] for key in reversed(full) if key in self._by_end)
        session = next(known, number)
        self._by_end[full[-1]] = session
        return session


def read_rows(path: Path) -> list[TraceRow]:
    """Raises OSError, and msgspec.DecodeError on a line of another shape."""
    decoder = msgspec.json.Decoder(TraceRow)
    with gzip.open(path, "rb") as file:
        return [decoder.decode(line) for line in file]


def overlay(rows: Sequence[TraceRow], copies: int) -> list[TraceRow]:
    """The same traffic so many times, each copy with ids of its own and begun at another time."""
    span = max(row.timestamp for row in rows) + 1.0
    ids = 1 + max(max(row.hash_ids) for row in rows)
    made = [
        msgspec.structs.replace(
            row,
            timestamp=(row.timestamp + copy * span / copies) % span,
            hash_ids=[one + copy * ids for one in row.hash_ids],
        )
        for copy in range(copies)
        for row in rows
    ]
    return sorted(made, key=lambda row: row.timestamp)


def from_rows(rows: Iterable[TraceRow], *, stretch: float = 1.0) -> list[Request]:
    """In order of arrival; stretch multiplies the time between arrivals."""
    seen: set[bytes] = set()
    sessions = Sessions()
    made: list[Request] = []
    for row in rows:
        full = row.input_length // PAGE_TOKENS
        keys = [one.to_bytes(KEY_BYTES, "little") for one in row.hash_ids[:full]]
        made.append(
            Request(
                at=row.timestamp / 1e3 * stretch,
                session=sessions.find(keys),
                prompt_tokens=row.input_length,
                output_tokens=max(1, row.output_length),
                keys=keys,
                new_tokens=_new_tokens(keys, row.input_length, seen),
            )
        )
    return made


def _new_tokens(keys: Sequence[bytes], prompt_tokens: int, seen: set[bytes]) -> int:
    """What an infinite cache would compute; the prompt's pages count as seen from now on."""
    depth = len(keys)
    while depth and keys[depth - 1] not in seen:
        depth -= 1
    seen.update(keys)
    return max(1, prompt_tokens - depth * PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Agents:
    """Coding agents: preambles that many share, a first prompt, and turns that add to it; each turn
    comes a pause after the answer to the one before. signal_share: of sessions, name themselves.
    """

    sessions_per_s: float
    until_s: float
    signal_share: float = 0.0
    preambles: int = 4
    preamble_pages: int = 12
    first_pages: int = 6
    turn_pages: tuple[int, ...] = (3, 4)
    mean_turns: float = 14.0
    mean_pause_s: float = 12.0
    output_tokens: int = 250
    seed: int = 1

    def requests(self) -> list[Request]:
        """First turns in order of arrival, later ones behind them."""
        random = Random(self.seed)
        preambles = [self._pages(random, self.preamble_pages) for _ in range(self.preambles)]
        seen: set[bytes] = set()
        made: list[Request] = []
        at = random.expovariate(self.sessions_per_s)
        session = 0
        while at < self.until_s:
            keys = random.choice(preambles) + self._pages(random, self.first_pages)
            has_signal = random.random() < self.signal_share
            turn: Request | None = None
            while turn is None or random.random() >= 1.0 / self.mean_turns:
                if turn is not None:
                    keys = [*keys, *self._pages(random, random.choice(self.turn_pages))]
                tokens = len(keys) * PAGE_TOKENS
                turn = Request(
                    at=at if turn is None else random.expovariate(1.0 / self.mean_pause_s),
                    session=session,
                    prompt_tokens=tokens,
                    output_tokens=self.output_tokens,
                    keys=keys,
                    new_tokens=_new_tokens(keys, tokens, seen),
                    has_signal=has_signal,
                    follows=turn,
                )
                made.append(turn)
            session += 1
            at += random.expovariate(self.sessions_per_s)
        return made

    @staticmethod
    def _pages(random: Random, count: int) -> list[bytes]:
        return [random.randbytes(KEY_BYTES) for _ in range(count)]


def without_signals(requests: Iterable[Request]) -> list[Request]:
    return [replace(one, has_signal=False) for one in requests]
