"""Any bytes as a body: never a 5xx, never a hang, never a leak."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"]),
            "content": st.text(max_size=30) | VALUES,
            "name": VALUES,
            "tool_calls": VALUES,
            "tool_call_id": VALUES,
        },
    ),
    max_size=4,
)
NAMES = [
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "n",
    "tools",
    "tool_choice",
    "functions",
    "response_format",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "prompt_cache_key",
    "session_id",
    "metadata",
    "user",
    "store",
]
BODIES = st.builds(
    lambda fields, messages, model: {**fields, "messages": messages, "model": model},
    st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), VALUES, max_size=6),
    MESSAGES | VALUES,
    st.just("tiny") | VALUES,
)


def check(shared_gateway: Any, data: bytes, path: str = "/v1/chat/completions") -> None:
    with shared_gateway.client() as client:
        reply = client.post(path, content=data)
    assert reply.status_code < 500, (reply.status_code, reply.text, data)
    if reply.status_code >= 400:
        error = reply.json()["error"]
        assert error["message"]
        assert error["code"]


# The gateway's own thread draws from the global `random` (WebSocket pings), which hypothesis takes
# for a strategy that does.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=80, deadline=None, suppress_health_check=QUIET)
@given(body=BODIES)
def test_any_json_is_answered(gateway, body) -> None:
    check(gateway, json.dumps(body).encode())


RAW_BODIES = st.builds(
    lambda fields, prompt: {**fields, "prompt": prompt, "model": "tiny"},
    st.dictionaries(st.sampled_from([*NAMES, "echo", "suffix", "best_of"]), VALUES, max_size=6),
    st.text(max_size=20)
    | st.lists(st.text(max_size=5), max_size=3)
    | st.lists(st.integers(-1, 300), max_size=6)
    | st.lists(st.lists(st.integers(0, 257), max_size=4), max_size=3)
    | VALUES,
)


@settings(max_examples=80, deadline=None, suppress_health_check=QUIET)
@given(body=RAW_BODIES)
def test_any_json_is_answered_as_text_too(gateway, body) -> None:
    check(gateway, json.dumps(body).encode(), "/v1/completions")


@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@given(
    data=st.binary(max_size=200), prefix=st.sampled_from([b"", b'{"model": "tiny", "messages": '])
)
def test_any_bytes_are_answered(gateway, data, prefix) -> None:
    check(gateway, prefix + data)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=QUIET)
@given(body=BODIES)
def test_any_json_is_answered_at_length(gateway, body) -> None:
    check(gateway, json.dumps(body).encode())
