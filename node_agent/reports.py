"""What a node tells of itself: load each second, page events in order, final usages until heard."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from policies.contract.wire import (
    CacheCleared,
    EngineReport,
    NodeState,
    PageEvent,
    PageEvents,
    PageRemoved,
    PageStored,
    Report,
    Role,
    Tier,
    UsageRecord,
)

MAX_UNACKNOWLEDGED = 10_000
MAX_EVENTS_A_FRAME = 4096  # about 100 KB: more would hold the gateway's loop beyond 2 ms
RESEND_S = 3.0  # an unacknowledged usage on an open link is sent again after this long


class PageMirror:
    """The keys one engine holds, by tier, in the order they were stored."""

    def __init__(self) -> None:
        self._keys: dict[Tier, dict[bytes, None]] = {"device": {}}
        self._next: int | None = None  # number of the event that must come next

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def apply(self, first: int, events: Sequence[PageEvent]) -> bool:
        """False: events are missing, so the mirror forgot all and begins with these."""
        is_whole = self._next is None or first == self._next
        if not is_whole:
            self.clear()
        self._next = first + len(events)
        for event in events:
            match event:
                case PageStored():
                    self._keys.setdefault(event.tier, {})[event.page_key] = None
                case PageRemoved():
                    self._keys.setdefault(event.tier, {}).pop(event.page_key, None)
                case CacheCleared():
                    self._keys.setdefault(event.tier, {}).clear()
        return is_whole

    def clear(self) -> None:
        for keys in self._keys.values():
            keys.clear()

    def restart(self) -> None:
        """A new engine process numbers its events anew."""
        self.clear()
        self._next = None

    def snapshot(self) -> list[PageEvent]:
        events: list[PageEvent] = [CacheCleared(tier) for tier in self._keys]
        for tier, keys in self._keys.items():
            events += [PageStored(key, tier) for key in keys]
        return events


class PageStream:
    """Numbers one link's page events for each engine, without a gap while the link lives."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def frames(
        self, engine: int, events: Sequence[PageEvent], *, snapshot: bool = False
    ) -> list[PageEvents]:
        """In pieces; only the first of a snapshot is marked, the rest continue it."""
        frames = []
        for start in range(0, len(events), MAX_EVENTS_A_FRAME):
            piece = list(events[start : start + MAX_EVENTS_A_FRAME])
            first = self._next.get(engine, 0)
            frames.append(PageEvents(engine, first, piece, snapshot and start == 0))
            self._next[engine] = first + len(piece)
        return frames


class UsageBacklog:
    """Final usages one gateway has not acknowledged; the oldest go when there are too many."""

    def __init__(self, limit: int = MAX_UNACKNOWLEDGED) -> None:
        self._limit = limit
        # (request_id, attempt) → lane → its record and when it was last told, oldest first
        self._records: OrderedDict[tuple[str, int], dict[int, tuple[UsageRecord, float]]] = (
            OrderedDict()
        )
        self._size = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._size

    def add(self, record: UsageRecord, now: float) -> None:
        """The stream's terminal event is on its way and counts as the first telling."""
        self._records.setdefault((record.request_id, record.attempt), {})[record.lane] = record, now
        self._size += 1
        if self._size > self._limit:
            self.dropped += 1
            request = next(iter(self._records))
            self._remove(request, next(iter(self._records[request])))

    def acknowledge(self, request_id: str, attempt: int, lane: int | None = None) -> bool:
        """False: there is no such record. Without a lane the request's oldest is meant."""
        records = self._records.get((request_id, attempt))
        if records is None or (lane is not None and lane not in records):
            return False
        self._remove((request_id, attempt), next(iter(records)) if lane is None else lane)
        return True

    def all(self, now: float) -> list[UsageRecord]:
        """To be sent after a reconnect."""
        return self._tell(now, told_before=now + 1)

    def overdue(self, now: float) -> list[UsageRecord]:
        """To be sent again on an open link: told RESEND_S ago or longer."""
        return self._tell(now, told_before=now - RESEND_S)

    def _tell(self, now: float, *, told_before: float) -> list[UsageRecord]:
        told_now = []
        for records in self._records.values():
            for lane, (record, told) in records.items():
                if told <= told_before:
                    records[lane] = record, now
                    told_now.append(record)
        return told_now

    def _remove(self, request: tuple[str, int], lane: int) -> None:
        records = self._records[request]
        del records[lane]
        self._size -= 1
        if not records:
            del self._records[request]


def engine_report(last: EngineReport, *, age_s: float, is_down: bool) -> EngineReport:
    """An engine's own last words, aged; down when it no longer speaks."""
    aged = msgspec.structs.replace(last, step_age_s=last.step_age_s + age_s)
    return msgspec.structs.replace(aged, state="down") if is_down else aged


def node_state(engines: Sequence[EngineReport], *, is_draining: bool, was_ready: bool) -> NodeState:
    """One engine that serves makes a node ready."""
    if is_draining:
        return "draining"
    if any(engine.state == "ready" for engine in engines):
        return "ready"
    return "suspect" if was_ready else "joining"


def node_report(
    node_epoch: int, sequence: int, state: NodeState, engines: Sequence[EngineReport], role: Role
) -> Report:
    backlog = sum(engine.uncached_tokens for engine in engines)
    return Report(node_epoch, sequence, state, tuple(engines), backlog, role)
