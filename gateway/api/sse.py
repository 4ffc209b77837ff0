"""The bytes of a completion, of chat or of text, streamed or whole.

A content chunk is a template made once a stream, with the encoded text between its halves: a tenth
of a microsecond, against half of one for a struct. What is rare is spelled out each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.api.choice import Turn
from gateway.api.logprobs import TokenBytes, chat_logprobs, text_logprobs
from gateway.text.deltas import CallArguments, CallStart, Delta, Text
from policies.contract.wire import Usage
from policies.pricing import Rates, charge, usd

HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

STREAM_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache, no-transform"),
    ("x-accel-buffering", "no"),  # nginx would deliver the stream in one piece
)

_encode = msgspec.json.Encoder().encode


class ChatChunks:
    """The chat dialect. With include_usage each event carries usage: null until the last.

    rates: of a request that asked what it costs.
    """

    ID_PREFIX = "chatcmpl"

    def __init__(
        self,
        *,
        completion_id: str,
        created: int,
        model: str,
        include_usage: bool,
        rates: Rates | None = None,
        choices: int = 1,
        token_bytes: TokenBytes | None = None,
    ):
        """token_bytes: for log probabilities, if they were asked for."""
        self._id, self._created, self._model = completion_id, created, model
        self._rates = rates
        self._open = (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":['
            % (_encode(completion_id), created, _encode(model))
        )
        self._close = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._heads = [
            self._open + b'{"index":%d,"delta":{"content":' % index for index in range(choices)
        ]
        self._end = b',"finish_reason":null}' + self._close
        self._tail = b'},"logprobs":null' + self._end
        self._token_bytes = token_bytes
        self._role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'

    def opening(self, index: int) -> bytes:
        return self._open + b'{"index":%d,"delta":' % index + self._role + self._close

    def turn(self, turn: Turn) -> bytes:
        """What a choice says now, its end included."""
        if turn.tokens and self._token_bytes is not None:
            data = self._with_logprobs(turn, chat_logprobs(turn.tokens, self._token_bytes))
        else:
            data = b""
            for delta in turn.deltas:
                data += self._delta(delta, turn.index)
        return data if turn.reason is None else data + self.finish(turn.reason, turn.index)

    def _with_logprobs(self, turn: Turn, logprobs: dict[str, object]) -> bytes:
        """In the turn's first event of content, which may be empty."""
        text, rest = "", turn.deltas
        if rest and isinstance(rest[0], Text):
            text, rest = rest[0].text, rest[1:]
        first = (self._heads[turn.index], _encode(text), b'},"logprobs":', _encode(logprobs))
        return b"".join([*first, self._end, *[self._delta(delta, turn.index) for delta in rest]])

    def _delta(self, delta: Delta, index: int) -> bytes:
        if isinstance(delta, Text):
            return self.content(delta.text, index)
        fields: dict[str, object] = {"index": delta.index}
        if isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            fields |= {"id": delta.call_id, "type": "function", "function": function}
        else:
            fields["function"] = {"arguments": delta.text}
        call = b'{"index":%d,"delta":{"tool_calls":[%b]' % (index, _encode(fields))
        return self._open + call + self._tail

    def content(self, text: str, index: int = 0) -> bytes:
        return self._heads[index] + _encode(text) + self._tail

    def finish(self, reason: str, index: int = 0) -> bytes:
        return (
            self._open
            + b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}'
            % (index, _encode(reason))
            + self._close
        )

    def usage(self, usage: Usage) -> bytes:
        return self._open + b'],"usage":%b}\n\n' % _encode(usage_fields(usage, self._rates))

    def whole(self, turns: Sequence[Sequence[Turn]], usage: Usage) -> bytes:
        return completion(
            completion_id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                chat_choice(index, choice, self._token_bytes) for index, choice in enumerate(turns)
            ],
            usage=usage,
            rates=self._rates,
        )


def error_event(body: bytes) -> bytes:
    """A terminal event: no [DONE] follows, so the stream cannot look complete."""
    return b"data: " + body + b"\n\n"


def usage_fields(usage: Usage, rates: Rates | None = None) -> dict[str, object]:
    """OpenAI's shape; prompt_tokens includes the cached ones, and the count is always there.

    With rates what it costs, by the function and the figures that the ledger settles by.
    """
    fields: dict[str, object] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if rates is not None:
        price = charge(usage, rates)
        fields["cost"] = _number(price.bill)
        fields["cost_details"] = {
            "cache_discount": _number(price.discount),
            "charge_nano_usd": price.bill,
        }
    return fields


def _number(nano_usd: int) -> msgspec.Raw:
    """USD as a JSON number with all its decimals."""
    return msgspec.Raw(usd(nano_usd).encode())


def chat_choice(
    index: int, turns: Sequence[Turn], token_bytes: TokenBytes | None = None
) -> dict[str, object]:
    """All turns of one choice."""
    tokens = [token for turn in turns for token in turn.tokens]
    deltas = [delta for turn in turns for delta in turn.deltas]
    text = _text_of(deltas)
    message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
    calls = _calls_of(deltas)
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return {
        "index": index,
        "message": message,
        "logprobs": None if token_bytes is None else chat_logprobs(tokens, token_bytes),
        "finish_reason": turns[-1].reason,
    }


def _text_of(deltas: Sequence[Delta]) -> str:
    return "".join([delta.text for delta in deltas if isinstance(delta, Text)])


def _calls_of(deltas: Sequence[Delta]) -> list[dict[str, object]]:
    starts = [delta for delta in deltas if isinstance(delta, CallStart)]
    arguments: list[list[str]] = [[] for _ in starts]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            arguments[delta.index].append(delta.text)
    return [
        {
            "id": start.call_id,
            "type": "function",
            "function": {"name": start.name, "arguments": "".join(arguments[start.index])},
        }
        for start in starts
    ]


def completion(
    *,
    completion_id: str,
    created: int,
    model: str,
    choices: Sequence[dict[str, object]],
    usage: Usage,
    rates: Rates | None = None,
) -> bytes:
    """The whole answer of a request that did not ask for a stream."""
    return _encode(
        {
            "id": completion_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": choices,
            "usage": usage_fields(usage, rates),
        }
    )


class TextChunks:
    """The dialect of text completions. With include_usage as for chat."""

    ID_PREFIX = "cmpl"

    def __init__(
        self,
        *,
        completion_id: str,
        created: int,
        model: str,
        include_usage: bool,
        rates: Rates | None = None,
        choices: int = 1,
        token_bytes: TokenBytes | None = None,
    ):
        """token_bytes: for log probabilities, if they were asked for."""
        self._rates = rates
        self._fields = {
            "id": completion_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._open = b"data: " + _encode(self._fields)[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._heads = [self._open + b'{"index":%d,"text":' % index for index in range(choices)]
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._close
        self._token_bytes = token_bytes

    def opening(self, index: int) -> bytes:
        """Text has no roles."""
        return b""

    def turn(self, turn: Turn) -> bytes:
        """One event, the end included."""
        text = _text_of(turn.deltas)
        if turn.reason is None and not turn.tokens:
            return self._heads[turn.index] + _encode(text) + self._tail if text else b""
        logprobs = None
        if turn.tokens and self._token_bytes is not None:
            logprobs = text_logprobs(turn.tokens, self._token_bytes)
        return b"".join(
            [
                self._heads[turn.index],
                _encode(text),
                b',"logprobs":',
                _encode(logprobs),
                b',"finish_reason":',
                _encode(turn.reason),
                b"}",
                self._close,
            ]
        )

    def usage(self, usage: Usage) -> bytes:
        return self._open + b'],"usage":%b}\n\n' % _encode(usage_fields(usage, self._rates))

    def whole(self, turns: Sequence[Sequence[Turn]], usage: Usage) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(turns)]
        return _encode(
            self._fields | {"choices": choices, "usage": usage_fields(usage, self._rates)}
        )

    def _choice(self, index: int, turns: Sequence[Turn]) -> dict[str, object]:
        tokens = [token for turn in turns for token in turn.tokens]
        return {
            "index": index,
            "text": _text_of([delta for turn in turns for delta in turn.deltas]),
            "logprobs": text_logprobs(tokens, self._token_bytes) if self._token_bytes else None,
            "finish_reason": turns[-1].reason,
        }
