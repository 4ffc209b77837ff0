"""The same request streamed and not: the same text, ends, usage, log probabilities, or refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.ledger.files import LEDGER_NAME
from gateway.ledger.verify import verify
from tests.gateway.api.conftest import KEY, FuzzCount, RunningGateway, scripted_node
from tests.gateway.api.wire_client import Answer, Cuts, WireClient, strict_json

FEW, MANY = 150, 5_000  # cases of each route; each case is two requests

# As in test_hostile_bodies.py.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

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
LANES = TEXTS.map(scripted_node.ids_of) | st.lists(st.integers(0, 257), max_size=24)


@st.composite
def scripts(draw: Any) -> dict[str, Any]:
    """What a node says, in which frames. Now and then it fails."""
    script: dict[str, Any] = {
        "ids": draw(st.lists(LANES, min_size=1, max_size=3)),
        "step": draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)),
    }
    if draw(st.integers(0, 19)) == 0:
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
        "max_tokens": st.integers(1, 24),
        "min_tokens": st.integers(0, 1),
        "stop": stops,
        "seed": st.integers(0, 9),
        "usage": st.just({"include": True}),
        "ignore_eos": st.booleans(),
    }
    return draw(st.fixed_dictionaries({"temperature": st.just(0)}, optional=optional))


def spelled(script: dict[str, Any], number: int = 0) -> str:
    """A script whose first page is its own, so that what is cached depends on no other; `<` is
    escaped, because a control token would end the message that it stands in."""
    return json.dumps({str(number): 0} | script).replace("<", "\\u003c")


@st.composite
def chats(draw: Any) -> dict[str, Any]:
    script = draw(scripts())
    body = {"model": "tiny", "messages": [{"role": "user", "content": spelled(script)}]}
    if draw(st.booleans()):
        body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 3))}
    return body | draw(wishes(script))


@st.composite
def completions(draw: Any) -> dict[str, Any]:
    several = draw(st.lists(scripts(), min_size=1, max_size=3))
    notes = draw(TEXTS)
    prompts: list[Any] = [
        json.dumps({str(number): 0, "note": notes} | script, ensure_ascii=False)
        for number, script in enumerate(several)
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
    *events, done = [event for event in answer.events()]
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
    return {"choices": [choices[index] for index in sorted(choices)], "usage": last["usage"]}


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


def plain(whole: dict[str, Any]) -> dict[str, Any]:
    """Of a choice without a token that is told, a stream has no empty lists to show."""
    for choice in whole["choices"]:
        told = choice["logprobs"]
        if told is not None and not any(told.values()):
            choice["logprobs"] = None
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
        gateway.node.resident.clear()
        gateway.node.served.clear()
        fields = body | {"stream": stream, "stream_options": {"include_usage": True}}
        data = json.dumps(fields).encode()
        answers[stream] = client.ask(path, data, cuts=cuts)
    whole, stream = answers[False], answers[True]
    assert failure_of(stream) == failure_of(whole), (stream, whole)
    if failure_of(whole) is None:
        assert assembled(stream) == plain(whole.json())


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[WireClient]:
    with closing(WireClient(gateway.port, KEY)) as opened:
        yield opened
    gateway.wait_idle()
    assert [line for line in gateway.log_lines() if line["event"] == "handler_failed"] == []
    checked = verify(gateway.services.home.folder / LEDGER_NAME)
    assert (checked.problems, checked.open_rows) == ((), 0)


SIZES = st.just(()) | st.lists(st.integers(1, 200), min_size=1, max_size=4)
CUTS = st.builds(lambda sends, reads: Cuts(sends=sends, reads=reads), SIZES, SIZES)
BODY_BY_PATH = {"/v1/chat/completions": chats(), "/v1/completions": completions()}


def run(gateway: RunningGateway, client: WireClient, path: str, *, cases: int) -> int:
    """How many cases were run."""
    count = 0

    @settings(max_examples=cases, deadline=None, suppress_health_check=QUIET, database=None)
    @given(case=st.tuples(BODY_BY_PATH[path], CUTS, st.booleans()))
    def compare(case: tuple[Any, ...]) -> None:
        nonlocal count
        count += 1
        check(gateway, client, path, case)

    compare()
    return count


@pytest.mark.parametrize("path", BODY_BY_PATH)
def test_a_stream_tells_what_the_whole_tells(
    gateway: RunningGateway, client: WireClient, path: str
) -> None:
    run(gateway, client, path, cases=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("path", BODY_BY_PATH)
def test_a_stream_tells_what_the_whole_tells_at_length(
    gateway: RunningGateway, client: WireClient, path: str, fuzz_count: FuzzCount
) -> None:
    cases = run(gateway, client, path, cases=MANY)
    assert cases >= MANY
    fuzz_count.add(f"stream equals whole: {path}", cases)
