"""One choice of an answer: a lane's bursts in, deltas for the client out, up to its single end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from msgspec import Struct

from gateway.errors import GatewayError, fault
from gateway.nodes.streams import Burst, Stream
from gateway.text.deltas import Delta, Text
from gateway.text.output import OutputText
from policies.contract.wire import Failed, Finished, TokenLogprob

Reason = Literal["stop", "length"]


class ToldToken(Struct, frozen=True, gc=False):
    """A token and its log probability; begin: where its text begins in the choice's text."""

    token_id: int
    begin: int
    logprob: TokenLogprob | None  # None: the first of a prompt


class Turn(Struct, frozen=True, gc=False):
    """What a choice has for the client now. The last turn has a reason or a failure.

    tokens: if log probabilities were asked for. A token is told of with its text or later.
    """

    index: int
    deltas: Sequence[Delta] = ()
    reason: Reason | None = None
    failure: GatewayError | None = None
    tokens: Sequence[ToldToken] = ()


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that each of its choices repeats first. begins: where the text of each id begins."""

    text: str
    ids: Sequence[int]
    begins: Sequence[int]


class Choice:
    """Its stop strings end this lane alone."""

    def __init__(
        self,
        index: int,
        output: OutputText,
        *,
        echo: Echo | None = None,
        has_logprobs: bool = False,
        drops_output: bool = False,
    ) -> None:
        """drops_output: a client that asked for no token; the engine gives at least one."""
        self.index = index
        self.completion_tokens = 0
        self.reason: Reason | None = None  # once it is complete
        self._output = output
        self._echo = echo
        self._has_logprobs = has_logprobs
        self._drops_output = drops_output
        self._is_rare = has_logprobs or drops_output or echo is not None
        self._untold: deque[tuple[int, TokenLogprob]] = deque()
        self._text_begins = 0 if echo is None else len(echo.text)

    def take(self, burst: Burst, stream: Stream) -> Turn:
        """A stop string is told to the stream, and so to the node."""
        output = self._output
        text = output.push(burst.tokens)
        self.completion_tokens += len(burst.tokens)
        failure: GatewayError | None = None
        if output.stopped_at is not None:
            stream.finish(burst.index, output.stopped_at)
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
        if self._is_rare:
            return self._rare_turn(burst, stream, text, failure)
        return Turn(self.index, self._deltas(text), self.reason, failure)

    def count(self, produced: int) -> None:
        """The run is given up: what came is what counts, read or not."""
        if self.reason is None and not self._drops_output:
            self.completion_tokens = produced

    def _stop(self, keep: int) -> None:
        self.completion_tokens = keep
        self.reason = "stop"

    def _deltas(self, text: str) -> list[Delta]:
        """Text that is safe to send, as what it means to the client."""
        return [Text(text)] if text else []

    def _rare_turn(
        self, burst: Burst, stream: Stream, text: str, failure: GatewayError | None
    ) -> Turn:
        """With a prompt's echo in front, with log probabilities, or without any output."""
        deltas: list[Delta] = []
        tokens: list[ToldToken] = []
        if self._echo is not None and failure is None:
            echo, self._echo = self._echo, None
            deltas.append(Text(echo.text))
            if self._has_logprobs:
                told = (None, *stream.prompt_logprobs)
                if len(told) != len(echo.ids):
                    return Turn(self.index, failure=fault("engine_error"))
                tokens += map(ToldToken, echo.ids, echo.begins, told)
        if self._drops_output:
            self.completion_tokens = 0
            if self.reason is not None:
                self.reason = "length"
            return Turn(self.index, deltas, self.reason, failure, tokens)
        if self._has_logprobs:
            if len(burst.logprobs) != len(burst.tokens):
                return Turn(self.index, failure=failure or fault("engine_error"))
            self._untold.extend(zip(burst.tokens, burst.logprobs, strict=True))
            for begin in self._output.told(is_over=self.reason is not None):
                token_id, logprob = self._untold.popleft()
                tokens.append(ToldToken(token_id, self._text_begins + begin, logprob))
        return Turn(self.index, deltas + self._deltas(text), self.reason, failure, tokens)
