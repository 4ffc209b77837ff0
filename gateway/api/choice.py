"""One choice of an answer: a lane's bursts in, deltas for the client out, up to its single end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, assert_never

from msgspec import Struct

from gateway.errors import GatewayError, fault
from gateway.nodes.streams import Burst
from gateway.text.deltas import Delta, Text
from gateway.text.output import OutputText
from policies.contract.wire import Failed, Finished

Reason = Literal["stop", "length"]


class Turn(Struct, frozen=True, gc=False):
    """What a choice has for the client now. The last turn has a reason or a failure."""

    index: int
    deltas: Sequence[Delta] = ()
    reason: Reason | None = None
    failure: GatewayError | None = None


class Choice:
    """Its stop strings end this lane alone."""

    def __init__(self, index: int, output: OutputText) -> None:
        self.index = index
        self.completion_tokens = 0
        self.reason: Reason | None = None  # once it is complete
        self._output = output

    def take(self, burst: Burst, finish: Callable[[int, int], None]) -> Turn:
        """finish(lane, keep) tells the node that a stop string matched."""
        output = self._output
        text = output.push(burst.tokens)
        self.completion_tokens += len(burst.tokens)
        failure: GatewayError | None = None
        if output.stopped_at is not None:
            finish(burst.index, output.stopped_at)
            self._stop(output.stopped_at)
        elif burst.end is not None:
            match burst.end:
                case Finished(reason="stop" | "length" as reason, usage=usage):
                    text += output.flush()
                    self.completion_tokens = usage.completion_tokens  # the count that is billed
                    self.reason = reason
                    if output.stopped_at is not None:
                        self._stop(output.stopped_at)
                case Finished(reason="abort"):
                    failure = fault("aborted")
                case Finished():
                    failure = fault("engine_error")
                case Failed(code=code):
                    failure = fault(code)
                case never:
                    assert_never(never)
        return Turn(self.index, self._deltas(text), self.reason, failure)

    def _stop(self, keep: int) -> None:
        self.completion_tokens = keep
        self.reason = "stop"

    def _deltas(self, text: str) -> list[Delta]:
        """Text that is safe to send, as what it means to the client."""
        return [Text(text)] if text else []
