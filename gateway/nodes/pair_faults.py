"""Which pairs of nodes are let alone for a while because transfers between them keep failing.

A request tries a pair twice before its prompt is computed where it is decoded; a pair that cannot
reach each other would cost every request both tries.
"""

from __future__ import annotations

from dataclasses import dataclass

TOLERATED = 2  # failures in a row, as one request may see
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
MAX_PAIRS = 4096


@dataclass(slots=True)
class _Faults:
    in_a_row: int = 0
    until: float = 0.0


class PairFaults:
    def __init__(self) -> None:
        self._faults: dict[tuple[str, str], _Faults] = {}  # by prefill and decode node

    def failed(self, prefill: str, decode: str, now: float) -> None:
        faults = self._faults.pop((prefill, decode), None) or _Faults()
        faults.in_a_row += 1
        if faults.in_a_row >= TOLERATED:
            pause_s = FIRST_PAUSE_S * 2.0 ** min(faults.in_a_row - TOLERATED, 10)
            faults.until = now + min(MAX_PAUSE_S, pause_s)
        self._faults[prefill, decode] = faults
        if len(self._faults) > MAX_PAIRS:
            del self._faults[next(iter(self._faults))]

    def worked(self, prefill: str, decode: str) -> None:
        self._faults.pop((prefill, decode), None)

    def allows(self, prefill: str, decode: str, now: float) -> bool:
        faults = self._faults.get((prefill, decode))
        return faults is None or now >= faults.until
