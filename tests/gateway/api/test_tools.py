"""Tools on chat: what is accepted, what a client gets, streamed and whole, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

SMOLLM2 = Path(__file__).parents[3] / "policies" / "defaults" / "templates" / "smollm2.jinja"
LS = {
    "type": "function",
    "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "é<"}}\n</tool_call>'
ARGUMENTS = '{"path": "é<"}'


@pytest.fixture(scope="module")
def shared_gateway(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """`tiny` with the default model's template, and `plain`, whose template knows no tools."""
    from scripted_node import make_bundle

    models = {
        "tiny": make_bundle(chat_template=SMOLLM2.read_text(), parser_family="hermes"),
        "plain": make_bundle(),
    }
    start = request.getfixturevalue("start_once")
    with start(tmp_path_factory.mktemp("home"), models=models) as gateway:
        yield gateway


def post(gateway: Any, body: dict[str, Any]) -> Any:
    with gateway.client() as client:
        return client.post("/v1/chat/completions", json=body)


def streamed(gateway: Any, body: dict[str, Any]) -> Any:
    """The whole completion as the official SDK puts its stream together."""
    state = ChatCompletionStreamState()
    with sdk(gateway) as client:
        for chunk in client.chat.completions.create(**body, stream=True):
            state.handle_chunk(chunk)
    return state.get_final_completion()


def sdk(gateway: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="test-key-0123456789abcdef", max_retries=0
    )


def test_a_call_is_told_with_its_id_name_and_arguments(gateway, ask) -> None:
    reply = post(gateway, ask({"say": f"Looking.\n{CALL}"}, tools=[LS]))
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Looking.", "refusal": None}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "ls", "arguments": ARGUMENTS}}


def test_a_call_without_text_has_null_content(gateway, ask) -> None:
    message = post(gateway, ask({"say": CALL}, tools=[LS])).json()["choices"][0]["message"]
    assert message["content"] is None


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("said", [CALL, f"a\n{CALL}\n{CALL}\nb", "no call", "<tool_call>no"])
def test_the_stream_is_the_whole_answer_in_pieces(gateway, ask, step, said) -> None:
    body = ask({"say": said, "step": step}, tools=[LS])
    whole = post(gateway, body).json()["choices"][0]
    choice = streamed(gateway, body).choices[0]
    assert choice.finish_reason == whole["finish_reason"]
    assert (choice.message.content or "") == (whole["message"]["content"] or "")
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in _calls(whole)]
    found = choice.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in found] == told
    assert len({call.id for call in found}) == len(told)
    assert said.count(CALL) == len(told)


def _calls(choice: dict[str, Any]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = choice["message"].get("tool_calls", [])
    return calls


def test_deltas_have_the_shapes_that_clients_expect(gateway, ask) -> None:
    reply = post(gateway, ask({"say": CALL, "step": 1}, tools=[LS], stream=True))
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line[6:7] == "{"]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    start, *more = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert start.pop("id").startswith("call_")
    assert start == {
        "index": 0, "type": "function", "function": {"name": "ls", "arguments": ""},
    }  # fmt: skip
    assert all(set(call) == {"index", "function"} for call in more)
    assert "".join(call["function"]["arguments"] for call in more) == ARGUMENTS
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "<tool_call>" not in reply.text


def test_a_call_cut_by_a_limit_ends_with_length(gateway, ask) -> None:
    for tokens, names in ((40, ["ls"]), (20, [])):
        body = ask({"say": CALL}, tools=[LS], max_tokens=tokens)
        choice = post(gateway, body).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert [call["function"]["name"] for call in _calls(choice)] == names


def test_a_stop_string_inside_a_call_ends_it(gateway, ask) -> None:
    body = ask({"say": f"{CALL}\n{CALL}"}, tools=[LS], stop=['{"path'])
    choice = post(gateway, body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert [call["function"]["arguments"] for call in _calls(choice)] == [""]
    gateway.wait_idle()


def test_each_choice_has_its_own_calls(gateway, ask) -> None:
    choices = post(gateway, ask({"say": f"{CALL}\n{CALL}"}, tools=[LS], n=3)).json()["choices"]
    ids = {call["id"] for choice in choices for call in _calls(choice)}
    assert len(ids) == 6
    assert {choice["finish_reason"] for choice in choices} == {"tool_calls"}


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_without_parallel_calls_the_answer_ends_with_the_first(gateway, ask, step) -> None:
    said = {"say": f"a\n{CALL}\n{CALL}\nb", "step": step}
    body = ask(said, tools=[LS], parallel_tool_calls=False)
    answer = post(gateway, body).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "a"
    assert len(_calls(choice)) == 1
    assert choice["finish_reason"] == "tool_calls"
    first = f"a\n{CALL}".removesuffix("\n</tool_call>")
    assert answer["usage"]["completion_tokens"] == len(first.encode())
    assert len(streamed(gateway, body).choices[0].message.tool_calls or []) == 1
    gateway.wait_idle()


def test_with_log_probabilities_calls_come_too(gateway, ask) -> None:
    body = ask({"say": CALL}, tools=[LS], logprobs=True)
    choice = post(gateway, body).json()["choices"][0]
    streamed_choice = streamed(gateway, body).choices[0]
    assert len(choice["logprobs"]["content"]) == len(CALL.encode())
    assert len(streamed_choice.logprobs.content) == len(CALL.encode())
    assert len(_calls(choice)) == len(streamed_choice.message.tool_calls) == 1
    first = {**body, "parallel_tool_calls": False}
    told = post(gateway, first).json()
    assert len(told["choices"][0]["logprobs"]["content"]) == told["usage"]["completion_tokens"]


def test_the_next_turn_finds_the_pages_of_the_one_before(gateway, ask) -> None:
    """Whichever spacing the client keeps: its history is what was generated."""
    body = ask({"say": f"Looking.\n{CALL}"}, tools=[LS])
    message = post(gateway, body).json()["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), separators=(",", ":"))
    prompt = gateway.node.served[-1].text
    result = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "content": [{"type": "text", "text": "x.txt"}],
    }
    after = {**body, "messages": [*body["messages"], message, result]}
    answer = post(gateway, after)
    assert answer.status_code == 200, answer.text
    assert gateway.node.served[-1].text.startswith(prompt + f"Looking.\n{CALL}<|im_end|>\n")
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) // 2


def test_tools_that_may_not_be_called_are_not_shown(gateway, ask) -> None:
    reply = post(gateway, ask({"say": CALL}, tools=[LS], tool_choice="none"))
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    assert "<tools>" not in gateway.node.served[-1].text


def test_tools_that_run_elsewhere_are_left_out_and_told(gateway, ask) -> None:
    tools = [{"type": "web_search"}, LS, {"type": "é"}, {"type": "custom", "custom": {"name": "x"}}]
    strict = {"type": "function", "function": {"name": "x", "strict": True, "cache_control": 1}}
    reply = post(gateway, ask("hello", tools=[*tools, strict]))
    assert reply.status_code == 200, reply.text
    assert reply.headers.get_list("x-kagari-changed") == [
        "tools dropped: web_search unknown custom",
        "strict true -> false in 1 tools",
    ]
    shown = gateway.node.served[-1].text.partition("<tools>")[2].partition("</tools>")[0]
    assert [json.loads(line)["function"] for line in shown.split("\n") if line] == [
        LS["function"],
        {"name": "x"},
    ]


def test_history_of_every_kind_is_taken(gateway) -> None:
    call = {"id": "functions.ls:0", "type": "function", "function": {"name": "ls"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "hello", "unheard_of": 1},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "x"},
        {"role": "tool", "tool_call_id": "functions.ls:0", "content": "a"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "ls", "arguments": "{"}}]},
        {"role": "tool", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "and"}]},
    ]
    assert post(gateway, {"model": "tiny", "messages": messages}).status_code == 200
    text = gateway.node.served[-1].text
    assert text.count("<tool_call>") == text.count("<tool_response>") == 3


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tool_choice": "required"}, "unsupported", "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "ls"}}},
            "unsupported",
            "tool_choice",
        ),
        ({"tool_choice": "any"}, "invalid_request", "tool_choice"),
        ({"tool_choice": 3}, "invalid_request", "tool_choice"),
        ({"tools": [LS] * 257}, "invalid_request", "tools"),
        ({"tools": [1]}, "invalid_request", "tools[0]"),
        ({"tools": [{}]}, "invalid_request", "tools[0].function"),
        ({"tools": [{"function": 1}]}, "invalid_request", "tools[0].function"),
        ({"tools": [{"function": {}}]}, "invalid_request", "tools[0].function.name"),
        (
            {"tools": [LS, {"function": {"name": "a b"}}]},
            "invalid_request",
            "tools[1].function.name",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": []}}]},
            "invalid_request",
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"function": {"name": "a", "description": 1}}]},
            "invalid_request",
            "tools[0].function.description",
        ),
        ({"functions": [{"name": "f"}]}, "unsupported", "functions"),
        ({"function_call": {"name": "f"}}, "unsupported", "function_call"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "unsupported",
            "response_format.type",
        ),
        ({"parallel_tool_calls": "no"}, "invalid_request", "parallel_tool_calls"),
        ({"model": "plain"}, "unsupported", "tools"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(gateway, ask, fields, code, param) -> None:
    reply = post(gateway, {**ask("hello", tools=[LS]), **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["remedy"]
    assert not gateway.node.served


def test_tokenize_counts_tools_as_a_chat_does(gateway, ask) -> None:
    body = ask("hello", tools=[{"type": "web_search"}, LS])
    with gateway.client() as client:
        counted = client.post("/tokenize", json=body)
        beside = client.post("/tokenize", json={"model": "tiny", "prompt": "x", "tools": [LS]})
    assert counted.json()["count"] == post(gateway, body).json()["usage"]["prompt_tokens"]
    assert counted.headers["x-kagari-changed"] == "tools dropped: web_search"
    assert beside.json()["error"]["param"] == "tools"


def test_models_say_whether_they_speak_tools(gateway) -> None:
    with gateway.client() as client:
        listed = client.get("/v1/models").json()["data"]
    assert {model["id"]: model["kagari"]["tools"] for model in listed} == {
        "tiny": True, "tiny-alias": True, "plain": False,
    }  # fmt: skip
