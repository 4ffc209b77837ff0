"""A request trace: arrival, prompt length and one opaque id for each block of the prompt.

The format is that of the Mooncake traces (FAST'25): a JSON object a line with `timestamp` (ms),
`input_length` (tokens) and `hash_ids`, one for each 512 tokens, the last may be partial; equal ids
mean an equal prefix up to and including that block. So a block is a page here, and its id its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from gateway.lab.workload import PAGE_TOKENS, Sessions, read_rows
from policies.tiering import Resident

OWNER = b"everybody"


@dataclass(frozen=True, slots=True)
class Request:
    """now: seconds from the trace's start. session: inferred, see Sessions."""

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
    return requests(
        (row.timestamp / 1e3, row.input_length, row.hash_ids)
        for row in read_rows(path)
        if row.timestamp < until_s * 1e3
    )


def requests(rows: Iterable[tuple[float, int, Sequence[int]]]) -> list[Request]:
    """(arrival in seconds, prompt tokens, block ids) each, in order of arrival."""
    page_by_id: dict[int, Resident] = {}
    sessions = Sessions()
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
        session = sessions.find(keys[: tokens // PAGE_TOKENS])
        made.append(Request(now, tokens, keys, pages, session))
    return made


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
