"""The bytes of a chat completion, streamed or whole.

A content chunk is a template made once a stream, with the encoded text between its halves: a tenth
of a microsecond, against half of one for a struct. What is rare is spelled out each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.api.choice import Turn
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

    def __init__(
        self,
        *,
        completion_id: str,
        created: int,
        model: str,
        include_usage: bool,
        rates: Rates | None = None,
        choices: int = 1,
    ):
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
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._close
        self._role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'

    def opening(self, index: int) -> bytes:
        return self._open + b'{"index":%d,"delta":' % index + self._role + self._close

    def turn(self, turn: Turn) -> bytes:
        """What a choice says now, its end included."""
        data = b"".join([self.content(delta.text, turn.index) for delta in turn.deltas])
        return data if turn.reason is None else data + self.finish(turn.reason, turn.index)

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
            choices=[chat_choice(index, choice) for index, choice in enumerate(turns)],
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


def chat_choice(index: int, turns: Sequence[Turn]) -> dict[str, object]:
    """All turns of one choice."""
    text = "".join([delta.text for turn in turns for delta in turn.deltas])
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": turns[-1].reason,
    }


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
