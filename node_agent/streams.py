"""Which lanes of which link are live on which engine.

Step frames are forwarded undecoded, so this is known from Submits and from the final usages that
engines send (right behind the step that ends the stream, in one write). An entry outlives its link:
its final usage still belongs to that gateway.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from policies.contract.wire import Submit

MAX_RECENT = 8192  # ended submits that are remembered, so that a repeated one does not run again


@dataclass(slots=True, eq=False)
class Streams:
    """The streams of one Submit. `lanes` are those whose final usage has not come."""

    gateway: int
    channel: int
    engine: int
    request_id: str
    attempt: int
    lanes: set[int]
    is_cut: bool = False  # its link is gone: nobody waits for tokens
    early_acks: set[int] = field(default_factory=set)  # lanes whose terminal event was
    # acknowledged before their usage record came
    aborting: set[int] = field(default_factory=set)  # lanes whose Abort is on its way


class LiveStreams:
    """Bounded by the engines: a Submit that is refused leaves no entry."""

    def __init__(self, max_recent: int = MAX_RECENT) -> None:
        self._max_recent = max_recent
        self._by_request: dict[tuple[str, int], Streams] = {}
        self._by_lane: dict[tuple[int, int], Streams] = {}  # (channel, lane)
        self._recent: OrderedDict[tuple[str, int], int] = OrderedDict()  # ended → its gateway

    def __len__(self) -> int:
        """Submits that a gateway still waits for."""
        return sum(not entry.is_cut for entry in self._by_request.values())

    def gateway_of(self, request_id: str, attempt: int) -> int | None:
        """Whose Submit this is, while it runs and for a while after; None for a new one."""
        entry = self._by_request.get((request_id, attempt))
        return entry.gateway if entry else self._recent.get((request_id, attempt))

    def add(self, gateway: int, channel: int, submit: Submit) -> None:
        """A lane that is used again has ended for its gateway, though its usage may still come."""
        entry = Streams(
            gateway, channel, submit.engine, submit.request_id, submit.attempt, set(submit.lanes)
        )
        self._by_request[submit.request_id, submit.attempt] = entry
        for lane in submit.lanes:
            self._by_lane[channel, lane] = entry

    def of_lane(self, channel: int, lane: int) -> Streams | None:
        return self._by_lane.get((channel, lane))

    def of_request(self, request_id: str, attempt: int) -> Streams | None:
        return self._by_request.get((request_id, attempt))

    def end(self, request_id: str, attempt: int, lane: int) -> Streams | None:
        """A final usage came: the lane's entry, or None when nobody submitted it."""
        entry = self._by_request.get((request_id, attempt))
        if entry is None or lane not in entry.lanes:
            return None
        entry.lanes.discard(lane)
        self._release(entry, lane)
        if not entry.lanes:
            self._remove(entry)
        return entry

    def drop(self, entry: Streams) -> list[int]:
        """Forget an entry whole; returns the lanes that its gateway still thinks live."""
        live = [lane for lane in sorted(entry.lanes) if self._release(entry, lane)]
        self._remove(entry)
        return live

    def lose_engine(self, engine: int) -> list[tuple[Streams, list[int]]]:
        """Drops all of an engine: each entry with the lanes that its gateway must be told of."""
        entries = [entry for entry in self._by_request.values() if entry.engine == engine]
        return [(entry, self.drop(entry)) for entry in entries]

    def cut(self, channel: int) -> None:
        """The link is gone: its lanes mean nothing now, its entries wait for their usage."""
        for entry in self._by_request.values():
            if entry.channel == channel and not entry.is_cut:
                entry.is_cut = True
                for lane in entry.lanes:
                    self._release(entry, lane)

    def _release(self, entry: Streams, lane: int) -> bool:
        if self._by_lane.get((entry.channel, lane)) is not entry:
            return False
        del self._by_lane[entry.channel, lane]
        return True

    def _remove(self, entry: Streams) -> None:
        del self._by_request[entry.request_id, entry.attempt]
        self.remember(entry.gateway, entry.request_id, entry.attempt)

    def remember(self, gateway: int, request_id: str, attempt: int) -> None:
        """This Submit has ended, or was refused: a repeated one is not answered again."""
        self._recent[request_id, attempt] = gateway
        if len(self._recent) > self._max_recent:
            self._recent.popitem(last=False)
