"""Pages that a server is believed to hold because a prompt went there: no event ever tells more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

TTL_S = 600.0  # below the pauses of people a prediction is lost that would have been a hit


class PredictedResidency:
    """Keys are event keys. Never more than max_keys; the least recently used go first.

    A deep page proves those before it, as in `policies.residency`. An error is only a miss.
    """

    def __init__(self, max_keys: int, ttl_s: float = TTL_S) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys is {max_keys}, want at least 1")
        self._max_keys = max_keys
        self._ttl_s = ttl_s
        self._until_by_key: OrderedDict[bytes, float] = OrderedDict()  # the soonest first

    def __len__(self) -> int:
        return len(self._until_by_key)

    def expect(self, deepest_first: Sequence[bytes], now: float) -> None:
        """A prompt was computed there now."""
        held = self._until_by_key
        until = now + self._ttl_s
        for key in deepest_first:
            held[key] = until
            held.move_to_end(key)
        while held and (len(held) > self._max_keys or held[next(iter(held))] <= now):
            held.popitem(last=False)

    def pages(self, deepest_first: Sequence[bytes], now: float) -> int:
        """How many leading pages of a prompt are believed to be there."""
        for at, key in enumerate(deepest_first):
            if self._until_by_key.get(key, 0.0) > now:
                return len(deepest_first) - at
        return 0

    def clear(self) -> None:
        """The server began anew."""
        self._until_by_key.clear()
