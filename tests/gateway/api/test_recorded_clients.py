"""What real harnesses sent, sent again: chat requests pass, and what is not yet there is named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

FILES = [
    "ai-sdk.json",
    "openai-js.json",
    "openai-py.json",
    "opencode-cf.json",
    "opencode.json",
    "pi-affinity.json",
    "pi.json",
]
HOP = {"host", "connection", "content-length", "authorization", "accept-encoding"}


def chats(shared: Path, file: str) -> list[dict[str, Any]]:
    requests = json.loads((shared / "clients" / file).read_text())["requests"]
    return [r for r in requests if r["path"] == "/v1/chat/completions"]


@pytest.mark.parametrize("file", FILES)
def test_chat_requests_of_recorded_clients_are_answered(gateway, shared, file) -> None:
    found = chats(shared, file)
    assert found
    with gateway.client() as client:
        for request in found:
            body = copy.deepcopy(request["body"])
            body["model"] = "tiny"
            headers = {n: v for n, v in request["headers"] if n.lower() not in HOP}
            if body.get("tools"):
                refused = client.post(request["path"], json=body, headers=headers)
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "tools"
                body["tool_choice"] = "none"
            reply = client.post(request["path"], json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            assert reply.text.endswith("data: [DONE]\n\n")
            assert '"prompt_tokens_details":{"cached_tokens":' in reply.text


def test_turns_of_one_recorded_session_are_hits(gateway, shared) -> None:
    affinities = []
    with gateway.client() as client:
        for request in chats(shared, "pi-affinity.json"):
            body = {**request["body"], "model": "tiny", "tool_choice": "none"}
            headers = {n: v for n, v in request["headers"] if n.lower() not in HOP}
            headers["x-session-affinity"] += "-this-test"
            reply = client.post(request["path"], json=body, headers=headers)
            affinities.append(reply.headers["x-kagari-affinity"])
    assert affinities == ["new", *["hit"] * (len(affinities) - 1)]


def test_claude_asks_for_the_front_door_first(gateway, shared) -> None:
    request = json.loads((shared / "clients" / "claude.json").read_text())["requests"][0]
    with gateway.client() as client:
        assert client.request(request["method"], request["path"]).status_code == 200


def test_messages_with_null_and_parts_in_every_role(gateway) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "result"}]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "go on"},
    ]
    with gateway.client() as client:
        reply = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    assert reply.status_code == 200, reply.text
    text = gateway.node.served[0].text
    assert "<|im_start|>system\nbe brief<|im_end|>" in text
    assert "result" in text
