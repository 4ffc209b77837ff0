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

from gateway.api.retention import Retention, read_retention
from gateway.api.sampling_request import (
    MAX_TOP_LOGPROBS,
    SamplingRequest,
    invalid,
    least_limit,
    read_sampling,
    unsupported,
    wants_cost,
    wants_usage,
)
from gateway.api.tools_request import ToolsBody, ToolsRequest, read_tools
from gateway.api.typed_input import decoded
from gateway.config import LimitsConfig
from gateway.errors import quote
from policies.affinity import BodyHints

MAX_MESSAGES = 16_384


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str | dict[str, object] | None = ""  # history is data: any text will do


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
    function_call: FunctionCall | None = None  # how one call was told before there were tools


class ChatBody(ToolsBody, frozen=True):
    """The wire form. Types only; ranges are checked in `read_chat_request`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
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
    retention: Retention
    hints: BodyHints
    tools: ToolsRequest


_decode = msgspec.json.Decoder(ChatBody).decode


def read_chat_request(data: bytes, limits: LimitsConfig) -> ChatRequest:
    """Decode and check; raises GatewayError (400) that names the field."""
    body = decoded(data, _decode, needs="model and messages")
    if not body.model:
        raise invalid("model", '""', "a model's name", "see GET /v1/models")
    messages = read_messages(body.messages)
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
        retention=read_retention(body, limits),
        hints=BodyHints(
            prompt_cache_key=body.prompt_cache_key,
            session_id=body.session_id,
            metadata=body.metadata,
        ),
        tools=read_tools(body),
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
    calls = message.tool_calls or []
    if not calls and message.function_call is not None:
        calls = [ToolCall(message.function_call)]
    if calls:
        plain["tool_calls"] = [_call(call) for call in calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _call(call: ToolCall) -> Mapping[str, object]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": function}


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
