"""Prompts whose pages stay on the device: computed once by a sequence that tells nobody, then held.

A pin ends by Unpin, by its time, or by its tenant's purge; only then its pages may be evicted. Pins
never take so much of the pool that the longest sequence could not run beside them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.schedule.events import SequenceEvent, SequenceFailed, SequenceFinished, SequenceRefused
from engine.schedule.pages import HoldKind, PageId
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import NewSequence
from policies.contract import page_keys
from policies.contract.wire import EngineInfo, Pin, PinResult, Sampling, pack_ids

COMPUTE_S = 120.0  # to compute a prompt that is to be pinned
_GREEDY = Sampling(max_tokens=1, temperature=0.0)


@dataclass(slots=True, eq=False)
class _Pin:
    pin_id: str
    owner: bytes
    keys: list[bytes]
    ends_at: float
    channels: list[int]  # to be told when its pages are held
    sequence_id: int | None = None  # that computes them
    pages: list[PageId] = field(default_factory=list)


class Pins:
    """Pins by id. begin and end are the runner's: see engine.schedule.plan.Runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        info: EngineInfo,
        *,
        begin: Callable[[int, array[int]], None],
        end: Callable[[int], None],
    ) -> None:
        self._scheduler = scheduler
        self._info = info
        self._begin = begin
        self._end = end
        self._pins: dict[str, _Pin] = {}
        self._computing: dict[int, _Pin] = {}  # by sequence id
        self._results: list[tuple[int, PinResult]] = []
        config = scheduler.config
        longest = min(config.context_tokens, config.num_pages * config.page_size)
        self._most_pages = config.num_pages - -(-longest // config.page_size)

    def pin(self, channel: int, pin: Pin, prompt: array[int], sequence_id: int, now: float) -> None:
        """Raises SequenceRefused where it cannot be."""
        held = self._pins.get(pin.pin_id)
        if held is not None:  # again, or for longer
            held.ends_at = max(held.ends_at, now + pin.ttl_s)
            if held.sequence_id is None:
                self._tell(channel, held)
            elif channel not in held.channels:
                held.channels.append(channel)
            return
        info = self._info
        root = page_keys.seed(
            identity=info.identity,
            tokenizer_digest=info.tokenizer_digest,
            page_size=info.page_size,
            salt=pin.salt,
        )
        keys = page_keys.page_keys(root, pack_ids(prompt), page_size=info.page_size)
        owner = page_keys.owner_tag(pin.salt)
        self._check_room(pin, len(keys), owner)
        deadline = now + min(pin.ttl_s, COMPUTE_S)
        new = NewSequence(sequence_id, prompt, root, _GREEDY, deadline, owner=owner)
        self._scheduler.submit(new, now)
        self._begin(sequence_id, prompt)
        entry = _Pin(pin.pin_id, owner, keys, now + pin.ttl_s, [channel], sequence_id)
        self._pins[pin.pin_id] = self._computing[sequence_id] = entry

    def _check_room(self, pin: Pin, num_pages: int, owner: bytes) -> None:
        if not num_pages:
            raise SequenceRefused(
                "invalid_submit",
                f"prompt: found no full page, allowed {self._info.page_size} tokens or more; pin a "
                "longer prompt",
            )
        mine = sum(len(other.keys) for other in self._pins.values() if other.owner == owner)
        if mine + num_pages > pin.max_pages:
            raise SequenceRefused(
                "pin_quota_exceeded",
                f"prompt: found {num_pages} pages beside {mine} pinned, allowed {pin.max_pages} "
                "for this tenant; unpin another prompt or raise the quota",
            )
        total = sum(len(other.keys) for other in self._pins.values())
        if total + num_pages > self._most_pages:
            raise SequenceRefused(
                "pool_too_small",
                f"prompt: found {num_pages} pages beside {total} pinned, allowed "
                f"{max(0, self._most_pages)} (the pool without room for the longest sequence); "
                "unpin another prompt or raise --kv-device-tokens",
            )

    def owns(self, sequence_id: int) -> bool:
        return sequence_id in self._computing

    def take(self, event: SequenceEvent) -> None:
        """What becomes of a sequence that computes for a pin: at its end the pages are held."""
        if not isinstance(event, SequenceFinished | SequenceFailed):
            return
        entry = self._computing.pop(event.sequence_id)
        self._end(event.sequence_id)
        entry.sequence_id = None
        if self._pins.get(entry.pin_id) is not entry:
            return  # unpinned meanwhile
        pages = self._scheduler.cache.hold_prefix(entry.keys, len(entry.keys), kind=HoldKind.PIN)
        if len(pages) == len(entry.keys):
            entry.pages = pages
            for channel in entry.channels:
                self._tell(channel, entry)
            return
        self._scheduler.pool.release(reversed(pages), HoldKind.PIN)
        del self._pins[entry.pin_id]
        if isinstance(event, SequenceFailed):
            self._fail(entry, event.code, event.message)
        else:
            self._fail(entry)

    def unpin(self, pin_id: str, now: float) -> list[SequenceEvent]:
        """Give a pin's pages back; an id that is unknown is no error."""
        entry = self._pins.pop(pin_id, None)
        if entry is None:
            return []
        self._scheduler.pool.release(reversed(entry.pages), HoldKind.PIN)
        if entry.sequence_id is None:
            return []
        return self._scheduler.abort(entry.sequence_id, now)

    def unpin_owner(self, owner: bytes, now: float) -> list[SequenceEvent]:
        """A tenant is purged."""
        mine = [entry for entry in self._pins.values() if entry.owner == owner]
        for entry in mine:
            if entry.sequence_id is not None:
                self._fail(entry)
        return [event for entry in mine for event in self.unpin(entry.pin_id, now)]

    def expire(self, now: float) -> list[SequenceEvent]:
        if not self._pins:
            return []
        late = [entry.pin_id for entry in self._pins.values() if entry.ends_at <= now]
        return [event for pin_id in late for event in self.unpin(pin_id, now)]

    def _fail(
        self,
        entry: _Pin,
        code: str = "pin_failed",
        message: str = "pin: found its pages forgotten, allowed kept; pin it again",
    ) -> None:
        for channel in entry.channels:
            self.refuse(channel, entry.pin_id, code, message)

    def refuse(self, channel: int, pin_id: str, code: str, message: str) -> None:
        self._results.append((channel, PinResult(self._info.engine, pin_id, 0, code, message)))

    def take_results(self) -> list[tuple[int, PinResult]]:
        """(channel, result) since the last call."""
        results, self._results = self._results, []
        return results

    def _tell(self, channel: int, entry: _Pin) -> None:
        self._results.append(
            (channel, PinResult(self._info.engine, entry.pin_id, len(entry.pages)))
        )
