"""The bytes of a chat completion, streamed or whole.

A content chunk is a template made once a stream, with the encoded text between its halves: a tenth
of a microsecond, against half of one for a struct. What is rare is spelled out each time.
"""

from __future__ import annotations

import msgspec

from policies.contract.wire import Usage

HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

STREAM_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache, no-transform"),
    ("x-accel-buffering", "no"),  # nginx would deliver the stream in one piece
)

_encode = msgspec.json.Encoder().encode


class ChatChunks:
    """Events of one stream. With include_usage each carries usage: null until the last."""

    def __init__(self, *, completion_id: str, created: int, model: str, include_usage: bool):
        self._open = (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":['
            % (_encode(completion_id), created, _encode(model))
        )
        self._close = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._head = self._open + b'{"index":0,"delta":{"content":'
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._close

    def role(self) -> bytes:
        return (
            self._open
            + b'{"index":0,"delta":{"role":"assistant","content":""},'
            + b'"logprobs":null,"finish_reason":null}'
            + self._close
        )

    def content(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail

    def finish(self, reason: str) -> bytes:
        return (
            self._open
            + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":%b}' % _encode(reason)
            + self._close
        )

    def usage(self, usage: Usage) -> bytes:
        return self._open + b'],"usage":%b}\n\n' % _encode(usage_fields(usage))


def error_event(body: bytes) -> bytes:
    """A terminal event: no [DONE] follows, so the stream cannot look complete."""
    return b"data: " + body + b"\n\n"


def usage_fields(usage: Usage) -> dict[str, object]:
    """OpenAI's shape; prompt_tokens includes the cached ones, and the count is always there."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def completion(
    *, completion_id: str, created: int, model: str, text: str, reason: str, usage: Usage
) -> bytes:
    """The whole answer of a request that did not ask for a stream."""
    return _encode(
        {
            "id": completion_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": reason,
                }
            ],
            "usage": usage_fields(usage),
        }
    )
