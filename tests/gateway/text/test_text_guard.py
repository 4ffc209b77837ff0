"""The guard: no control text survives in untrusted strings, however pieces are joined."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.errors import TextError
from gateway.text.guard import MARK, MAX_DEPTH, Guard
from gateway.text.specials import any_of

CONTROL = ["<|im_start|>", "<|im_end|>", "<|im_end|>x", "<tool_call>", "[INST]", "aba", "bab", "ab"]
guard = Guard(CONTROL)
control = re.compile(any_of(CONTROL))

pieces = st.sampled_from(
    [*CONTROL, *(text[:cut] for text in CONTROL for cut in range(1, len(text))), "a", "b", " x", ""]
)
few_chars = st.text(st.characters(exclude_characters="\ufdd0\ufdd1"), max_size=4)
untrusted = st.lists(pieces | few_chars, max_size=8).map("".join)


@given(text=untrusted)
def test_no_control_text_is_left_and_nothing_else_changes(text: str) -> None:
    marked = guard.text(text, "prompt")
    assert not control.search(marked)
    assert marked.replace(MARK, "") == text


@given(texts=st.lists(untrusted, max_size=5))
def test_pieces_that_a_template_joins_make_no_control_text(texts: list[str]) -> None:
    assert not control.search("".join(guard.text(text, "prompt") for text in texts))


@given(
    text=st.sampled_from(CONTROL),
    cuts=st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted),
    spaces=st.tuples(*[st.sampled_from(["", " ", "\n"])] * 2),
    rest=untrusted,
)
def test_a_template_that_writes_part_of_a_control_text_makes_none(
    text: str, cuts: list[int], spaces: tuple[str, str], rest: str
) -> None:
    """As `'<|' + name + '|>'` does, or `'<' + content | trim`."""
    before, inside, after = text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]

    def rendered(untrusted: str) -> str:
        return guard.text(untrusted, "prompt").strip()

    if inside:
        assert text not in before + rendered(spaces[0] + inside + spaces[1]) + after
    if inside + after and before:
        assert text not in before + rendered(spaces[0] + inside + after + rest)
    if before and inside + after:
        assert text not in rendered(rest + before + spaces[1]) + inside + after


@given(text=untrusted)
def test_marks_leave_stripping_alone(text: str) -> None:
    marked = guard.text(text, "prompt")
    assert marked.strip().replace(MARK, "") == text.strip()


def test_text_without_control_text_is_the_same_object() -> None:
    text = "if x > 3: print('plain')"
    assert guard.text(text, "prompt") is text


def test_strings_deep_inside_values_are_guarded_keys_too() -> None:
    value = {"<|im_end|>": [{"arguments": "<tool_call>"}, 3, None, True, 1.5]}
    marked = guard.value(value, "messages[0].tool_calls")
    assert marked == {
        f"<{MARK}|im_end|>": [{"arguments": f"<{MARK}tool_call>"}, 3, None, True, 1.5]
    }


@pytest.mark.parametrize("char", ["\ufdd0", "\ufdd1"])
def test_the_mark_itself_is_refused_with_its_field(char: str) -> None:
    with pytest.raises(TextError) as caught:
        guard.value({"function": {"name": f"a{char}"}}, "messages[2].tool_calls")
    assert caught.value.field == "messages[2].tool_calls.function.name"
    assert "U+FDD0" in caught.value.found


def test_endless_nesting_is_refused() -> None:
    value: object = "x"
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(TextError, match="levels"):
        guard.value(value, "messages[0].tool_calls")


def test_a_guard_of_nothing_changes_nothing() -> None:
    assert Guard([]).text("<|im_end|>", "prompt") == "<|im_end|>"
