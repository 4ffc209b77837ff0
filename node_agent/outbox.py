"""What waits to be written to one engine: aborts in front of submits, submits bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.framing import AGENT_CHANNEL, frame
from policies.contract.wire import (
    Abort,
    Drain,
    FinishLane,
    Pin,
    Purge,
    Quotas,
    Submit,
    Unpin,
    encode,
)

MAX_SUBMITS = 1024
MAX_SUBMIT_BYTES = 64 << 20
MAX_ORDERS = 1024
MAX_ORDER_BYTES = 32 << 20


@dataclass(slots=True)
class _Waiting:
    channel: int
    data: bytes  # a whole frame
    submit: Submit | None  # None: an Abort that must follow the submit before it


class EngineOutbox:
    """Frames in the order an engine shall read them; nothing here waits or does I/O.

    An Abort overtakes submits that are not its own. One whose submit still waits here cancels it,
    or follows it when other streams of that submit go on.
    """

    def __init__(
        self, *, max_submits: int = MAX_SUBMITS, max_submit_bytes: int = MAX_SUBMIT_BYTES
    ) -> None:
        self._max_submits = max_submits
        self._max_submit_bytes = max_submit_bytes
        self._urgent: deque[bytes] = deque()
        self._submits: deque[_Waiting] = deque()
        self._submit_bytes = 0
        self._orders: deque[bytes] = deque()
        self._order_bytes = 0

    def submit(self, channel: int, message: Submit) -> bool:
        """False: the bound is reached and the message was not taken."""
        data = frame(channel, encode(message))
        full = self._submit_bytes + len(data) > self._max_submit_bytes
        if full or len(self._submits) >= self._max_submits:
            return False
        self._submits.append(_Waiting(channel, data, message))
        self._submit_bytes += len(data)
        return True

    def abort(self, channel: int, lanes: tuple[int, ...]) -> list[Submit]:
        """Ends these lanes; returns the submits that the engine will never see.

        Empty lanes mean all of the channel (its link is cut); the submits are dropped and the
        engine is told in any case.
        """
        dropped: list[Submit] = []
        kept: deque[_Waiting] = deque()
        rest = set(lanes)
        for waiting in self._submits:
            submit = waiting.submit
            if waiting.channel != channel:
                kept.append(waiting)
            elif not lanes:
                self._submit_bytes -= len(waiting.data)
                if submit is not None:
                    dropped.append(submit)
            elif submit is None or rest.isdisjoint(submit.lanes):
                kept.append(waiting)
            else:
                here = tuple(lane for lane in submit.lanes if lane in rest)
                rest.difference_update(here)
                if len(here) == len(submit.lanes):
                    self._submit_bytes -= len(waiting.data)
                    dropped.append(submit)
                    continue
                kept.append(waiting)
                follower = _Waiting(channel, frame(channel, encode(Abort(here))), None)
                self._submit_bytes += len(follower.data)
                kept.append(follower)
        self._submits = kept
        if not lanes:
            self._urgent.append(frame(channel, encode(Abort(()))))
        elif rest:
            ordered = tuple(lane for lane in lanes if lane in rest)
            self._urgent.append(frame(channel, encode(Abort(ordered))))
        return dropped

    def finish(self, channel: int, message: FinishLane) -> None:
        self._urgent.append(frame(channel, encode(message)))

    def order(self, message: Pin | Unpin | Purge | Quotas | Drain) -> bool:
        """In front of submits, in the order of their coming: an Unpin must not overtake its Pin.

        False: the bound is reached and the message was not taken.
        """
        data = frame(AGENT_CHANNEL, encode(message))  # no link's: they outlive it
        full = self._order_bytes + len(data) > MAX_ORDER_BYTES
        if full or len(self._orders) >= MAX_ORDERS:
            return False
        self._orders.append(data)
        self._order_bytes += len(data)
        return True

    def pop(self) -> bytes | None:
        """The next frame to write, or None."""
        if self._urgent:
            return self._urgent.popleft()
        if self._orders:
            order = self._orders.popleft()
            self._order_bytes -= len(order)
            return order
        if not self._submits:
            return None
        waiting = self._submits.popleft()
        self._submit_bytes -= len(waiting.data)
        return waiting.data

    def clear(self) -> None:
        """The engine is gone and so is all that waited for it."""
        self._urgent.clear()
        self._submits.clear()
        self._orders.clear()
        self._order_bytes = 0
        self._submit_bytes = 0
