"""Token ids to text: any chunking gives the whole, no character comes before its last byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from gateway.text.detokenize import Detokenizer, LibraryStream, TextStream
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


def in_chunks(source: Detokenizer | TextStream, chunks: list[list[int]]) -> str:
    stream = source.stream() if isinstance(source, Detokenizer) else source
    return "".join(stream.push(chunk) for chunk in chunks) + stream.flush()


chunked_ids = st.lists(st.lists(st.integers(0, 700), max_size=5), max_size=12)


@given(chunks=chunked_ids)
def test_any_chunking_equals_the_library_on_the_whole(
    tiny: Tokenizer, tiny_detokenizer: Detokenizer, chunks: list[list[int]]
) -> None:
    assert tiny_detokenizer.has_tables
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
def test_the_library_streams_any_chunking_alike(metaspace: Tokenizer, text: str, cut: int) -> None:
    ids = metaspace.encode(text, add_special_tokens=False).ids
    chunks = [ids[start : start + cut] for start in range(0, len(ids), cut)]
    assert in_chunks(LibraryStream(metaspace, ()), chunks) == metaspace.decode(ids)


def test_decoders_without_tables_stream_through_the_library(metaspace_json: bytes) -> None:
    tokenizer = Tokenizer.from_buffer(metaspace_json)
    tokenizer.decoder = decoders.WordPiece()
    detokenizer = Detokenizer(tokenizer, [])
    assert not detokenizer.has_tables
    ids = tokenizer.encode("the dog the dog").ids
    assert in_chunks(detokenizer, [ids[:2], ids[2:]]) == tokenizer.decode(ids)


@given(text=st.text(max_size=60), cut=st.integers(1, 7))
def test_characters_of_byte_tokens_come_whole_in_any_chunking(
    metaspace: Tokenizer, metaspace_detokenizer: Detokenizer, text: str, cut: int
) -> None:
    assert metaspace_detokenizer.has_tables
    ids = metaspace.encode("a" + text, add_special_tokens=False).ids
    chunks = [ids[start : start + cut] for start in range(0, len(ids), cut)]
    # the library takes away a space that begins the text: an answer's first space is its own
    assert in_chunks(metaspace_detokenizer, chunks) == " " + metaspace.decode(ids)


def test_a_character_of_byte_tokens_is_held_until_its_last_byte(
    metaspace: Tokenizer, metaspace_detokenizer: Detokenizer
) -> None:
    stream = metaspace_detokenizer.stream()
    crab = [metaspace.token_to_id(f"<0x{byte:02X}>") for byte in "🦀".encode()]
    assert [stream.push([token]) for token in crab] == ["", "", "", "🦀"]
    assert stream.push(crab[:3]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push([*crab[:2], *crab]) + stream.flush() == "\ufffd🦀"


@given(chunks=chunked_ids)
def test_random_ids_stream_alike_in_any_chunking(
    metaspace: Tokenizer, metaspace_detokenizer: Detokenizer, chunks: list[list[int]]
) -> None:
    ids = [token for chunk in chunks for token in chunk]
    assert in_chunks(metaspace_detokenizer, chunks) == in_chunks(metaspace_detokenizer, [ids])
    of_library = in_chunks(LibraryStream(metaspace, ()), [ids])
    assert in_chunks(LibraryStream(metaspace, ()), chunks) == of_library


@pytest.mark.parametrize("by_library", [False, True])
def test_invalid_bytes_do_not_end_the_stream(metaspace: Tokenizer, by_library: bool) -> None:
    stream = LibraryStream(metaspace, ()) if by_library else Detokenizer(metaspace, []).stream()
    nul, torn = metaspace.token_to_id("<0x00>"), metaspace.token_to_id("<0x80>")
    words = metaspace.encode(" the dog the dog").ids
    text = "".join(stream.push([token]) for token in [nul, torn, *words]) + stream.flush()
    assert text.startswith("\x00")
    assert "\ufffd" in text
    assert text.endswith(" the dog the dog")


def test_the_library_flushes_unfinished_bytes(metaspace: Tokenizer) -> None:
    stream = LibraryStream(metaspace, ())
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
    special = metaspace.token_to_id("<|im_end|>")
    stream = LibraryStream(metaspace, {dog[0], special})
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
    assert detokenizer.has_tables
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
