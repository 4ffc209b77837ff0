"""Conversations of a given size, and request bodies that hold them."""

from __future__ import annotations

import json

from benchmarks.gateway.scripted_nodes import MODEL

SENTENCE = "The gateway turns text into tokens once, and every page of them has one name. "


def conversation(turns: int, chars: int) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        text = f"Turn {turn}: " + (SENTENCE * (chars // len(SENTENCE) + 1))[:chars]
        messages.append({"role": "user" if turn % 2 == 0 else "assistant", "content": text})
    return messages


def body(chars: int, max_tokens: int, *, stream: bool, turn: int = 0) -> bytes:
    messages = conversation(2, chars // 2)
    messages.append({"role": "user", "content": f"Question {turn}"})
    return json.dumps(
        {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream}
    ).encode()
