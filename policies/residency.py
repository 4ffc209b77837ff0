"""Which pages an engine holds, told by its page events, with gaps noticed and bounds kept; and how
a hit is told by tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from policies.contract.page_keys import EVENT_KEY_BYTES
from policies.contract.wire import (
    PageEvent,
    PageEvents,
    PageRemoved,
    PageStored,
    Started,
    Tier,
    Usage,
)

_BIT: dict[Tier, int] = {"device": 1, "host": 2, "disk": 4, "cluster": 8}
_TIER_BY_BIT = {bit: tier for tier, bit in _BIT.items()}
TIERS = tuple(_BIT)  # fastest first
_IS_IN = [bytes([bool(bits & some) for bits in range(256)]) for some in range(16)]
_BLOCK_PAGES = 256


def event_keys(page_keys: Iterable[bytes]) -> list[bytes]:
    """Page keys (32 bytes, root first) as events carry them, 16 bytes and deepest first."""
    keys = [key[:EVENT_KEY_BYTES] for key in page_keys]
    keys.reverse()
    return keys


def tokens_by_tier(
    cached: int, slower: Mapping[Tier, int], *, slowest: str = "device"
) -> dict[str, int]:
    """Cached tokens by the tier that held them: `slower` as told, the rest was on the device.

    Where no split was told, or one that cannot be, all count as the slowest tier's.
    """
    told: dict[str, int] = {tier: tokens for tier, tokens in slower.items() if tokens > 0}
    rest = cached - sum(told.values())
    if not told or rest < 0:
        return {slowest: cached} if cached > 0 else {}
    return ({"device": rest} if rest else {}) | told


def slower_tokens(told: Usage | Started) -> dict[Tier, int]:
    """The split of a usage, or of a start."""
    return {"host": told.host_tokens, "disk": told.disk_tokens, "cluster": told.cluster_tokens}


class Residency:
    """The pages of one engine of one node, by tier; never more than max_keys of them.

    Lookup takes the deepest resident page: chains are evicted tail first, so it proves the whole
    prefix and a lost event in the middle does no harm. Any error here is only a miss.
    """

    def __init__(self, max_keys: int) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys is {max_keys}, want at least 1")
        self.max_keys = max_keys
        self.gaps = 0
        self._tiers_by_key: dict[bytes, int] = {}  # oldest first, so the bound drops the oldest
        self._next: int | None = None  # number of the next event; None: take it from the frame

    def __len__(self) -> int:
        return len(self._tiers_by_key)

    def reach(
        self, deepest_first: Sequence[bytes], tiers: Iterable[Tier] = TIERS
    ) -> list[tuple[Tier, int]]:
        """How far a prompt's prefix reaches as ever slower ones of these tiers are asked, in pages.

        deepest_first: the prompt's event_keys. The fastest tier comes first: [("device", 3),
        ("disk", 16)] means that pages 3 to 15 are on disk only. Where several tiers hold a page
        the fastest counts.
        """
        faster = sum([_BIT[tier] for tier in tiers])  # those that would still shorten a fetch
        runs: list[tuple[Tier, int]] = []
        get, num_pages = self._tiers_by_key.get, len(deepest_first)
        # In blocks, as bytes: a prompt may have thousands of pages, and each engine is asked.
        for start in range(0, num_pages, _BLOCK_PAGES):
            block = bytes(map(get, deepest_first[start : start + _BLOCK_PAGES], repeat(0)))
            while faster and (at := block.translate(_IS_IN[faster]).find(1)) >= 0:
                bits = block[at] & faster
                bit = bits & -bits  # the lowest: a faster tier has a lower bit
                runs.append((_TIER_BY_BIT[bit], num_pages - start - at))
                faster &= bit - 1
            if not faster:
                break
        runs.reverse()
        return runs

    def tiers(self, key: bytes) -> tuple[Tier, ...]:
        """Where the page with this 16-byte key is, fastest first."""
        bits = self._tiers_by_key.get(key, 0)
        return tuple(tier for bit, tier in _TIER_BY_BIT.items() if bits & bit)

    def apply(self, frame: PageEvents) -> bool:
        """Take a frame in; True when events were lost and a snapshot should be asked for."""
        if frame.snapshot:
            self._tiers_by_key.clear()
            for event in frame.events:
                self._take(event)
            # Whatever the node calls the event after a snapshot is right: the link keeps order.
            self._next = None
            return False
        expected = self._next
        known = 0 if expected is None else max(0, expected - frame.first)
        for event in frame.events[known:]:
            self._take(event)
        end = frame.first + len(frame.events)
        self._next = end if expected is None else max(expected, end)
        if expected is not None and frame.first > expected:
            self.gaps += 1
            return True
        return False

    def expect(self, deepest_first: Sequence[bytes]) -> None:
        """Count a prompt that was just computed as resident, before its events arrive."""
        for key in reversed(deepest_first):
            self._store(key, 1)

    def _take(self, event: PageEvent) -> None:
        if isinstance(event, PageStored):
            self._store(event.page_key, _BIT[event.tier])
        elif isinstance(event, PageRemoved):
            left = self._tiers_by_key.get(event.page_key, 0) & ~_BIT[event.tier]
            if left:
                self._tiers_by_key[event.page_key] = left
            else:
                self._tiers_by_key.pop(event.page_key, None)
        else:
            gone = _BIT[event.tier]
            self._tiers_by_key = {
                key: bits & ~gone for key, bits in self._tiers_by_key.items() if bits & ~gone
            }

    def _store(self, key: bytes, bit: int) -> None:
        held = self._tiers_by_key
        bits = held.get(key)
        if bits is None and len(held) >= self.max_keys:
            del held[next(iter(held))]
        held[key] = (bits or 0) | bit
