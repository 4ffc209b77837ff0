"""The body of a chat completion: what is accepted, what is ignored, what is refused and how.

Unknown fields are ignored. A known field with an impossible value, or one that asks for something
this version cannot do, is refused with its name: nothing is silently dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Struct

from gateway.api.sampling_request import (
    MAX_TOP_LOGPROBS,
    SamplingBody,
    SamplingRequest,
    invalid,
    least_limit,
    read_sampling,
    unsupported,
    wants_cost,
    wants_usage,
)
from gateway.api.typed_input import decoded
from gateway.config import LimitsConfig
from gateway.errors import quote
from policies.affinity import BodyHints

MAX_MESSAGES = 16_384


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str = ""  # history is data: shown to the model as it is, never parsed


class ToolCall(Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ChatMessage(Struct, frozen=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ResponseFormat(Struct, frozen=True):
    type: str


class ChatBody(SamplingBody, frozen=True):
    """The wire form. Types only; ranges are checked in `read_chat_request`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: object = None
    functions: list[msgspec.Raw] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_cache_key: object = None
    session_id: object = None
    metadata: object = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    model: str
    messages: tuple[
        Mapping[str, object], ...
    ]  # role, content (text or text parts), and what history carries
    stream: bool
    include_usage: bool
    include_cost: bool
    sampling: SamplingRequest
    hints: BodyHints


_decode = msgspec.json.Decoder(ChatBody).decode


def read_chat_request(data: bytes, limits: LimitsConfig) -> ChatRequest:
    """Decode and check; raises GatewayError (400) that names the field."""
    body = decoded(data, _decode, needs="model and messages")
    if not body.model:
        raise invalid("model", '""', "a model's name", "see GET /v1/models")
    messages = read_messages(body.messages)
    _refuse_unsupported(body)
    return ChatRequest(
        model=body.model,
        messages=messages,
        stream=bool(body.stream),
        include_usage=wants_usage(body),
        include_cost=wants_cost(body),
        sampling=read_sampling(
            body,
            limits,
            max_tokens=least_limit(
                max_completion_tokens=body.max_completion_tokens, max_tokens=body.max_tokens
            ),
            logprobs=_logprobs(body),
        ),
        hints=BodyHints(
            prompt_cache_key=body.prompt_cache_key,
            session_id=body.session_id,
            metadata=body.metadata,
        ),
    )


def read_messages(messages: Sequence[ChatMessage]) -> tuple[Mapping[str, object], ...]:
    """A conversation for `gateway/text`; raises GatewayError (400)."""
    if not messages:
        raise invalid("messages", "an empty list", "at least one message", "add a user message")
    if len(messages) > MAX_MESSAGES:
        raise invalid(
            "messages",
            f"{len(messages)} messages",
            f"at most {MAX_MESSAGES}",
            "compact the conversation",
        )
    return tuple(_plain(i, message) for i, message in enumerate(messages))


def _refuse_unsupported(body: ChatBody) -> None:
    if body.tools and body.tool_choice != "none":
        raise unsupported(
            "tools",
            f"{len(body.tools)} tools",
            'no tools, or tool_choice "none"',
            'send "tool_choice": "none" or leave tools out',
        )
    if body.functions:
        raise unsupported(
            "functions", f"{len(body.functions)} functions", "none", "leave functions out"
        )
    if body.response_format is not None and body.response_format.type != "text":
        kind = body.response_format.type
        if kind not in ("json_object", "json_schema"):
            raise invalid("response_format.type", quote(kind), '"text"', "leave it out")
        raise unsupported(
            "response_format.type", quote(kind), '"text"', "ask for JSON in the prompt instead"
        )


def _logprobs(body: ChatBody) -> int | None:
    """How many alternatives to tell beside each token; None for no log probabilities."""
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise invalid("top_logprobs", str(top), f"0 to {MAX_TOP_LOGPROBS}", "ask for fewer")
    if body.logprobs:
        return top or 0
    if top:
        raise invalid("top_logprobs", str(top), "0 without logprobs", "set logprobs to true")
    return None


def _plain(index: int, message: ChatMessage) -> Mapping[str, object]:
    """A message for `gateway/text`, which joins the parts of a content and places its role."""
    plain: dict[str, object] = {
        "role": message.role,
        "content": _content(index, message.content),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _content(index: int, content: str | list[ContentPart] | None) -> object:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for at, part in enumerate(content):
        field = f"messages[{index}].content[{at}]"
        if part.type in ("text", "input_text", "output_text"):
            if part.text is None:
                raise invalid(f"{field}.text", "nothing", "a string", "add the text")
            parts.append({"type": "text", "text": part.text})
        elif part.type == "refusal":
            parts.append({"type": "text", "text": part.refusal or ""})
        else:
            raise unsupported(f"{field}.type", quote(part.type), '"text"', "send text only")
    return parts
