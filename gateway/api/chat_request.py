"""The body of a chat completion: what is accepted, what is ignored, what is refused and how.

Unknown fields are ignored. A known field with an impossible value, or one that asks for something
this version cannot do, is refused with its name: nothing is silently dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Struct

from gateway.config import LimitsConfig
from gateway.errors import GatewayError, quote
from policies.affinity import BodyHints

MAX_MESSAGES = 16_384
SEED_MASK = (1 << 63) - 1


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


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str


class ChatBody(Struct, frozen=True):
    """The wire form. Types only; ranges are checked in `read_chat_request`."""

    model: str
    messages: list[ChatMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: object = None
    functions: list[msgspec.Raw] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
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
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stops: tuple[str, ...]
    hints: BodyHints


_decode = msgspec.json.Decoder(ChatBody).decode


def read_chat_request(data: bytes, limits: LimitsConfig) -> ChatRequest:
    """Decode and check; raises GatewayError (400) that names the field."""
    body = _decoded(data)
    if not body.model:
        raise _invalid("model", '""', "a model's name", "see GET /v1/models")
    if not body.messages:
        raise _invalid("messages", "an empty list", "at least one message", "add a user message")
    if len(body.messages) > MAX_MESSAGES:
        raise _invalid(
            "messages",
            f"{len(body.messages)} messages",
            f"at most {MAX_MESSAGES}",
            "compact the conversation",
        )
    _refuse_unsupported(body)
    return ChatRequest(
        model=body.model,
        messages=tuple(_plain(i, message) for i, message in enumerate(body.messages)),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        max_tokens=_token_limit(body),
        temperature=_number("temperature", body.temperature, 1.0, low=0.0, high=2.0),
        top_p=_number("top_p", body.top_p, 1.0, low=0.0, high=1.0, low_is_open=True),
        top_k=_top_k(body.top_k),
        min_p=_number("min_p", body.min_p, 0.0, low=0.0, high=1.0),
        seed=None if body.seed is None else body.seed & SEED_MASK,
        stops=_stops(body.stop, limits),
        hints=BodyHints(
            prompt_cache_key=body.prompt_cache_key,
            session_id=body.session_id,
            metadata=body.metadata,
        ),
    )


def _decoded(data: bytes) -> ChatBody:
    if not data or data.isspace():
        raise GatewayError(
            "missing_body",
            field="body",
            found="nothing",
            allowed="a JSON object",
            remedy="send model and messages",
        )
    try:
        return _decode(data)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        field = path.strip("`").removeprefix("$").removeprefix(".") or "body"
        if reason.startswith("Object missing required field"):
            name = reason.rsplit("`", 2)[1]
            name = name if field == "body" else f"{field}.{name}"
            raise _invalid(name, "nothing", "a value", "add the field") from None
        allowed, found = _expectation(reason)
        raise _invalid(field, found, allowed, "mend the field") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error) if isinstance(error, msgspec.DecodeError) else "text that is not UTF-8"
        raise GatewayError(
            "invalid_json",
            field="body",
            found=reason[:200] or "text that is not UTF-8",
            allowed="one JSON object in UTF-8 without lone surrogates, NaN or Infinity",
            remedy="encode the body with a JSON library",
        ) from None


def _expectation(reason: str) -> tuple[str, str]:
    """msgspec's "Expected `int`, got `str`" as (allowed, found)."""
    allowed, separator, found = reason.partition(", got ")
    if separator:
        return allowed.removeprefix("Expected ").replace("`", ""), found.replace("`", "")
    return "a value of the documented type", reason.replace("`", "")


def _refuse_unsupported(body: ChatBody) -> None:
    if body.n is not None and body.n != 1:
        if body.n < 1:
            raise _invalid("n", str(body.n), "1", "leave n out")
        raise _unsupported("n", str(body.n), "1", "send the request several times")
    if body.tools and body.tool_choice != "none":
        raise _unsupported(
            "tools",
            f"{len(body.tools)} tools",
            'no tools, or tool_choice "none"',
            'send "tool_choice": "none" or leave tools out',
        )
    if body.functions:
        raise _unsupported(
            "functions", f"{len(body.functions)} functions", "none", "leave functions out"
        )
    if body.response_format is not None and body.response_format.type != "text":
        kind = body.response_format.type
        if kind not in ("json_object", "json_schema"):
            raise _invalid("response_format.type", quote(kind), '"text"', "leave it out")
        raise _unsupported(
            "response_format.type", quote(kind), '"text"', "ask for JSON in the prompt instead"
        )
    if body.logprobs or body.top_logprobs:
        raise _unsupported(
            "logprobs" if body.logprobs else "top_logprobs",
            "a wish for log probabilities",
            "false",
            "leave it out",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(body, name)
        if value is not None and value != 0:
            if not -2.0 <= value <= 2.0:
                raise _invalid(name, f"{value:g}", "-2 to 2", "leave it out")
            raise _unsupported(name, f"{value:g}", "0", "leave it out")
    if body.logit_bias:
        raise _unsupported("logit_bias", f"{len(body.logit_bias)} ids", "none", "leave it out")


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
                raise _invalid(f"{field}.text", "nothing", "a string", "add the text")
            parts.append({"type": "text", "text": part.text})
        elif part.type == "refusal":
            parts.append({"type": "text", "text": part.refusal or ""})
        else:
            raise _unsupported(f"{field}.type", quote(part.type), '"text"', "send text only")
    return parts


def _token_limit(body: ChatBody) -> int | None:
    given = {
        name: value
        for name in ("max_completion_tokens", "max_tokens")
        if (value := getattr(body, name)) is not None
    }
    for name, value in given.items():
        if value < 1:
            raise _invalid(name, str(value), "at least 1", "raise it or leave it out")
    return min(given.values()) if given else None


def _number(
    name: str,
    value: float | None,
    default: float,
    *,
    low: float,
    high: float,
    low_is_open: bool = False,
) -> float:
    if value is None:
        return default
    inside = low < value <= high if low_is_open else low <= value <= high
    if not (math.isfinite(value) and inside):
        allowed = f"above {low:g} and at most {high:g}" if low_is_open else f"{low:g} to {high:g}"
        raise _invalid(name, f"{value:g}", allowed, "choose a value in that range")
    return value


def _top_k(value: int | None) -> int:
    if value is None or value == -1:  # -1 is the field's other way to say "no cut"
        return 0
    if not 0 <= value <= (1 << 31) - 1:
        raise _invalid("top_k", str(value), "0 (no cut) or more", "raise it or leave it out")
    return value


def _stops(stop: str | list[str] | None, limits: LimitsConfig) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.stop_strings:
        raise _invalid(
            "stop", f"{len(stops)} strings", f"at most {limits.stop_strings}", "send fewer"
        )
    for text in stops:
        if not 1 <= len(text) <= limits.stop_chars:
            raise _invalid(
                "stop",
                f"a string of {len(text)} characters",
                f"1 to {limits.stop_chars} characters",
                "shorten it",
            )
    return stops


def _invalid(field: str, found: str, allowed: str, remedy: str) -> GatewayError:
    return GatewayError("invalid_request", field=field, found=found, allowed=allowed, remedy=remedy)


def _unsupported(field: str, found: str, allowed: str, remedy: str) -> GatewayError:
    return GatewayError("unsupported", field=field, found=found, allowed=allowed, remedy=remedy)
