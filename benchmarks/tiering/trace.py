"""A request trace: arrival, prompt length and one opaque id for each block of the prompt.

The format is that of the Mooncake traces (FAST'25): a JSON object a line with `timestamp` (ms),
`input_length` (tokens) and `hash_ids`, one for each 512 tokens, the last may be partial; equal ids
mean an equal prefix up to and including that block. So a block is a page here, and its id its key.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct

from policies.tiering import Resident

PAGE_TOKENS = 512
OWNER = b"everybody"


class _Line(Struct, frozen=True):
    timestamp: float
    input_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Request:
    """now: seconds from the trace's start. session: inferred, see sessions()."""

    now: float
    tokens: int
    keys: Sequence[bytes]
    pages: Sequence[Resident]
    session: int

    def tokens_of(self, pages: int) -> int:
        """In its first so many pages; the last one may be partial."""
        return min(self.tokens, pages * PAGE_TOKENS)


def read_trace(path: Path, *, until_s: float) -> list[Request]:
    """Raises OSError, and msgspec.DecodeError on a line of another shape."""
    decoder = msgspec.json.Decoder(_Line)
    with gzip.open(path, "rb") as file:
        lines = [decoder.decode(line) for line in file]
    return requests(
        (line.timestamp / 1e3, line.input_length, line.hash_ids)
        for line in lines
        if line.timestamp < until_s * 1e3
    )


def requests(rows: Iterable[tuple[float, int, Sequence[int]]]) -> list[Request]:
    """(arrival in seconds, prompt tokens, block ids) each, in order of arrival."""
    page_by_id: dict[int, Resident] = {}
    session_by_end: dict[bytes, int] = {}
    made: list[Request] = []
    for now, tokens, ids in rows:
        parent = b""
        for depth, one in enumerate(ids):
            page = page_by_id.get(one)
            if page is None:
                page = page_by_id[one] = Resident(one.to_bytes(8, "little"), parent, depth, OWNER)
            parent = page.key
        pages = [page_by_id[one] for one in ids]
        keys = [page.key for page in pages]
        session = _session_of(keys[: tokens // PAGE_TOKENS], session_by_end, number=len(made))
        made.append(Request(now, tokens, keys, pages, session))
    return made


def _session_of(full: Sequence[bytes], session_by_end: dict[bytes, int], *, number: int) -> int:
    """A prompt that goes on from the last full page of an earlier one is that session's next turn;
    prompts of one page are no evidence, many share a preamble."""
    if len(full) < 2:
        return number
    session = next((session_by_end[key] for key in reversed(full) if key in session_by_end), number)
    session_by_end[full[-1]] = session
    return session


def agent_requests(*, pause_s: float, until_s: float) -> list[Request]:
    """Generated coding agents: 0.2 new sessions/s, four preambles of 6 k tokens, prompts of 9 k at
    first and some 1.8 k more each turn, 14 turns in the mean, pauses of that mean and 2 s more."""
    random = Random(1)
    number = count()
    preambles = [[next(number) for _ in range(12)] for _ in range(4)]
    rows: list[tuple[float, int, list[int]]] = []
    start = random.expovariate(0.2)
    while start < until_s:
        ids = random.choice(preambles) + [next(number) for _ in range(6)]
        now = start
        while True:
            rows.append((now, len(ids) * PAGE_TOKENS, list(ids)))
            if random.random() < 1 / 14:
                break
            now += 2.0 + random.expovariate(1 / pause_s)
            ids += [next(number) for _ in range(random.choice((3, 4)))]
        start += random.expovariate(0.2)
    rows.sort(key=lambda row: row[0])
    return requests(rows)
