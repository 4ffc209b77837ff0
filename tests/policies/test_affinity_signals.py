"""Which conversation a request belongs to: one row per harness, recorded or by its rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.affinity import (
    HEADERS,
    BodyHints,
    Signal,
    find_signal,
    is_usable,
    scoped_digest,
    session_of_user_id,
)

HEX = "0" * 63 + "3"
UUID = "00000000-0000-4000-8000-000000000001"


def signal_of(request: dict[str, Any]) -> Signal:
    headers = {name.lower(): value for name, value in request["headers"]}
    body = request["body"] or {}
    return find_signal(headers, msgspec.convert(body, BodyHints))


RECORDED = [
    ("ai-sdk.json", 0, "x-session-affinity", "drive-1"),
    ("openai-py.json", 0, "x-session-affinity", "drive-1"),
    ("openai-js.json", 1, "x-session-affinity", "drive-1"),
    ("opencode.json", 0, "x-session-affinity", "ses_00000000000000000000000001"),
    ("opencode-cf.json", 2, "x-session-affinity", "ses_00000000000000000000000001"),
    ("pi.json", 0, None, None),
    ("pi-affinity.json", 1, "x-session-affinity", UUID),
    ("claude.json", 1, "x-claude-code-session-id", UUID),
    ("codex.json", 0, "session-id", "00000000-0000-4000-8000-000000000005"),
]


@pytest.mark.parametrize(("file", "index", "source", "value"), RECORDED)
def test_recorded_harness(shared: Path, file, index, source, value) -> None:
    request = json.loads((shared / "clients" / file).read_text())["requests"][index]
    assert signal_of(request) == Signal(value, source)


@pytest.mark.parametrize("file", sorted({row[0] for row in RECORDED if row[3]}))
def test_all_turns_of_a_recording_are_one_session(shared: Path, file) -> None:
    requests = json.loads((shared / "clients" / file).read_text())["requests"]
    values = {signal_of(r).value for r in requests if r["method"] == "POST"}
    assert len(values) == 1


BY_RULE: list[tuple[str, dict[str, str], dict[str, Any], str, str]] = [
    ("crush", {"x-session-id": "a1", "x-session-affinity": "a1"}, {}, "x-session-affinity", "a1"),
    ("older codex", {"session_id": "c1"}, {}, "session_id", "c1"),
    ("codex thread", {"thread-id": "t1"}, {}, "thread-id", "t1"),
    ("opencode's own provider", {"x-opencode-session": "o"}, {}, "x-opencode-session", "o"),
    ("xai", {"x-grok-conv-id": "g"}, {}, "x-grok-conv-id", "g"),
    ("pi towards mistral", {"x-affinity": "m"}, {}, "x-affinity", "m"),
    ("pi responses", {}, {"prompt_cache_key": "p"}, "prompt_cache_key", "p"),
    ("cline openrouter", {}, {"session_id": "s"}, "session_id (body)", "s"),
    ("qwen", {}, {"metadata": {"sessionId": "q", "promptId": "z"}}, "metadata.sessionId", "q"),
    (
        "claude legacy",
        {},
        {"metadata": {"user_id": f"user_{HEX}_account__session_{UUID}"}},
        "metadata.user_id",
        UUID,
    ),
    (
        "claude with account",
        {},
        {"metadata": {"user_id": f"user_{HEX}_account_{UUID}_session_{UUID}"}},
        "metadata.user_id",
        UUID,
    ),
    (
        "claude json",
        {},
        {"metadata": {"user_id": json.dumps({"device_id": HEX, "session_id": UUID})}},
        "metadata.user_id",
        UUID,
    ),
    (
        "header before body",
        {"x-affinity": "h"},
        {"prompt_cache_key": "b", "session_id": "c"},
        "x-affinity",
        "h",
    ),
]


@pytest.mark.parametrize(("name", "headers", "body", "source", "value"), BY_RULE)
def test_rule(name, headers, body, source, value) -> None:
    assert find_signal(headers, msgspec.convert(body, BodyHints)) == Signal(value, source)


def test_headers_are_asked_in_the_documented_order() -> None:
    headers = {name: f"value of {name}" for name in HEADERS}
    for name in HEADERS:
        assert find_signal(headers, BodyHints()).source == name
        del headers[name]
    assert find_signal(headers, BodyHints()).source is None


def test_request_id_of_an_sdk_is_no_session() -> None:
    assert find_signal({"x-client-request-id": "r"}, BodyHints()) == Signal(None, None)


@pytest.mark.parametrize("value", ["x" * 257, "a\x00b", "tab\there", "new\nline", "\x7f", "\u202e"])
def test_value_outside_the_limits_is_ignored_and_named_and_the_next_one_counts(value) -> None:
    headers = {"x-session-affinity": value, "x-session-id": "good"}
    assert find_signal(headers, BodyHints()) == Signal(
        "good", "x-session-id", ("x-session-affinity",)
    )


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": "text"},
        {"metadata": ["list"]},
        {"metadata": {"user_id": 7, "sessionId": None}},
        {"metadata": {"user_id": "somebody"}},
        {"metadata": {"user_id": "{broken"}},
        {"metadata": {"user_id": "[1]"}},
        {"metadata": {"user_id": '{"session_id": 5}'}},
        {"prompt_cache_key": 5, "session_id": {"a": 1}},
    ],
)
def test_any_json_in_the_hints_is_tolerated(body) -> None:
    assert find_signal({}, msgspec.convert(body, BodyHints)).value is None


@given(st.text(max_size=400))
def test_user_id_never_raises_and_usable_means_the_limits(text) -> None:
    session_of_user_id(text)
    session_of_user_id("{" + text)
    assert is_usable(text) == (1 <= len(text) <= 256 and text.isprintable())


@given(st.tuples(*[st.text(max_size=8)] * 3), st.tuples(*[st.text(max_size=8)] * 3))
def test_scope_digest_separates_tenant_model_and_value(left, right) -> None:
    def digest(parts: tuple[str, ...]) -> bytes:
        return scoped_digest(tenant=parts[0], model=parts[1], value=parts[2])

    assert (digest(left) == digest(right)) == (left == right)
    assert len(digest(left)) == 16
