"""What the books know of one slower tier: the pages it has or is to have, and how it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.config import TierConfig
from engine.schedule.page_events import PageEventLog
from engine.schedule.prefix_cache import Provenance
from engine.store.tier import PageRecord, Status
from policies.contract.wire import Tier, TierReport
from policies.tiering import Resident, TierIndex

TierState = Literal["ok", "scanning", "broken"]

_EVENT_EVERY: dict[Tier, int] = {"disk": 8}  # pages of a chain; other tiers tell of each
_CLUSTER_KNOWN_PAGES = 1 << 16  # remembered to be there; only a get tells of others
_REST_S = 1.0  # nothing is asked of a tier for so long after it was not there


@dataclass(frozen=True, slots=True)
class Chain:
    """Pages of the device from a chain's root on."""

    keys: list[bytes]
    whose: Provenance
    retain_until: float = 0.0


@dataclass(slots=True, eq=False)
class Shelf:
    """One slower tier. A key of its index is landing (ordered) or landed (there)."""

    config: TierConfig
    index: TierIndex
    events: PageEventLog
    landing: dict[bytes, int] = field(default_factory=dict)  # key → order id
    landed: dict[bytes, PageRecord] = field(default_factory=dict)  # parents before children
    undropped: list[bytes] = field(default_factory=list)  # the tier did not answer a Drop of them
    # Of a tier that others fill too: how many leading pages are there, as a look at it tells.
    peek: Callable[[Sequence[bytes]], int] | None = None
    # By last key: what is to be copied later, and from which depth on.
    backlog: dict[bytes, tuple[Chain, int]] = field(default_factory=dict)
    copying: int = 0  # pages under copies to this tier
    rests_until: float = 0.0
    bytes_per_s: float = 0.0  # measured; 0: not yet
    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    corrupt: int = 0
    timeouts: int = 0

    @property
    def name(self) -> Tier:
        return self.config.name

    @property
    def is_own(self) -> bool:
        """Whether what is not in the index is not there: nobody else fills the tier."""
        return self.config.capacity_pages > 0 and self.peek is None

    @property
    def is_known(self) -> bool:
        """Whether a look tells what is there; else only a get does."""
        return self.config.capacity_pages > 0

    @property
    def rate(self) -> float:
        """Bytes/s of fetches."""
        return self.bytes_per_s or self.config.bytes_per_s

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many leading pages may be fetched."""
        if self.peek is not None:
            return self.peek(keys)
        if not self.is_known:
            return len(keys)
        depth = self.index.depth(keys)
        while depth and keys[depth - 1] not in self.landed:
            depth -= 1
        return depth

    def admit(
        self, resident: Resident, now: float, *, retain_until: float = 0.0, is_proven: bool = False
    ) -> tuple[bytes, ...] | None:
        """Let the index hold a page that is to come; returns what the tier must drop for it. None:
        it is not admitted. is_proven: it need not be used twice first."""
        if is_proven:
            self.index.touch((resident.key,), now)
            self.index.touch((resident.key,), now)
        gone = self.index.admit(resident, now, retain_until=retain_until)
        if gone is None:
            return None
        self.let_go(gone)
        self.evicted += len(gone)
        return gone if self.is_own else ()  # else we only remember fewer of what others keep too

    def land(self, record: PageRecord) -> None:
        """The tier has a page of the index."""
        self.landed[record.key] = record
        if self._is_told(record):
            self.events.stored(record.key, self.name)

    def let_go(self, keys: Iterable[bytes]) -> None:
        """The index has no longer what it had."""
        for key in keys:
            self.landing.pop(key, None)
            record = self.landed.pop(key, None)
            if record is not None and self._is_told(record):
                self.events.removed(key, self.name)

    def _is_told(self, record: PageRecord) -> bool:
        return (record.depth + 1) % _EVENT_EVERY.get(self.name, 1) == 0

    def take_answers(self, statuses: Iterable[Status], now: float) -> None:
        """Count what went wrong; a tier that is not there is left alone for a while."""
        for status in statuses:
            self.corrupt += status is Status.CORRUPT
            self.timeouts += status is Status.TIMEOUT
            if status is Status.UNAVAILABLE:
                self.rests_until = now + _REST_S

    def report(self, state: TierState) -> TierReport:
        return TierReport(
            tier=self.name,
            pages_total=self.config.capacity_pages,
            pages_used=len(self.landed),
            state=state,
            hit_pages=self.hits,
            miss_pages=self.misses,
            stored_pages=self.stored,
            evicted_pages=self.evicted,
            dropped_pages=self.dropped,
            corrupt_pages=self.corrupt,
            timeouts=self.timeouts,
            fetch_bytes_per_s=self.bytes_per_s,
            charged_pages=self.index.charged_pages,
        )


def new_shelf(config: TierConfig, events: PageEventLog) -> Shelf:
    index = TierIndex(
        config.capacity_pages or _CLUSTER_KNOWN_PAGES, needs_second_use=config.name == "disk"
    )
    return Shelf(config, index, events)


def resident_of(record: PageRecord) -> Resident:
    return Resident(record.key, record.parent, record.depth, record.owner)
