"""Token ids to text: any chunking gives the whole, no character comes before its last byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.text.detokenize import Detokenizer
from policies.contract.bundle import Bundle

TEXT = "Grüße! 日本語 👩‍👩‍👧 e\u0301 \x00 ok <|im_end|> <tool_call>{}</tool_call> \ufffd end"


@pytest.fixture(scope="module")
def tiny(tiny_json: bytes) -> Tokenizer:
    return Tokenizer.from_buffer(tiny_json)


@pytest.fixture(scope="module")
def metaspace(metaspace_json: bytes) -> Tokenizer:
    return Tokenizer.from_buffer(metaspace_json)


@pytest.fixture(scope="module")
def tiny_detokenizer(tiny: Tokenizer) -> Detokenizer:
    return Detokenizer(tiny, [])


@pytest.fixture(scope="module")
def metaspace_detokenizer(metaspace: Tokenizer) -> Detokenizer:
    return Detokenizer(metaspace, [])


def in_chunks(detokenizer: Detokenizer, chunks: list[list[int]]) -> str:
    stream = detokenizer.stream()
    return "".join(stream.push(chunk) for chunk in chunks) + stream.flush()


chunked_ids = st.lists(st.lists(st.integers(0, 700), max_size=5), max_size=12)


@given(chunks=chunked_ids)
def test_any_chunking_equals_the_library_on_the_whole(
    tiny: Tokenizer, tiny_detokenizer: Detokenizer, chunks: list[list[int]]
) -> None:
    assert tiny_detokenizer.is_byte_level
    whole = tiny.decode([token for chunk in chunks for token in chunk])
    assert in_chunks(tiny_detokenizer, chunks) == whole


@given(text=st.text(max_size=60), cut=st.integers(1, 7))
def test_text_round_trips_through_ids(
    tiny: Tokenizer, tiny_detokenizer: Detokenizer, text: str, cut: int
) -> None:
    ids = tiny.encode(text, add_special_tokens=False).ids
    chunks = [ids[start : start + cut] for start in range(0, len(ids), cut)]
    assert in_chunks(tiny_detokenizer, chunks) == tiny.decode(ids)


@given(text=st.text(max_size=60), cut=st.integers(1, 7))
def test_other_decoders_stream_through_the_library(
    metaspace: Tokenizer, metaspace_detokenizer: Detokenizer, text: str, cut: int
) -> None:
    assert not metaspace_detokenizer.is_byte_level
    ids = metaspace.encode(text, add_special_tokens=False).ids
    chunks = [ids[start : start + cut] for start in range(0, len(ids), cut)]
    assert in_chunks(metaspace_detokenizer, chunks) == metaspace.decode(ids)


@given(chunks=chunked_ids)
def test_random_ids_stream_alike_in_any_chunking(
    metaspace_detokenizer: Detokenizer, chunks: list[list[int]]
) -> None:
    ids = [token for chunk in chunks for token in chunk]
    assert in_chunks(metaspace_detokenizer, chunks) == in_chunks(metaspace_detokenizer, [ids])


def test_invalid_bytes_do_not_end_the_stream(metaspace: Tokenizer) -> None:
    stream = Detokenizer(metaspace, []).stream()
    nul, torn = metaspace.token_to_id("<0x00>"), metaspace.token_to_id("<0x80>")
    words = metaspace.encode(" the dog the dog").ids
    text = "".join(stream.push([token]) for token in [nul, torn, *words]) + stream.flush()
    assert text.startswith("\x00")
    assert "\ufffd" in text
    assert text.endswith(" the dog the dog")


def test_the_library_flushes_unfinished_bytes(metaspace: Tokenizer) -> None:
    stream = Detokenizer(metaspace, []).stream()
    crab = metaspace.encode("🦀").ids
    assert stream.push(metaspace.encode("ab🦀").ids) == "ab🦀"
    assert stream.push(crab[-4:-1]) == ""
    assert stream.flush() == "\ufffd" * 3
    assert stream.flush() == ""


def test_partial_utf8_is_held_until_its_last_byte(tiny: Tokenizer) -> None:
    stream = Detokenizer(tiny, []).stream()
    pieces = [stream.push([token]) for token in tiny.encode("🦀").ids]
    assert pieces[-1] == "🦀"
    assert set(pieces[:-1]) == {""}


def test_unfinished_bytes_are_flushed_as_one_replacement(tiny: Tokenizer) -> None:
    stream = Detokenizer(tiny, []).stream()
    assert stream.push(tiny.encode("🦀").ids[:-1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_no_character_is_sent_twice_after_a_replacement(tiny: Tokenizer) -> None:
    stream = Detokenizer(tiny, []).stream()
    ids = [*tiny.encode("🦀").ids[:-1], *tiny.encode("ab🦀").ids]
    assert "".join(stream.push([token]) for token in ids) + stream.flush() == "\ufffdab🦀"


def test_special_ids_are_silent_and_others_speak(tiny: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny, [])
    ids = tiny.encode("a<|im_end|>b<tool_call>c").ids
    assert in_chunks(detokenizer, [ids]) == "ab<tool_call>c"
    assert detokenizer.text_of(ids) == "a<|im_end|>b<tool_call>c"


def test_a_stop_id_is_silent_even_if_it_is_not_special(tiny: Tokenizer) -> None:
    stop = tiny.token_to_id("</tool_call>")
    assert in_chunks(Detokenizer(tiny, [stop]), [[stop], tiny.encode("x").ids]) == "x"


def test_special_and_stop_ids_are_silent_through_the_library_too(metaspace: Tokenizer) -> None:
    dog = metaspace.encode("the dog").ids
    stream = Detokenizer(metaspace, [dog[0]]).stream()
    special = metaspace.token_to_id("<|im_end|>")
    whole = metaspace.decode(dog[1:])
    assert stream.push([special, dog[0], special, *dog[1:]]) + stream.flush() == whole


@pytest.mark.parametrize("token", [700, 1 << 31, -1])
def test_an_id_outside_the_vocabulary_breaks_nothing(tiny: Tokenizer, token: int) -> None:
    stream = Detokenizer(tiny, []).stream()
    crab = tiny.encode("🦀").ids
    assert stream.push(crab[:-1]) + stream.push([token]) + stream.push(crab[-1:]) == "🦀"


def test_every_token_of_the_default_model_decodes_as_the_library_does(
    smollm2_bundle: Bundle,
) -> None:
    tokenizer = Tokenizer.from_buffer(smollm2_bundle.tokenizer_json)
    detokenizer = Detokenizer(tokenizer, smollm2_bundle.stop_token_ids)
    assert detokenizer.is_byte_level
    ids = list(range(49_152))[::-1]
    assert in_chunks(detokenizer, [[token] for token in ids]) == tokenizer.decode(ids)
    ids = tokenizer.encode(TEXT).ids
    assert in_chunks(detokenizer, [[token] for token in ids]) == TEXT.replace("<|im_end|>", "")


# --- single tokens -----------------------------------------------------------------------------


@given(text=st.text(max_size=40))
def test_the_bytes_of_single_tokens_are_those_of_the_text(
    tiny: Tokenizer, tiny_detokenizer: Detokenizer, text: str
) -> None:
    ids = tiny.encode(text, add_special_tokens=False).ids
    assert b"".join(map(tiny_detokenizer.token_bytes, ids)) == text.encode()
    pieces = tiny_detokenizer.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


@given(text=st.text("ab é日🙂\n", max_size=40))
def test_single_tokens_keep_the_space_that_a_decoder_strips(
    metaspace: Tokenizer, metaspace_detokenizer: Detokenizer, text: str
) -> None:
    ids = metaspace.encode(text, add_special_tokens=False).ids
    whole = b"".join(map(metaspace_detokenizer.token_bytes, ids)).decode()
    assert whole.removeprefix(" ") == metaspace.decode(ids)
    assert "".join(metaspace_detokenizer.pieces(ids)) == whole


def test_special_tokens_have_their_names_and_ids_of_no_token_nothing(
    tiny: Tokenizer, tiny_detokenizer: Detokenizer, metaspace_detokenizer: Detokenizer
) -> None:
    for detokenizer in (tiny_detokenizer, metaspace_detokenizer):
        end = detokenizer._tokenizer.token_to_id("<|im_end|>")
        assert detokenizer.token_bytes(end) == b"<|im_end|>"
        assert detokenizer.token_bytes(99_999) == b""
    tool_call = tiny.token_to_id("<tool_call>")
    assert tool_call is not None
    assert tiny_detokenizer.token_bytes(tool_call) == b"<tool_call>"


def test_part_of_a_character_goes_with_the_token_that_ends_it(
    tiny_detokenizer: Detokenizer, tiny: Tokenizer
) -> None:
    ids = [tiny.token_to_id(char) for char in "ðŁĻĤ"]  # the bytes of one emoji, one a token
    assert tiny_detokenizer.pieces(ids) == ["", "", "", "🙂"]
    assert tiny_detokenizer.pieces(ids[:2]) == ["", "\ufffd"]
