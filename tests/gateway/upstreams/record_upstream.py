"""Records what a foreign server answers, for tests that play it back: `… URL MODEL FILE`.

One JSON line an exchange: what was asked, and status, type and body as they came.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SAY = {"messages": [{"role": "user", "content": "Say: Grüße, 世界!"}]}
FEW = {"max_tokens": 6, "temperature": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat stream": (CHAT, {**SAY, **FEW, **STREAM}),
    "chat whole": (CHAT, {**SAY, **FEW}),
    "chat logprobs": (CHAT, {**SAY, **FEW, **STREAM, "logprobs": True, "top_logprobs": 1}),
    "text stream": (TEXT, {"prompt": "The capital of France is", **FEW, **STREAM}),
    "text whole": (TEXT, {"prompt": "The capital of France is", **FEW}),
    "bad value": (CHAT, {**SAY, "temperature": 9}),
    "bad value stream": (CHAT, {**SAY, **STREAM, "temperature": 9}),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}),
}
KEPT = ("content-type", "retry-after")


def main(url: str, model: str, path: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as client, open(path, "w") as file:
        for name, (route, body) in ASKED.items():
            reply = client.post(route, json={"model": model, **body})
            told = {
                "name": name,
                "path": route,
                "asked": {"model": model, **body} if name != "too long" else None,
                "status": reply.status_code,
                "headers": {one: reply.headers[one] for one in KEPT if one in reply.headers},
                "body": reply.text,
            }
            file.write(json.dumps(told, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
