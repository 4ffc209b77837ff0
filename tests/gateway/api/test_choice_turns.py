"""Choices without a network: any chunking of a lane gives the same text, tokens and end."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.choice import Choice, Echo, ToldToken
from gateway.nodes.streams import Burst, Stream
from gateway.text.model import TextModel
from policies.contract.wire import Finished, TokenLogprob, Usage
from tests.gateway.api.conftest import scripted_node

TEXT = TextModel.load(scripted_node.make_bundle())
END_ID = scripted_node.END_ID
ALPHABET = "ab é日🙂\n"


class FakeStream:
    """Takes what a choice tells the fleet."""

    def __init__(self, prompt_logprobs: list[TokenLogprob]) -> None:
        self.prompt_logprobs = prompt_logprobs
        self.finished: list[tuple[int, int]] = []

    def finish(self, index: int, keep: int) -> None:
        self.finished.append((index, keep))


def told(place: int) -> TokenLogprob:
    return TokenLogprob(-float(place), 1, ((place, -float(place)),))


def read(
    ids: list[int], cuts: list[int], *, end_apart: bool, echo: Echo | None = None, **fields: Any
) -> tuple[str, list[ToldToken], str | None, int, list[tuple[int, int]]]:
    """All that a client gets of one lane whose tokens come in these pieces."""
    stops = fields.pop("stops", ())
    output = TEXT.output(stops, with_places=True, min_tokens=fields.pop("min_tokens", 0))
    choice = Choice(0, output, echo=echo, has_logprobs=True, **fields)
    stream = FakeStream([told(place) for place in range(1, len(echo.ids))] if echo else [])
    end = Finished(0, "length", Usage(1, 0, len(ids)))
    borders = sorted({0, *[cut % (len(ids) + 1) for cut in cuts], len(ids)})
    bursts = [
        Burst(0, ids[begin:until], None, [told(place) for place in range(begin, until)])
        for begin, until in pairwise(borders)
    ]
    if end_apart or not bursts:
        bursts.append(Burst(0, [], end))
    else:
        last = bursts.pop()
        bursts.append(Burst(0, last.tokens, end, last.logprobs))
    text, tokens = "", []
    shown = len(echo.text) if echo else 0
    for burst in bursts:
        turn = choice.take(burst, cast(Stream, stream))
        assert turn.failure is None
        text += "".join(delta.text for delta in turn.deltas)
        tokens += turn.tokens
        for token in turn.tokens:
            own = len(TEXT.pieces([token.token_id])[0])
            assert token.begin <= len(text), "a token was told before its text"
            assert own > 1 or token.begin < shown or token.begin + 1 <= len(text) or turn.reason
        if turn.reason is not None:
            break
    return text, tokens, choice.reason, choice.completion_tokens, stream.finished


texts = st.text(ALPHABET, max_size=14)


def check_chunks(text: str, stops: list[str], cuts: list[int], end_apart: bool, least: int) -> None:
    ids = [*scripted_node.ids_of(text), END_ID][: len(text.encode()) + end_apart]
    whole = read(ids, [], end_apart=False, stops=stops, min_tokens=least)
    assert read(ids, cuts, end_apart=end_apart, stops=stops, min_tokens=least) == whole
    shown, tokens, reason, counted, finished = whole
    assert [token.logprob for token in tokens] == [told(n) for n in range(len(tokens))]
    if reason == "length":
        assert shown == text
        assert [token.token_id for token in tokens] == ids
        assert not finished
    else:
        assert text.startswith(shown)
        assert all(token.begin < len(shown) for token in tokens), "told of text that was cut off"
        assert len(TEXT.pieces([token.token_id for token in tokens])) == len(tokens) <= counted
        kept = b"".join(TEXT.token_bytes(token.token_id) for token in tokens).decode()
        assert kept == shown  # with tokens of one byte none is cut in two
        assert counted > least


def run_chunks(examples: int) -> None:
    check = given(
        texts,
        st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=3),
        st.lists(st.integers(0, 60), max_size=6),
        st.booleans(),
        st.integers(0, 6),
    )(check_chunks)
    settings(max_examples=examples, deadline=None)(check)()


def test_any_chunking_gives_the_same_choice() -> None:
    run_chunks(200)


@pytest.mark.slow
def test_any_chunking_gives_the_same_choice_full() -> None:
    run_chunks(int(os.environ.get("KAGARI_EXAMPLES", "20000")))


def test_a_token_is_held_while_its_text_may_be_a_stop_string() -> None:
    choice = Choice(0, TEXT.output(["END"], with_places=True), has_logprobs=True)
    stream = cast(Stream, FakeStream([]))
    ids = scripted_node.ids_of("aENx")
    seen = []
    for place, token_id in enumerate(ids):
        turn = choice.take(Burst(0, [token_id], None, [told(place)]), stream)
        text = "".join(delta.text for delta in turn.deltas)
        seen.append((text, [token.begin for token in turn.tokens]))
    assert seen == [("a", [0]), ("", []), ("", []), ("ENx", [1, 2, 3])]


def test_the_bytes_of_one_character_are_told_with_its_text() -> None:
    choice = Choice(0, TEXT.output([], with_places=True), has_logprobs=True)
    stream = cast(Stream, FakeStream([]))
    counts = []
    for place, token_id in enumerate(scripted_node.ids_of("🙂")):
        turn = choice.take(Burst(0, [token_id], None, [told(place)]), stream)
        counts.append(len(turn.tokens))
    assert counts == [0, 0, 0, 4]


def test_an_echo_comes_first_and_offsets_go_on_after_it() -> None:
    ids = scripted_node.ids_of("ab")
    echo = Echo("ab", ids, [0, 1])
    text, tokens, reason, counted, _ = read(
        scripted_node.ids_of("cd"), [1], end_apart=True, echo=echo
    )
    assert (text, reason, counted) == ("abcd", "length", 2)
    assert [token.begin for token in tokens] == [0, 1, 2, 3]
    assert [token.logprob for token in tokens] == [None, told(1), told(0), told(1)]


def test_nothing_was_asked_for_and_nothing_is_counted() -> None:
    echo = Echo("ab", scripted_node.ids_of("ab"), [0, 1])
    found = read(scripted_node.ids_of("c"), [], end_apart=False, echo=echo, drops_output=True)
    text, tokens, reason, counted, _ = found
    assert (text, len(tokens), reason, counted) == ("ab", 2, "length", 0)


@pytest.mark.parametrize("missing", ["prompt", "token"])
def test_an_engine_that_tells_too_few_log_probabilities_is_at_fault(missing: str) -> None:
    echo = Echo("ab", scripted_node.ids_of("ab"), [0, 1])
    choice = Choice(0, TEXT.output([], with_places=True), echo=echo, has_logprobs=True)
    stream = FakeStream([] if missing == "prompt" else [told(1)])
    logprobs = [] if missing == "token" else [told(0)]
    turn = choice.take(Burst(0, [5], None, logprobs), cast(Stream, stream))
    assert turn.failure is not None
    assert turn.failure.code == "engine_error"
