"""Client messages made ready for a template: roles checked, content one text, all of it guarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
            if name == "content":
                field = f"messages[{index}].content"
                out[name] = chosen.text(_one_text(value, field), field)
            elif name != "role":
                out[name] = chosen.value(value, f"messages[{index}].{name}")
        prepared.append(out)
    return prepared


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
