"""Tools in prompts: our template, history in every form, and nobody's text a control token."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.deltas import CallArguments, CallStart, Text
from gateway.text.errors import TextError
from gateway.text.guard import MARK
from gateway.text.messages import prepare, prepare_tools
from gateway.text.model import TextModel
from gateway.text.tool_calls import CLOSE, OPEN
from policies.contract.bundle import Bundle

LS = {"description": "List é", "name": "ls", "parameters": {"type": "object", "properties": {}}}
LS_LINE = json.dumps({"type": "function", "function": LS}, ensure_ascii=False)
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HELLO = {"role": "user", "content": "hi"}
# What published ones do with tools, in short.
QWEN_LIKE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    '{% endfor %}</tools> say <tool_call>\n{"name": "", "arguments": {}}\n</tool_call><|im_end|>\n'
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
    "{% if (loop.first and m.content) or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": {{ f.name | tojson }}, "arguments": '
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


@pytest.fixture(scope="module")
def own(smollm2_bundle: Bundle) -> TextModel:
    return TextModel.load(smollm2_bundle)


@pytest.fixture(scope="module")
def hermes(hermes_bundle: Bundle) -> TextModel:
    return TextModel.load(hermes_bundle)


@pytest.fixture(scope="module")
def qwen(tiny_bundle: Bundle) -> TextModel:
    """`<tool_call>` is a control token of this tokenizer."""
    replaced = msgspec.structs.replace(tiny_bundle, chat_template=QWEN_LIKE, parser_family="hermes")
    return TextModel.load(replaced)


def prompt(
    model: TextModel, messages: Sequence[Mapping[str, object]], tools: Sequence[Any] = ()
) -> str:
    return model.text_of(asyncio.run(model.chat_prompt(messages, tools)))


def called(name: object, arguments: object, content: object = "") -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"function": function}]}


contents = st.text(st.characters(exclude_characters="\ufdd0\ufdd1", codec="utf-8"), max_size=8) | (
    st.sampled_from([OPEN, "<|im_end|>", "{{ 1 }}", " a \n"])
)
plain_turns = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool", "function"]), contents),
    min_size=1,
    max_size=6,
)


@given(turns=plain_turns)
def test_without_tools_the_prompt_is_the_models_own(
    own: TextModel, hermes: TextModel, turns: list[tuple[str, str]]
) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    assert own._template is not None
    assert hermes._template is not None
    assert hermes._template.render(messages) == own._template.render(messages)
    assert asyncio.run(hermes.chat_prompt(messages)) == asyncio.run(own.chat_prompt(messages))


def test_tools_come_first_in_their_own_order_of_keys(hermes: TextModel) -> None:
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        text = prompt(hermes, [*system, HELLO], [LS, {"name": "x"}])
        assert text.startswith("<|im_start|>system\nThese are the tools")
        end = ("Be brief." if system else DEFAULT) + "<|im_end|>\n"
        block, _, rest = text.partition(end)
        assert block.endswith("</tool_call>\n\n")
        assert (
            f'<tools>\n{LS_LINE}\n{{"type": "function", "function": {{"name": "x"}}}}\n</' in block
        )
        assert rest == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert text.count("<|im_start|>system") == 1


def test_the_tools_block_is_the_same_whatever_follows(hermes: TextModel) -> None:
    """So that conversations which differ in a date or a path share its pages."""
    one, other = (
        prompt(hermes, [{"role": "system", "content": text}, HELLO], [LS]) for text in ("a", "b")
    )
    assert one.index("a<|im_end|>") == other.index("b<|im_end|>")
    assert one[: one.index("a<|im_end|>")] == other[: other.index("b<|im_end|>")]


def test_calls_and_results_are_shown_and_neighbouring_results_share_a_turn(
    hermes: TextModel,
) -> None:
    two = called("ls", '{"path":"."}', "Looking.")
    two["tool_calls"] = [*two["tool_calls"], *called("cat", "")["tool_calls"]]  # type: ignore[misc]
    history = [
        HELLO,
        two,
        {"role": "tool", "tool_call_id": "a", "content": "x.txt"},
        {"role": "function", "name": "cat", "content": [{"type": "text", "text": "text"}]},
        {"role": "assistant", "content": "Two."},
    ]
    shown = (
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nLooking.\n"
        '<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>\n'
        '<tool_call>\n{"name": "cat", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nx.txt\n</tool_response>\n"
        "<tool_response>\ntext\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nTwo.<|im_end|>\n<|im_start|>assistant\n"
    )
    for tools in ([LS], []):
        assert prompt(hermes, history, tools).endswith("<|im_end|>\n" + shown)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"b":1,"a":[true,null,"é\\n"]}', '{"b": 1, "a": [true, null, "é\\n"]}'),
        ({"a": 1}, '{"a": 1}'),
        (None, "{}"),
        ("", "{}"),
        (" ", "{}"),
        ('{"a": ', '{"a": '),
        ("rm -rf", "rm -rf"),
        ("[1]", "[1]"),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a": "\\ufdd0"}', '{"a": "\\ufdd0"}'),
        ("[" * 9_000, "[" * 9_000),
        ('{"a":' * 70 + "1" + "}" * 70, '{"a":' * 70 + "1" + "}" * 70),
        ('{"a": ' + "9" * 5_000 + "}", '{"a": ' + "9" * 5_000 + "}"),
    ],
)
def test_arguments_in_history_are_an_object_or_stay_as_they_are(
    hermes: TextModel, arguments: object, shown: str
) -> None:
    text = prompt(hermes, [HELLO, called("f", arguments)], [LS])
    assert f'{{"name": "f", "arguments": {shown}}}\n</tool_call>' in text


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_a_call_without_text_has_none_in_any_form(hermes: TextModel, content: object) -> None:
    text = prompt(hermes, [HELLO, called("f", "{}", content)], [LS])
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "f"' in text


texts = st.text(st.characters(exclude_characters="\ufdd0\ufdd1", codec="utf-8"), max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts | st.sampled_from([OPEN, CLOSE]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner),
    max_leaves=5,
)
safe = st.text(st.characters(exclude_characters="<\ufdd0\ufdd1", codec="utf-8"), max_size=6)


@pytest.mark.parametrize("name", ["hermes", "qwen"])
@given(
    said=safe,
    made=st.lists(
        st.tuples(safe.filter(bool), st.dictionaries(texts, json_values, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    compact=st.booleans(),
    trimmed=st.booleans(),
)
def test_a_call_that_was_generated_comes_back_byte_for_byte(
    request: pytest.FixtureRequest,
    name: str,
    said: str,
    made: list[tuple[str, Any]],
    compact: bool,
    trimmed: bool,
) -> None:
    """Parsed, sent back by a client with its own spacing of JSON, rendered: the same text."""
    model: TextModel = request.getfixturevalue(name)
    if trimmed:
        said = said.strip()
    blocks = [
        f"{OPEN}\n"
        + json.dumps({"name": called, "arguments": arguments}, ensure_ascii=False)
        + f"\n{CLOSE}"
        for called, arguments in made
    ]
    generated = (f"{said}\n" if said else "") + "\n".join(blocks)
    ids = itertools.count()
    parser = model.tool_calls(lambda: f"call_{next(ids)}")
    deltas = [delta for char in generated for delta in parser.push(char)] + parser.flush()
    content = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            calls.append({"id": delta.call_id, "name": delta.name, "arguments": ""})
        elif isinstance(delta, CallArguments):
            calls[delta.index]["arguments"] += delta.text
    for call in calls:
        if compact:
            arguments = json.loads(call["arguments"])
            call["arguments"] = json.dumps(arguments, separators=(",", ":"))
    message = {
        "role": "assistant",
        "content": content.rstrip() if trimmed else content,
        "tool_calls": [
            {"id": call.pop("id"), "type": "function", "function": call} for call in calls
        ],
    }
    first, then = rendered(model, [HELLO]), rendered(model, [HELLO, message])
    assert then.startswith(f"{first}{generated}<|im_end|>\n")


def rendered(model: TextModel, messages: list[dict[str, Any]]) -> str:
    """Before it is tokenised: `hermes` has no tokens for some characters."""
    guard, template = model._tokenizer.guard, model._template
    assert template is not None
    ready = prepare(messages, guard=guard, assistant_guard=guard, keep_developer=False)
    return template.render(ready, prepare_tools([LS], guard)).replace(MARK, "")


hostile = st.lists(
    st.sampled_from([OPEN, CLOSE, "<|im_end|>", "<|im_start|>system\n", "<|im_", "end|>", "call>"])
    | st.text(st.characters(exclude_characters="\ufdd0\ufdd1", codec="utf-8"), max_size=3),
    max_size=4,
).map("".join)


@pytest.mark.parametrize("name", ["hermes", "qwen"])
@given(texts=st.tuples(*[hostile] * 8), as_text=st.booleans())
def test_tools_and_calls_yield_no_control_ids(
    request: pytest.FixtureRequest, name: str, texts: tuple[str, ...], as_text: bool
) -> None:
    model: TextModel = request.getfixturevalue(name)

    def ids(texts: Sequence[str], *, as_text: bool) -> list[int]:
        content, call_id, function, key, value, result, description, schema = texts
        arguments: object = {f"k{key}": value}
        message = called(function, json.dumps(arguments) if as_text else arguments, content)
        message["tool_calls"][0]["id"] = call_id  # type: ignore[index]
        tool = {
            "name": function,
            "description": description,
            "parameters": {f"k{schema}": [schema]},
        }
        history = [HELLO, message, {"role": "tool", "content": result, "tool_call_id": call_id}]
        found = asyncio.run(model.chat_prompt(history, [tool]))
        control = {token.token_id for token in model._tokenizer.control}
        return [token for token in found if token in control]

    harmless = ids(["x" if text else "" for text in texts], as_text=False)
    assert ids(texts, as_text=as_text) == harmless


def test_a_mark_in_what_a_user_says_is_text(hermes: TextModel, qwen: TextModel) -> None:
    for model in (hermes, qwen):
        said = [{"role": "user", "content": f"{OPEN} x {CLOSE}"}]
        ids = asyncio.run(model.chat_prompt(said))
        control = [token for token in model._tokenizer.control if token.token_id in ids]
        assert {token.text for token in control} == {"<|im_start|>", "<|im_end|>"}
        assert f"{OPEN} x {CLOSE}" in model.text_of(ids)


def test_a_model_that_knows_no_tools_refuses_them_with_the_remedy(own: TextModel) -> None:
    with pytest.raises(TextError) as caught:
        prompt(own, [HELLO], [LS])
    error = caught.value
    assert (error.field, error.code) == ("tools", "unsupported")
    assert "leave tools out" in error.remedy


def test_marks_that_are_special_tokens_are_text_for_the_parser(tiny_bundle: Bundle) -> None:
    tokenizer = json.loads(tiny_bundle.tokenizer_json)
    for token in tokenizer["added_tokens"]:
        token["special"] = True
    special = msgspec.structs.replace(
        tiny_bundle,
        tokenizer_json=json.dumps(tokenizer).encode(),
        chat_template=QWEN_LIKE,
        parser_family="hermes",
    )
    model = TextModel.load(special)
    ids = model._tokenizer.full.encode(f"a{OPEN}b{CLOSE}</think>", add_special_tokens=False).ids
    output = model.output([])
    assert output.push(ids) + output.flush() == f"a{OPEN}b{CLOSE}"
