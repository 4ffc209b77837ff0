"""Output text: detokenised, cut at stop strings, counted in tokens, alike in any chunking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.text.detokenize import Detokenizer
from gateway.text.output import OutputText


@pytest.fixture(scope="module")
def tiny(tiny_json: bytes) -> Tokenizer:
    return Tokenizer.from_buffer(tiny_json)


@pytest.fixture(scope="module")
def detokenizer(tiny: Tokenizer) -> Detokenizer:
    return Detokenizer(tiny, [])


def run(output: OutputText, chunks: list[list[int]]) -> tuple[str, int | None]:
    text = "".join(output.push(chunk) for chunk in chunks) + output.flush()
    return text, output.stopped_at


@given(
    ids=st.lists(st.integers(0, 620), max_size=40),
    cut=st.integers(1, 9),
    stops=st.lists(st.text(alphabet="aeé \ufffd1", min_size=1, max_size=2), max_size=3),
)
def test_any_chunking_equals_the_whole(
    detokenizer: Detokenizer, ids: list[int], cut: int, stops: list[str]
) -> None:
    chunks = [ids[start : start + cut] for start in range(0, len(ids), cut)]
    whole = run(OutputText(detokenizer.stream(), stops), [ids])
    assert run(OutputText(detokenizer.stream(), stops), chunks) == whole
    assert run(OutputText(detokenizer.stream(), stops), [[token] for token in ids]) == whole
    if whole[1] is not None:  # the count is the shortest run of tokens that still holds the match
        assert run(OutputText(detokenizer.stream(), stops), [ids[: whole[1]]]) == whole


def test_stopped_at_counts_the_token_that_completes_the_match(
    tiny: Tokenizer, detokenizer: Detokenizer
) -> None:
    before, match, after = (tiny.encode(text).ids for text in ("say ", "<END>", " later"))
    output = OutputText(detokenizer.stream(), ["<END>"])
    assert output.push(before + match + after) == "say "
    assert output.stopped_at == len(before) + len(match)
    assert output.push(after) == ""
    assert output.flush() == ""


def test_silent_tokens_count_as_completion_tokens(
    tiny: Tokenizer, detokenizer: Detokenizer
) -> None:
    silent = tiny.token_to_id("<|im_start|>")
    output = OutputText(detokenizer.stream(), ["!"])
    output.push([silent, silent, *tiny.encode("!").ids])
    assert output.stopped_at == 3


def test_flush_goes_through_the_stop_strings_too(tiny: Tokenizer, detokenizer: Detokenizer) -> None:
    output = OutputText(detokenizer.stream(), ["\ufffd"])
    half = tiny.encode("🦀").ids[:-1]
    assert output.push([*tiny.encode("a").ids, *half]) == "a"
    assert output.flush() == ""
    assert output.stopped_at == 1 + len(half)


def test_flush_sends_what_turned_out_not_to_be_a_stop(
    tiny: Tokenizer, detokenizer: Detokenizer
) -> None:
    output = OutputText(detokenizer.stream(), ["<END>"])
    assert output.push(tiny.encode("ok <EN").ids) == "ok "
    assert output.flush() == "<EN"
    assert output.stopped_at is None
