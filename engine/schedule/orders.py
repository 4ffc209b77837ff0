"""What the books of the slower tiers ask to be moved, and what they are told of it, as values.

Whoever carries out an order answers it with one OrderDone. While a status in it is TIMEOUT the call
still touches its pages: one OrderQuiet follows when it has really returned, and only then are these
pages given back. Orders to write to a tier are carried out one after the other, as they came.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.store.tier import PageRecord, Status
from policies.contract.wire import Tier


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Put device pages into a tier; each has a tier-copy hold."""

    order_id: int
    tier: Tier
    page_ids: tuple[int, ...]
    records: tuple[PageRecord, ...]


@dataclass(frozen=True, slots=True)
class CopyDown:
    """Put what one tier holds into a slower one. MISS and CORRUPT are the source's answers."""

    order_id: int
    source: Tier
    tier: Tier
    records: tuple[PageRecord, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get pages into device pages that have a transfer hold; the tags become these generations."""

    order_id: int
    tier: Tier
    keys: tuple[bytes, ...]
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove these keys, which the books count as gone already."""

    order_id: int
    tier: Tier
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PurgeTier:
    """Remove all of a tenant's pages and overwrite their bytes; answered with one status."""

    order_id: int
    tier: Tier
    owner: bytes
    deadline: float


@dataclass(frozen=True, slots=True)
class Flush:
    """Make what was put before survive a restart; answered with one status."""

    order_id: int
    tier: Tier


Order = CopyOut | CopyDown | Fetch | Drop | PurgeTier | Flush


@dataclass(frozen=True, slots=True)
class OrderDone:
    """statuses: one a page of the order. seconds: what the call took, 0 where that says nothing."""

    order_id: int
    statuses: tuple[Status, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OrderQuiet:
    """An order that was answered with TIMEOUT has let go of its pages."""

    order_id: int


OrderNews = OrderDone | OrderQuiet
