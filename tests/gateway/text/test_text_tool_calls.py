"""The tool-call parser: calls as they come, any chunking alike, nothing lost that was no call."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.deltas import CallArguments, CallStart, Delta, Text
from gateway.text.json_scan import MAX_DEPTH
from gateway.text.tool_calls import (
    CLOSE,
    MAX_FRAME_CHARS,
    MAX_HELD_CHARS,
    OPEN,
    ToolCallParser,
)


def parser() -> ToolCallParser:
    numbers = itertools.count()
    return ToolCallParser(lambda: f"call_{next(numbers)}")


def joined(deltas: list[Delta]) -> list[Delta]:
    """What a client has in the end: neighbours of a kind are one."""
    whole: list[Delta] = []
    for delta in deltas:
        last = whole[-1] if whole else None
        if isinstance(delta, Text) and isinstance(last, Text):
            whole[-1] = Text(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments):
            assert delta.index == last.index
            whole[-1] = CallArguments(delta.index, last.text + delta.text)
        else:
            whole.append(delta)
    return whole


def parse(*chunks: str) -> tuple[list[Delta], int]:
    one = parser()
    deltas = [delta for chunk in chunks for delta in one.push(chunk)]
    return joined(deltas + one.flush()), one.calls


def call(index: int, name: str, arguments: str) -> list[Delta]:
    return [CallStart(index, f"call_{index}", name), CallArguments(index, arguments)]


def hermes(name: str, arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


LS = hermes("ls", {"path": "."})
LS_ARGUMENTS = '{"path": "."}'

FORMS: dict[str, tuple[str, list[Delta], int]] = {
    "text alone": ("1 < 2 <tool\n", [Text("1 < 2 <tool\n")], 0),
    "a call alone": (LS, call(0, "ls", LS_ARGUMENTS), 1),
    "text before": (f"Let me see.\n{LS}", [Text("Let me see."), *call(0, "ls", LS_ARGUMENTS)], 1),
    "text after": (f"{LS}\n\nDone.", [*call(0, "ls", LS_ARGUMENTS), Text("\n\nDone.")], 1),
    "text between": (
        f"{LS}and{LS}",
        [*call(0, "ls", LS_ARGUMENTS), Text("and"), *call(1, "ls", LS_ARGUMENTS)],
        2,
    ),
    "two calls": (f"{LS}\n \n{LS}\n", call(0, "ls", LS_ARGUMENTS) + call(1, "ls", LS_ARGUMENTS), 2),
    "no space at all": (
        OPEN + '{"name":"ls","arguments":{"path":"."}}' + CLOSE,
        call(0, "ls", '{"path":"."}'),
        1,
    ),
    "space everywhere": (
        OPEN + ' \r\n{ "name" :\t"ls" , "arguments" : { "path" : "." } }\n\n' + CLOSE,
        call(0, "ls", '{ "path" : "." }'),
        1,
    ),
    "marks and braces inside strings": (
        hermes("say", {"text": f'}}{{"{CLOSE}\\{OPEN}"'}),
        call(0, "say", json.dumps({"text": f'}}{{"{CLOSE}\\{OPEN}"'})),
        1,
    ),
    "arguments before the name": (
        f'{OPEN}{{"arguments": {{"a": [1, {{}}]}}, "name": "f"}}{CLOSE}',
        call(0, "f", '{"a": [1, {}]}'),
        1,
    ),
    "arguments as a string": (
        f'{OPEN}{{"name": "f", "arguments": "{{\\"a\\": \\"\\u00e9\\"}}"}}{CLOSE}',
        call(0, "f", '{"a": "é"}'),
        1,
    ),
    "parameters": (
        f'{OPEN}{{"name": "f", "parameters": {{"a": 1}}}}{CLOSE}',
        call(0, "f", '{"a": 1}'),
        1,
    ),
    "no arguments": (f'{OPEN}{{"name": "f"}}{CLOSE}', call(0, "f", "{}"), 1),
    "null arguments": (f'{OPEN}{{"name": "f", "arguments": null}}{CLOSE}', call(0, "f", "{}"), 1),
    "an empty string of arguments": (
        f'{OPEN}{{"name": "f", "arguments": ""}}{CLOSE}',
        call(0, "f", "{}"),
        1,
    ),
    "keys that mean nothing": (
        f'{OPEN}{{"id": [1], "name": "f", "type": "x", "arguments": {{}}, "name": "g"}}{CLOSE}',
        call(0, "f", "{}"),
        1,
    ),
    "escapes in the name": (
        f'{OPEN}{{"na\\u006de": "\\ud83c\\udf0a\\ud800"}}{CLOSE}',
        call(0, "🌊\ufffd", "{}"),
        1,
    ),
    "a newline inside a string": (
        f'{OPEN}{{"name": "f", "arguments": {{"a": "x\ny"}}}}{CLOSE}',
        call(0, "f", '{"a": "x\\u000ay"}'),
        1,
    ),
    # What models get wrong.
    "a mark that is named": (f"{OPEN} is a mark", [Text(f"{OPEN} is a mark")], 0),
    "no object": (f"{OPEN}\n[1]\n{CLOSE}", [Text(f"{OPEN}\n[1]\n{CLOSE}")], 0),
    "no name": (f'a\n{OPEN}{{"x": 1}}{CLOSE}', [Text(f'a\n{OPEN}{{"x": 1}}{CLOSE}')], 0),
    "a number for a name": (f'{OPEN}{{"name": 5}}', [Text(f'{OPEN}{{"name": 5}}')], 0),
    "an empty name": (f'{OPEN}{{"name": ""}}', [Text(f'{OPEN}{{"name": ""}}')], 0),
    "the mark twice": (f"{OPEN}\n{LS}", [Text(OPEN), *call(0, "ls", LS_ARGUMENTS)], 1),
    "no closing mark": (f"{LS.removesuffix(CLOSE)}", call(0, "ls", LS_ARGUMENTS), 1),
    "no closing mark between": (
        f"{LS.removesuffix(CLOSE)}{LS}",
        call(0, "ls", LS_ARGUMENTS) + call(1, "ls", LS_ARGUMENTS),
        2,
    ),
    "a brace too few": (f'{OPEN}{{"name": "f", "arguments": {{}}\n{CLOSE}', call(0, "f", "{}"), 1),
    "a brace too many": (
        f'{OPEN}{{"name": "f", "arguments": {{}}}}}}\n{CLOSE}!',
        [*call(0, "f", "{}"), Text("}\n!")],
        1,
    ),
    "a name alone": (f'{OPEN}{{"name": "f"\n{CLOSE}', call(0, "f", "{}"), 1),
    "arguments that are no JSON": (
        f'{OPEN}{{"name": "f", "arguments": {{"a": b}}}}{CLOSE}!',
        [*call(0, "f", '{"a": b}}'), Text("!")],
        1,
    ),
    "a bad escape": (
        f'{OPEN}{{"name": "f", "arguments": {{"a": "\\x"}}}}{CLOSE}',
        call(0, "f", '{"a": "\\x"}}'),
        1,
    ),
    "arguments that do not end": (
        f'{OPEN}{{"name": "f", "arguments": {{"a": 01}}{LS}',
        call(0, "f", '{"a": 01}') + call(1, "ls", LS_ARGUMENTS),
        2,
    ),
    # The stream ends inside.
    "cut in the mark": ("so <tool_ca", [Text("so <tool_ca")], 0),
    "cut before the name": (f'so\n{OPEN}\n{{"nam', [Text(f'so\n{OPEN}\n{{"nam')], 0),
    "cut after the name": (f'{OPEN}{{"name": "f", "ar', [CallStart(0, "call_0", "f")], 0),
    "cut in the arguments": (
        f'{LS}{OPEN}{{"name": "f", "arguments": {{"a": "\\u00',
        [*call(0, "ls", LS_ARGUMENTS), *call(1, "f", '{"a": "\\u00')],
        1,
    ),
    "cut in a string of arguments": (
        f'{OPEN}{{"name": "f", "arguments": "{{\\"a',
        call(0, "f", '"{\\"a'),
        0,
    ),
    "cut after the arguments": (f'{OPEN}{{"name": "f", "arguments": {{}}', call(0, "f", "{}"), 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_its_calls(form: str) -> None:
    text, deltas, calls = FORMS[form]
    assert parse(text) == (deltas, calls)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_form_in_small_pieces_gives_the_same(form: str, size: int) -> None:
    text, deltas, calls = FORMS[form]
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(*chunks) == (deltas, calls)


pieces = st.sampled_from(
    [
        *(OPEN, CLOSE, "{", "}", "[", "]", '"', ":", ", ", "\\", "\n", " ", "<", "1", "null"),
        *('"name"', '"arguments"', '"f"', '{"name": "f", ', '"arguments": {"a": ', "é🌊", LS),
        "\\u00",
    ]
)
garbage = st.lists(pieces | st.text(max_size=3), max_size=14).map("".join)


chunked = given(text=garbage, cuts=st.lists(st.integers(0, 400), max_size=8))


def check_chunking(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:end] for start, end in itertools.pairwise(places)]
    assert parse(*chunks) == parse(text) == parse(*text)


@chunked
def test_any_chunking_gives_the_same(text: str, cuts: list[int]) -> None:
    check_chunking(text, cuts)


@pytest.mark.slow
@settings(max_examples=20_000)
@chunked
def test_any_chunking_gives_the_same_in_full(text: str, cuts: list[int]) -> None:
    check_chunking(text, cuts)


@given(text=garbage)
def test_text_without_a_call_comes_back_as_it_was(text: str) -> None:
    deltas, calls = parse(text)
    if not any(isinstance(delta, CallStart) for delta in deltas):
        assert calls == 0
        assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == text


@given(text=garbage)
def test_indices_count_the_calls_and_arguments_follow_their_start(text: str) -> None:
    deltas, calls = parse(text)
    starts = [delta for delta in deltas if isinstance(delta, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.call_id for start in starts}) == len(starts)
    assert calls in (len(starts), len(starts) - 1)  # the last may be cut
    for before, delta in itertools.pairwise([None, *deltas]):
        if isinstance(delta, CallArguments):
            assert isinstance(before, CallStart)
            assert before.index == delta.index


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from([OPEN, CLOSE, '"', "\\", "}\n"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
calls_made = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=6),
        st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def loose(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)


@given(
    before=st.text(st.characters(exclude_characters="<"), max_size=6),
    made=calls_made,
    write=st.sampled_from([compact, loose]),
    data=st.data(),
)
def test_calls_come_out_as_they_were_written(
    before: str, made: list[tuple[str, Any]], write: Callable[[Any], str], data: st.DataObject
) -> None:
    text = before + "".join(
        f"\n{OPEN}{write({'name': name, 'arguments': arguments})}{CLOSE}"
        for name, arguments in made
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    deltas, calls = parse(*chunks)
    assert calls == len(made)
    assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == before
    starts = [delta.name for delta in deltas if isinstance(delta, CallStart)]
    assert starts == [name for name, _ in made]
    found = [json.loads(delta.text) for delta in deltas if isinstance(delta, CallArguments)]
    assert found == [arguments for _, arguments in made]


def test_a_call_starts_with_its_name_and_its_arguments_come_as_they_are_written() -> None:
    one = parser()
    assert one.push(f'{OPEN}\n{{"name": "wri') == []
    assert one.push('te"') == [CallStart(0, "call_0", "write")]
    assert one.push(', "arguments": {"text": "ab') == [CallArguments(0, '{"text": "ab')]
    assert one.push("cd") == [CallArguments(0, "cd")]
    assert one.push('"}') == [CallArguments(0, '"}')]
    assert one.calls == 0
    assert one.push("}") == []
    assert one.calls == 1
    assert one.push(f"\n{CLOSE}") == one.flush() == []


def test_text_is_held_back_only_where_it_may_become_a_mark() -> None:
    one = parser()
    assert one.push("a <") == [Text("a ")]
    assert one.push("b>") == [Text("<b>")]
    assert one.push("<tool_call") == []
    assert one.push("s>") == [Text("<tool_calls>")]


def test_what_is_kept_of_one_call_is_bounded() -> None:
    long = "x" * MAX_HELD_CHARS
    unnamed = f'{OPEN}{{"arguments": {{"a": "{long}"}}, "name": "f"}}{CLOSE}'
    for chunks in ([unnamed], [unnamed[:10], unnamed[10:99_999], unnamed[99_999:]]):
        deltas, calls = parse(*chunks)
        assert calls == 0
        assert deltas == [Text(unnamed)]
    named = f'{OPEN}{{"name": "f", "arguments": {{"a": "{long}"}}, "id": 1}}{CLOSE}'
    assert parse(named) == (call(0, "f", json.dumps({"a": long})), 1)


def test_more_space_than_frames_a_call_is_text() -> None:
    wide = " " * MAX_FRAME_CHARS
    for text in (f"{LS}{wide} \n{LS}", f"{LS}{wide}\n"):
        deltas, _ = parse(text)
        assert parse(*text) == parse(text)
        assert any(isinstance(delta, Text) and delta.text.isspace() for delta in deltas)
    assert parse(f"{LS}{wide}{LS}")[0] == call(0, "ls", LS_ARGUMENTS) + call(1, "ls", LS_ARGUMENTS)


def test_arguments_nested_deeper_than_a_prompt_may_hold_are_passed_on_as_text() -> None:
    deep = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
    text = f'{OPEN}{{"name": "f", "arguments": {deep}}}{CLOSE}'
    assert parse(text) == (call(0, "f", deep + "}"), 1)
    assert parse(*text) == parse(text)
