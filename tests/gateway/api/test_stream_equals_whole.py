"""The same request streamed and not: the same text, ends, usage, log probabilities, or refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.gateway.api.conftest import KEY, FuzzCount, RunningGateway, run_cases, scripted_node
from tests.gateway.api.wire_client import Answer, Cuts, WireClient, strict_json

FEW, MANY = 70, 5_000  # cases of each route; each case is two requests

# As in test_hostile_bodies.py.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

PIECES = [
    "the end",
    "é",
    "🙂",
    "👩‍👩‍👧‍👦",
    "e\u0301\u0301",
    "\u202eabc\u2069",
    "\0\x1b",
    "\u2028\r\n\r\n",
    "data: [DONE]\n\n",
    "<|im_end|>",
    "<|im_start|>",
    "<|im_",
    "\ufdd0\ufffd\uffff",
    '"}]}\\',
    "\n\n",
    " ",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=5).map("".join)
ARGUMENTS = [
    "{}",
    '{"path": "é<", "深": [1, -0.5e3, null]}',
    r'"{\"path\": \"\ud83d\ude42\"}"',
    r'{"lone": "\ud800", "a": "\u0000</tool_call>"}',
    '{"a": {"b": [[{"c": "\n"}]]}}',
    "[1, 2",
    '{"a": 01}',
    "null",
    "",
]
CALLS = st.builds(
    "{}<tool_call>{}{{{}: {}, {}: {}}}{}</tool_call>{}".format,
    st.sampled_from(["", "\n", " \n\n", "<"]),
    st.sampled_from(["", "\n", " "]),
    st.sampled_from([*['"name"'] * 6, '"nom"', "name"]),
    st.sampled_from([*['"ls"', '"é🙂"', r'"\ud83d\ude42"', r'"\udc00"'] * 2, '""', "7"]),
    st.sampled_from([*['"arguments"', '"parameters"'] * 3, '"x"']),
    st.sampled_from(ARGUMENTS),
    st.sampled_from(["", "\n", "}"]),
    st.sampled_from(["", "\n", " x"]),
)
WITH_CALLS = st.lists(CALLS | st.sampled_from([*PIECES, "<tool_call>", "</tool_call>"]), max_size=3)
LANES = TEXTS.map(scripted_node.ids_of) | st.lists(st.integers(0, 257), max_size=24)
CALLING_LANES = WITH_CALLS.map("".join).map(scripted_node.ids_of)
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]


@st.composite
def scripts(draw: Any, lanes: st.SearchStrategy[list[int]] = LANES) -> dict[str, Any]:
    """What a node says, in which frames. Now and then it fails."""
    script: dict[str, Any] = {
        "forget": True,  # what is cached would differ between the two answers
        "ids": draw(st.lists(lanes, min_size=1, max_size=3)),
        "step": draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)),
    }
    if draw(st.integers(0, 19)) == 7:
        script["fail"] = draw(st.sampled_from(["engine_error", "engine_full", "pool_too_small"]))
        script["fail_after"] = draw(st.integers(0, 8))
    return script


@st.composite
def wishes(draw: Any, script: dict[str, Any]) -> dict[str, Any]:
    """Fields that chat and completions share; stop strings that often are in what is said."""
    said = scripted_node.TOKENIZER.decode(script["ids"][0])
    places = st.integers(0, max(0, len(said) - 1))
    cut_out = st.tuples(places, st.integers(1, 5)).map(lambda at: said[at[0] : at[0] + at[1]])
    stops = st.lists((cut_out | TEXTS).map(lambda text: text[:20] or "z"), max_size=3)
    optional = {
        "n": st.integers(1, 4),
        "max_tokens": st.integers(1, 24) | st.integers(60, 200),
        "min_tokens": st.integers(0, 1),
        "stop": stops if draw(st.booleans()) else st.none(),
        "seed": st.integers(0, 9),
        "usage": st.just({"include": True}),
        "ignore_eos": st.booleans(),
    }
    return draw(st.fixed_dictionaries({"temperature": st.just(0)}, optional=optional))


def spelled(script: dict[str, Any]) -> str:
    """`<` is escaped: a control token would end the message that it stands in."""
    return json.dumps(script).replace("<", "\\u003c")


@st.composite
def chats(draw: Any) -> dict[str, Any]:
    has_tools = draw(st.booleans())
    script = draw(scripts(CALLING_LANES if has_tools else LANES))
    body = {"model": "tiny", "messages": [{"role": "user", "content": spelled(script)}]}
    if draw(st.booleans()):
        body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 3))}
    if has_tools:
        body |= {"model": "caller", "tools": TOOLS, "parallel_tool_calls": draw(st.booleans())}
    return body | draw(wishes(script))


@st.composite
def completions(draw: Any) -> dict[str, Any]:
    several = draw(st.lists(scripts(), min_size=1, max_size=3))
    notes = draw(TEXTS)
    prompts: list[Any] = [
        json.dumps({"note": notes} | script, ensure_ascii=False) for script in several
    ]
    if draw(st.booleans()):
        prompts = [scripted_node.ids_of(prompt) for prompt in prompts]
    body: dict[str, Any] = {"model": "tiny", "prompt": prompts}
    if draw(st.booleans()):
        body["logprobs"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        body["echo"] = True
    body |= draw(wishes(several[0]))
    if "echo" in body and draw(st.integers(0, 3)) == 0:
        body |= {"max_tokens": 0, "min_tokens": 0}
    return body


# --- what is compared ---------------------------------------------------------------------------


def assembled(answer: Answer) -> dict[str, Any]:
    """A stream as the whole that it tells of."""
    *events, done = answer.events()
    assert done == b"[DONE]"
    chunks = [strict_json(event) for event in events]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"]})
            assert choice.get("finish_reason") is None, "nothing comes after the end"
            add_part(choice, part)
    for choice in choices.values():
        message = choice.get("message", {})
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            without_ids(message["tool_calls"])
    return {"choices": [choices[index] for index in sorted(choices)], "usage": last["usage"]}


def without_ids(calls: list[dict[str, Any]]) -> None:
    """They are drawn for each answer; no two are the same."""
    ids = [call.pop("id") for call in calls]
    assert len(set(ids)) == len(ids)


def add_part(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["finish_reason"] = part["finish_reason"]
    told = choice.setdefault("logprobs", None)
    if part["logprobs"] is not None:
        told = {name: (told or {}).get(name) or [] for name in part["logprobs"]}
        for name, column in part["logprobs"].items():
            told[name] = told[name] + column if column is not None else None
        choice["logprobs"] = told
    if "text" in part:
        choice["text"] = choice.get("text", "") + part["text"]
        return
    delta = part["delta"]
    message = choice.setdefault("message", {"content": "", "refusal": None})
    if "role" in delta:
        assert "role" not in message, "the role comes once"
        message["role"] = delta["role"]
    assert "role" in message, "the role comes first"
    message["content"] += delta.get("content") or ""
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        function = piece["function"]
        if "id" in piece:
            assert piece["index"] == len(calls)
            started = {"id": piece["id"], "type": piece["type"]}
            calls.append(started | {"function": {"name": function["name"], "arguments": ""}})
        calls[piece["index"]]["function"]["arguments"] += function["arguments"]


def plain(whole: dict[str, Any]) -> dict[str, Any]:
    """Of a choice without a token that is told, a stream has no empty lists to show."""
    for choice in whole["choices"]:
        told = choice["logprobs"]
        if told is not None and not any(told.values()):
            choice["logprobs"] = None
        without_ids(choice.get("message", {}).get("tool_calls", []))
    return {"choices": whole["choices"], "usage": whole["usage"]}


def failure_of(answer: Answer) -> str | None:
    """The code of a refusal, or of the event that a stream breaks off with."""
    last = strict_json(answer.events()[-1]) if answer.is_stream and not is_done(answer) else None
    error = answer.json() if answer.status != 200 else last
    return None if error is None else error["error"]["code"]


def is_done(answer: Answer) -> bool:
    return answer.body.endswith(b"data: [DONE]\n\n")


def check(gateway: RunningGateway, client: WireClient, path: str, case: tuple[Any, ...]) -> None:
    body, cuts, streamed_first = case
    answers: dict[bool, Answer] = {}
    for stream in (streamed_first, not streamed_first):
        gateway.node.served.clear()
        fields = body | {"stream": stream, "stream_options": {"include_usage": True}}
        data = json.dumps(fields).encode()
        answers[stream] = client.ask(path, data, cuts=cuts)
    whole, stream = answers[False], answers[True]
    assert failure_of(stream) == failure_of(whole), (stream, whole)
    if failure_of(whole) is None:
        assert assembled(stream) == plain(whole.json())


@pytest.fixture(scope="module")
def shared_gateway(shared_caller_gateway: RunningGateway) -> RunningGateway:
    return shared_caller_gateway


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[WireClient]:
    with closing(WireClient(gateway.port, KEY)) as opened:
        yield opened
    gateway.wait_settled()


SIZES = st.just(()) | st.lists(st.integers(1, 200), min_size=1, max_size=4)
CUTS = st.builds(lambda sends, reads: Cuts(sends=sends, reads=reads), SIZES, SIZES)
BODY_BY_PATH = {"/v1/chat/completions": chats(), "/v1/completions": completions()}


def run(gateway: RunningGateway, client: WireClient, path: str, *, count: int) -> int:
    cases = st.tuples(BODY_BY_PATH[path], CUTS, st.booleans())
    return run_cases(cases, partial(check, gateway, client, path), count=count)


@pytest.mark.parametrize("path", BODY_BY_PATH)
def test_a_stream_tells_what_the_whole_tells(
    gateway: RunningGateway, client: WireClient, path: str
) -> None:
    run(gateway, client, path, count=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("path", BODY_BY_PATH)
def test_a_stream_tells_what_the_whole_tells_at_length(
    gateway: RunningGateway, client: WireClient, path: str, fuzz_count: FuzzCount
) -> None:
    checked = run(gateway, client, path, count=MANY)
    assert checked >= MANY
    fuzz_count.add(f"stream equals whole: {path}", checked)
