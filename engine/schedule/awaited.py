"""What a waiting prompt waits for before it is admitted: pages of its prefix that are on their way.

A step in the making computes them for another prompt, a slower tier is asked for them, or another
engine brings them for another sequence. None of it is promised: what does not come is computed, or
comes by the sequence's own transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from engine.config import ScheduleConfig
from engine.schedule.prefix_cache import PrefixCache
from engine.schedule.rates import Rates
from engine.schedule.sequence import Sequence
from engine.schedule.tiers import SlowerTiers
from engine.schedule.transfers import Transfers

_MOST_ASKS = 3  # of slower tiers, for one wait: what they bring may be evicted again


class Awaited:
    """spare: pages that can be had beside what running sequences need."""

    def __init__(
        self,
        config: ScheduleConfig,
        cache: PrefixCache,
        tiers: SlowerTiers,
        transfers: Transfers,
        rates: Rates,
        *,
        spare: Callable[[], int],
    ) -> None:
        self._page_size, self._page_bytes = config.page_size, config.page_bytes
        self._cache = cache
        self._tiers = tiers
        self._transfers = transfers
        self._rates = rates
        self._spare = spare

    def begin(self, sequence: Sequence, now: float) -> None:
        """It begins to wait: ask slower tiers, unless another engine is already at it."""
        if self._tiers and not self._is_brought(sequence, now):
            self._ask(sequence, now)

    def is_coming(self, sequence: Sequence, computing: AbstractSet[bytes], now: float) -> bool:
        """Whether the page that its prefix hit would lack is computed by this step, brought for
        another sequence, or fetched. computing: keys of pages that this step writes."""
        if self._is_brought(sequence, now):
            return True
        if not computing and not self._tiers:
            return False
        keys = sequence.hit_keys(self._page_size)
        depth = self._cache.depth(keys)
        if depth < len(keys) and keys[depth] in computing:
            return True
        if not self._tiers:
            return False
        if self._tiers.is_arriving(keys, now):
            return True
        # There was no room for all, or what came was evicted while the sequence waited.
        if sequence.asks == 0 or (depth < sequence.hoped_pages and sequence.asks < _MOST_ASKS):
            self._ask(sequence, now)
        return self._tiers.is_arriving(keys, now)

    def _is_brought(self, sequence: Sequence, now: float) -> bool:
        """Whether another engine is bringing the first page that it lacks, for another sequence."""
        imports = self._transfers.imports
        if sequence.role != "decode" or not imports.num_moving:
            return False
        keys = sequence.hit_keys(self._page_size)
        depth = self._cache.depth(keys)
        return depth < len(keys) and imports.is_coming(keys[depth], now)

    def _ask(self, sequence: Sequence, now: float) -> None:
        """Let slower tiers bring what they have of its prefix, where that is quicker than computing
        it, or than having another engine bring it."""
        if not sequence.publishes:
            return
        room = self._spare()
        if room <= 0:
            return
        if sequence.role == "decode":  # at the pace of the last ones, or 0 before there are any
            pages_per_s = self._transfers.import_rate.bytes_per_s / max(1, self._page_bytes)
            otherwise = pages_per_s * self._page_size
        else:
            otherwise = self._rates.prefill_tokens_per_s
        sequence.asks += 1
        sequence.hoped_pages = self._tiers.ask(
            sequence.hit_keys(self._page_size),
            whose=sequence.whose,
            room=room,
            prefill_tokens_per_s=otherwise,
            now=now,
        )
