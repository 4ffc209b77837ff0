"""Whether a server may be called: probes with hysteresis say if it is up, a breaker if it works.

Pure: time comes in. The breaker opens after failures in a row; after a pause that doubles it lets
one call through (half open), whose end decides. An end that says nothing of the server, such as a
client that left or a request that it refused, changes nothing: counted as a failure it would let
clients close servers, counted as a success it would open broken ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["worked", "failed", "neither"]
BreakerState = Literal["closed", "open", "half_open"]


@dataclass(slots=True)
class Breaker:
    """Each call: `allows`, then `begin`, then `end` with what begin returned."""

    failures: int = 5  # in a row
    pause_s: float = 1.0
    longest_pause_s: float = 30.0
    _in_a_row: int = 0
    _pauses: int = 0  # since it last worked; 0: closed
    _opened_at: float = 0.0
    _trial: bool = False  # the one call of half open is under way

    def state(self, now: float) -> BreakerState:
        if self._pauses == 0:
            return "closed"
        return "half_open" if now >= self._opened_at + self._pause_now_s() else "open"

    def allows(self, now: float) -> bool:
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._trial)

    def begin(self, now: float) -> bool:
        """A call starts; whether it is the trial."""
        is_trial = self.state(now) == "half_open"
        self._trial = self._trial or is_trial
        return is_trial

    def end(self, is_trial: bool, outcome: Outcome, now: float) -> None:
        """While it is open, calls that began before are too old to say anything."""
        if is_trial:
            self._trial = False
        elif self._pauses:
            return
        if outcome == "worked":
            self._in_a_row = self._pauses = 0
        elif outcome == "failed":
            self._in_a_row += 1
            if is_trial or self._in_a_row >= self.failures:
                self._pauses += 1
                self._opened_at = now

    def _pause_now_s(self) -> float:
        return min(self.longest_pause_s, self.pause_s * 2.0 ** min(self._pauses - 1, 32))


@dataclass(slots=True)
class Probes:
    """One bad probe must not take a busy server out, nor one good one bring a failing one back.

    The very first probe decides at once.
    """

    up_after: int = 2
    down_after: int = 3
    is_up: bool = False
    _is_known: bool = field(default=False)
    _against: int = 0  # probes in a row that say otherwise

    def take(self, good: bool) -> bool:
        """Whether is_up changed."""
        if good == self.is_up and self._is_known:
            self._against = 0
            return False
        self._against += 1
        wanted = self.up_after if good else self.down_after
        if self._is_known and self._against < wanted:
            return False
        changed = good != self.is_up
        self._is_known, self.is_up, self._against = True, good, 0
        return changed
