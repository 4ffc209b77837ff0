"""Log probabilities in the shapes that clients know: chat's entries, and text's parallel lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.api.choice import ToldToken
from policies.contract.wire import TokenLogprob

TokenBytes = Callable[[int], bytes]

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


def chat_logprobs(tokens: Sequence[ToldToken], token_bytes: TokenBytes) -> dict[str, object]:
    """bytes say what a token is where its text alone is no whole character."""
    return {
        "content": [
            _entry(token.token_id, token.logprob.logprob, token_bytes)
            | {
                "top_logprobs": [
                    _entry(id_, value, token_bytes) for id_, value in token.logprob.top
                ]
            }
            for token in tokens
            if token.logprob is not None
        ],
        "refusal": None,
    }


def _entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, object]:
    data = token_bytes(token_id)
    return {
        "token": data.decode(errors="replace"),
        "logprob": max(logprob, LEAST),
        "bytes": list(data),
    }


def text_logprobs(tokens: Sequence[ToldToken], token_bytes: TokenBytes) -> dict[str, object]:
    """One list a column. The first token of a prompt has none; the chosen one is always told."""
    return {
        "tokens": [token_name(token_bytes(token.token_id)) for token in tokens],
        "token_logprobs": [
            None if token.logprob is None else max(token.logprob.logprob, LEAST) for token in tokens
        ],
        "top_logprobs": [
            None if token.logprob is None else _top(token.token_id, token.logprob, token_bytes)
            for token in tokens
        ],
        "text_offset": [token.begin for token in tokens],
    }


def _top(token_id: int, told: TokenLogprob, token_bytes: TokenBytes) -> dict[str, float]:
    top: dict[str, float] = {}
    for one, logprob in (*told.top, (token_id, told.logprob)):
        top.setdefault(token_name(token_bytes(one)), max(logprob, LEAST))
    return top


def token_name(data: bytes) -> str:
    """Its text; `bytes:` and escapes for a part of a character, so that two parts differ."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])
