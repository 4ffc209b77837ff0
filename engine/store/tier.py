"""What every slower tier promises: pages by key, a status for each, a deadline on every call.

A tier is bound to one page layout and holds at most capacity_pages records; which ones, its caller
decides (policies/tiering.py): a full tier answers NOSPACE, it never evicts by itself. Nothing is
raised on the data path and nothing is ambiguous: whatever is not OK is a miss to the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from policies.contract.wire import Tier as TierName


class Status(Enum):
    OK = "ok"
    MISS = "miss"  # not there
    STALE = "stale"  # another generation, layout or format than asked for
    CORRUPT = "corrupt"  # bytes that their checksum refuses; the tier drops the record
    TIMEOUT = "timeout"  # the deadline passed; a destination may still be written, see Tier.get
    NOSPACE = "nospace"  # full: evict first
    UNAVAILABLE = "unavailable"  # the tier cannot be reached, or was closed


COUNTED_AS: Mapping[Status, str] = {  # fields of TierStats; what OK counts as depends on the call
    Status.MISS: "misses",
    Status.STALE: "misses",
    Status.CORRUPT: "corrupt",
    Status.TIMEOUT: "timeouts",
    Status.NOSPACE: "refused",
    Status.UNAVAILABLE: "unavailable",
}


@dataclass(frozen=True, slots=True)
class PageRecord:
    """What identifies a stored page. parent: the key of the page before it, or the chain's root
    (page_keys.seed). depth: pages before it. owner: page_keys.owner_tag of the tenant's salt, which
    a purge goes by. generation: at which the device pool held it when it was copied."""

    key: bytes
    parent: bytes
    depth: int
    owner: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts since the start; pages and bytes as they are now."""

    capacity_pages: int
    used_pages: int
    hits: int = 0
    misses: int = 0
    stored: int = 0
    removed: int = 0
    corrupt: int = 0
    timeouts: int = 0
    refused: int = 0  # NOSPACE
    unavailable: int = 0


class Tier(Protocol):
    """Calls may come from several threads at once. deadline: time.monotonic() seconds."""

    @property
    def name(self) -> TierName: ...

    @property
    def capacity_pages(self) -> int:
        """0: unknown, the store decides itself what it keeps."""

    def records(self) -> Iterable[PageRecord]:
        """What is held now, parents before children: after a start, what survived the last one."""

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        """How many leading keys are held. Renews nothing, promises nothing: only get tells."""

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        """Copy payloads (page_bytes each) into the views; a view is right only where it says OK.

        Once the call has returned nothing writes to a view any more, TIMEOUT included: a backend
        that cannot be stopped is waited for, by a caller that has quarantined the views
        (store/guard.py). Views of other statuses may hold anything.
        """

    def put(
        self, records: Sequence[PageRecord], payloads: Sequence[memoryview], deadline: float
    ) -> list[Status]:
        """Keep these pages. A key that is held stays as it is, with OK. Payloads are not read after
        the return."""

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """Forget these keys: OK or MISS. Their bytes may lie there until they are overwritten."""

    def purge(self, owner: bytes, deadline: float) -> Status:
        """Remove all of a tenant's records and overwrite their bytes; OK once none is left."""

    def flush(self, deadline: float) -> Status:
        """Make what was put survive a restart, where the tier can."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Give back what the tier holds; later calls answer UNAVAILABLE."""
