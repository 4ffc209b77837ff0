"""One choice of an answer: a lane's bursts in, deltas for the client out, up to its single end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from msgspec import Struct

from gateway.errors import GatewayError, fault, late_first_token
from gateway.nodes.streams import Burst, Stream
from gateway.text.deltas import Delta, Text
from gateway.text.output import OutputText
from gateway.text.tool_calls import ToolCallParser
from policies.contract.wire import Failed, Finished, TokenLogprob

Reason = Literal["stop", "length", "tool_calls"]


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
    """Its stop strings end this lane alone, and so does its first call where one is the most."""

    def __init__(
        self,
        index: int,
        output: OutputText,
        *,
        echo: Echo | None = None,
        has_logprobs: bool = False,
        drops_output: bool = False,
        calls: ToolCallParser | None = None,
        one_call: bool = False,
    ) -> None:
        """drops_output: a client that asked for no token; the engine gives at least one.

        calls: for a client that sent tools.
        """
        self.index = index
        self.completion_tokens = 0
        self.reason: Reason | None = None  # once it is complete
        self._output = output
        self._echo = echo
        self._has_logprobs = has_logprobs
        self._drops_output = drops_output
        self._is_rare = has_logprobs or drops_output or echo is not None
        self._calls = calls
        self._one_call = one_call
        self._untold: deque[tuple[int, TokenLogprob]] = deque()
        self._text_begins = 0 if echo is None else len(echo.text)

    def take(self, burst: Burst, stream: Stream) -> Turn:
        """An end of ours, at a stop string or a call, is told to the stream, and so to the node."""
        output = self._output
        deltas = self._push(burst.tokens)
        failure: GatewayError | None = None
        if output.stopped_at is not None or self._is_called:
            keep = output.stopped_at or self.completion_tokens
            stream.finish(burst.index, keep)
            deltas += self._end("stop", keep)
        elif burst.end is not None:
            match burst.end:
                case Finished(reason="stop" | "length" as reason, usage=usage):
                    deltas += self._deltas(output.flush())
                    if output.stopped_at is not None:
                        deltas += self._end("stop", output.stopped_at)
                    else:
                        deltas += self._end(reason, usage.completion_tokens)
                case Finished(reason="abort"):
                    failure = fault("aborted")
                case Finished():
                    failure = fault("engine_error")
                case Failed(code="ttft_missed"):
                    failure = late_first_token(None, stream.retry_after_s or 1.0)
                case Failed(code=code):
                    failure = fault(code)
                case never:
                    assert_never(never)
        if self._is_rare:
            return self._rare_turn(burst, stream, deltas, failure)
        return Turn(self.index, deltas, self.reason, failure)

    def count(self, produced: int) -> None:
        """The run is given up: what came is what counts, read or not."""
        if self.reason is None and not self._drops_output:
            self.completion_tokens = produced

    @property
    def _is_called(self) -> bool:
        return self._one_call and self._calls is not None and self._calls.calls > 0

    def _push(self, tokens: Sequence[int]) -> list[Delta]:
        if not self._one_call:
            self.completion_tokens += len(tokens)
            return self._deltas(self._output.push(tokens))
        deltas: list[Delta] = []
        for token in tokens:
            if self._is_called:
                break
            self.completion_tokens += 1
            deltas += self._deltas(self._output.push((token,)))
        return deltas

    def _end(self, reason: Literal["stop", "length"], completion_tokens: int) -> list[Delta]:
        """The rest; completion_tokens is the count that is billed."""
        self.completion_tokens = completion_tokens
        self.reason = reason
        if self._calls is None:
            return []
        rest = self._calls.flush()
        if reason == "stop" and self._calls.calls:
            self.reason = "tool_calls"
        return rest

    def _deltas(self, text: str) -> list[Delta]:
        """Text that is safe to send, as what it means to the client."""
        if self._calls is not None:
            return self._calls.push(text)
        return [Text(text)] if text else []

    def _rare_turn(
        self, burst: Burst, stream: Stream, said: list[Delta], failure: GatewayError | None
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
        return Turn(self.index, deltas + said, self.reason, failure, tokens)
