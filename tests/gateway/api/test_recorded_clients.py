"""Recorded requests of real clients, replayed: each gets its calls, and turn 2 from the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import Stream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

KEY = "test-key-0123456789abcdef"
SMOLLM2 = Path(__file__).parents[3] / "policies" / "defaults" / "templates" / "smollm2.jinja"
CHATS = ["opencode", "opencode-cf", "pi", "pi-affinity", "openai-py", "openai-js", "ai-sdk"]
# What each of them sends of its own accord, or as its set-up says.
SESSIONS = {"opencode", "opencode-cf", "pi-affinity", "openai-py", "openai-js", "ai-sdk"}


@pytest.fixture(scope="module")
def shared_gateway(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """`tiny` with the default model's template."""
    from scripted_node import make_bundle

    models = {"tiny": make_bundle(chat_template=SMOLLM2.read_text(), parser_family="hermes")}
    start = request.getfixturevalue("start_once")
    with start(tmp_path_factory.mktemp("home"), models=models) as gateway:
        yield gateway


def recorded(shared: Path, client: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads(
        (shared / "clients" / f"{client}.json").read_text()
    )["requests"]
    return [one for one in requests if one["method"] == "POST"]


def replayed(gateway: Any, one: dict[str, Any]) -> Any:
    """The answer as the official SDK puts it together, and the head of the response."""
    headers = {
        name: value
        for name, value in one["headers"]
        if name.lower().startswith(("x-", "session", "user-agent"))
    }
    state = ChatCompletionStreamState()
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        chunks = client.post(
            "/chat/completions",
            body={**one["body"], "model": "tiny", "stream": True},
            options={"headers": headers},
            cast_to=ChatCompletionChunk,
            stream=True,
            stream_cls=Stream[ChatCompletionChunk],
        )
        for chunk in chunks:
            state.handle_chunk(chunk)
    return state.get_final_completion(), chunks.response.headers


@pytest.mark.parametrize("client", CHATS)
def test_a_recorded_chat_gets_its_call_and_its_next_turn_comes_from_cache(
    gateway, shared, client
) -> None:
    turns = [one for one in recorded(shared, client) if "tools" in one["body"]]
    first, second = turns
    call = second["body"]["messages"][-2]["tool_calls"][0]["function"]
    body = {"name": call["name"], "arguments": json.loads(call["arguments"])}
    said = f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
    gateway.node.rules[:] = [("<tool_response>", {"say": "Done."}), ("<tools>", {"say": said})]

    answer, head = replayed(gateway, first)
    assert answer.choices[0].finish_reason == "tool_calls"
    (found,) = answer.choices[0].message.tool_calls
    assert found.function.name == call["name"]
    assert json.loads(found.function.arguments) == json.loads(call["arguments"])
    assert answer.usage.completion_tokens == len(said.encode())
    # Not always new: set-ups of one client were recorded with the same made-up session.
    assert (head["x-kagari-affinity"] in ("new", "hit")) == (client in SESSIONS)

    prompt = gateway.node.served[-1].text
    answer, head = replayed(gateway, second)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "Done."
    assert answer.usage.prompt_tokens_details.cached_tokens > 0.9 * answer.usage.prompt_tokens - 600
    assert head["x-kagari-affinity"] == ("hit" if client in SESSIONS else "none")
    # All of turn 1 and what was said in it is the beginning of turn 2.
    assert gateway.node.served[-1].text.startswith(f"{prompt}{said}<|im_end|>\n")


@pytest.mark.parametrize("client", CHATS)
def test_every_recorded_chat_is_answered_whole_too(gateway, shared, client) -> None:
    gateway.node.rules[:] = []
    for one in recorded(shared, client):
        with gateway.client() as plain:
            reply = plain.post(
                "/v1/chat/completions", json={**one["body"], "model": "tiny", "stream": False}
            )
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    ("client", "route"), [("codex", "/v1/responses"), ("claude", "/v1/messages")]
)
def test_routes_of_other_dialects_are_answered_with_a_clear_error(
    gateway, shared, client, route
) -> None:
    for one in recorded(shared, client):
        with gateway.client() as plain:
            reply = plain.post(one["path"], json=one["body"])
        assert one["path"].startswith(route)
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert error["code"] == "not_found"
        assert error["remedy"] == "did you mean /v1/chat/completions?"
