"""Client messages made ready for a template: roles checked, content one text, all of it guarded.

Arguments of earlier tool calls come as JSON text and become objects, as templates expect them: they
write those in one spacing, so a call that the model wrote in that spacing comes back byte for byte,
whatever spacing its client keeps, and the next turn finds its pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from gateway.text.errors import TextError
from gateway.text.guard import Guard

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def prepare(
    messages: Sequence[Mapping[str, object]],
    *,
    guard: Guard,
    assistant_guard: Guard,
    keep_developer: bool,
) -> list[dict[str, object]]:
    """Copies of messages for a template. Raises TextError naming the message and the field.

    Text parts are joined by newlines, null content is empty text, and `developer` is `system` for
    a template that does not know it. Roles come from a fixed list, so they need no guard.
    """
    if not messages:
        raise TextError(
            "messages", found="no message", allowed="at least one", remedy="send a user message"
        )
    prepared: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise TextError(
                f"messages[{index}].role",
                found=repr(role)[:80],
                allowed=", ".join(ROLES),
                remedy="use one of these roles",
            )
        chosen = assistant_guard if role == "assistant" else guard
        out: dict[str, object] = {
            "role": "system" if role == "developer" and not keep_developer else role,
            "content": "",
        }
        for name, value in message.items():
            field = f"messages[{index}].{name}"
            if name == "content":
                out[name] = chosen.text(_one_text(value, field), field)
            elif name == "tool_calls" and isinstance(value, list | tuple):
                out[name] = [_call(call, guard, f"{field}[{at}]") for at, call in enumerate(value)]
            elif name != "role":
                out[name] = chosen.value(value, field)
        prepared.append(out)
    return prepared


def prepare_tools(tools: Sequence[Mapping[str, object]], guard: Guard) -> list[dict[str, object]]:
    """Copies of function definitions for a template, in the order of keys that the client sent."""
    return [
        {"type": "function", "function": guard.value(tool, f"tools[{index}].function")}
        for index, tool in enumerate(tools)
    ]


def _call(call: object, guard: Guard, field: str) -> object:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return guard.value(call, field)
    function = dict(call["function"])
    arguments = _arguments(function.pop("arguments", None), guard, f"{field}.function.arguments")
    prepared = {
        name: guard.value(value, f"{field}.{name}")
        for name, value in call.items()
        if name not in ("type", "function")
    }
    guarded = cast(dict[str, object], guard.value(function, f"{field}.function"))
    return prepared | {"type": "function", "function": {**guarded, "arguments": arguments}}


def _arguments(arguments: object, guard: Guard, field: str) -> object:
    """An object where the text is one, else the text as it stands: what a model wrote, say."""
    if not isinstance(arguments, str):
        return guard.value({} if arguments is None else arguments, field)
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
        if isinstance(parsed, dict):
            json.dumps(parsed, ensure_ascii=False).encode()  # escaped lone surrogates are no text
            return guard.value(parsed, field)
    except (ValueError, RecursionError, TextError):  # no JSON, or more than a guard takes
        pass
    return guard.text(arguments, field)


def _one_text(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        raise TextError(
            field,
            found=type(content).__name__,
            allowed="text, a list of text parts, or null",
            remedy="send the content as text",
        )
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(text, str):
            raise TextError(
                f"{field}[{index}]",
                found=f"a part of type {kind!r}"[:80],
                allowed='{"type": "text", "text": …}',
                remedy="send text parts only; this model reads no images, audio or files",
            )
        texts.append(text)
    return "\n".join(texts)
