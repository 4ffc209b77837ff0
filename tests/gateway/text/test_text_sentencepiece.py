"""A vocabulary of SentencePiece's kind (Gemma, Llama 2): segments, tags, byte tokens, bos."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from gateway.text.errors import TextError
from gateway.text.guard import Guard
from gateway.text.model import TextModel
from gateway.text.specials import any_of
from gateway.text.tokenize import PromptTokenizer
from policies.contract.bundle import Bundle

CONTROL = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<unused0>", "<unused1>")
TEXT_TOKENS = ("\n", "\n\n", "  ", "\t", "<h1>", "</h1>", "<table>", "[multimodal]")
SPACE = "\u2581"


def sentencepiece(*, prefix: bool = False, split: bool = False) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        show_progress=False,
        special_tokens=[*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    learner = Tokenizer(models.BPE())
    text = "the dog said hello to the cat <h1> and a title: 日本 é x = 12 "
    learner.train_from_iterator([text.replace(" ", SPACE)] * 3, trainer)
    tokenizer = Tokenizer(learner.model)
    tokenizer.model.byte_fallback = True
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
    )
    if split:  # as Gemma's own tokenizer.json has it, where no space is left to split at
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TEXT_TOKENS])
    return tokenizer


def bundle_of(tokenizer: Tokenizer) -> Bundle:
    return Bundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=None,
        bos_token="<bos>",
        eos_token="<eos>",
        stop_token_ids=(1, 4),
        add_bos=True,
        context_tokens=4096,
        page_size=64,
        vocab_size=tokenizer.get_vocab_size(),
    )


@pytest.fixture(scope="module", params=["", "prefix", "split"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return sentencepiece(**{request.param: True} if request.param else {})


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> TextModel:
    return TextModel.load(bundle_of(tokenizer))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> PromptTokenizer:
    return PromptTokenizer(tokenizer.to_str().encode())


pieces = st.sampled_from(
    [*CONTROL, *TEXT_TOKENS, " ", "the dog", " said", "é", "🙂", "12", "<h", ">"]
)
rendered = st.lists(pieces | st.text(max_size=4), max_size=12).map("".join)


@given(text=rendered)
def test_segments_give_the_ids_of_the_whole(
    tokenizer: Tokenizer, prompts: PromptTokenizer, text: str
) -> None:
    assert prompts.is_segmented
    if any(mark in text for mark in ("\ufdd0", "\ufdd1")):
        return
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert list(asyncio.run(prompts.encode(text))) == whole


def test_a_raw_prompt_begins_with_bos(model: TextModel, tokenizer: Tokenizer) -> None:
    ids = list(asyncio.run(model.raw_prompt("the dog")))
    assert ids == [2, *tokenizer.encode("the dog", add_special_tokens=False).ids]


def test_tags_are_text_and_control_tokens_are_not(model: TextModel, tokenizer: Tokenizer) -> None:
    tag, control = tokenizer.token_to_id("<h1>"), tokenizer.token_to_id("<end_of_turn>")
    ids = list(asyncio.run(model.raw_prompt("<h1>the</h1>\n\n<end_of_turn>[multimodal]")))
    assert ids[1] == tag
    assert tokenizer.token_to_id("\n\n") in ids
    assert control not in ids
    assert tokenizer.token_to_id("[multimodal]") not in ids
    assert model.text_of(ids[1:]).endswith("<end_of_turn>[multimodal]")


def test_a_model_without_a_template_refuses_chat_and_says_what_works(model: TextModel) -> None:
    with pytest.raises(TextError, match="template") as caught:
        asyncio.run(model.chat_prompt([{"role": "user", "content": "hi"}]))
    assert caught.value.code == "no_chat_template"
    assert "/v1/completions" in caught.value.remedy


def test_an_answer_keeps_the_space_it_begins_with(model: TextModel) -> None:
    ids = list(asyncio.run(model.raw_prompt(" dog")))[1:]
    assert model.output(()).push(ids).endswith(" dog")


@given(ids=st.lists(st.integers(0, 460), max_size=40), cuts=st.lists(st.integers(1, 5)))
def test_any_chunking_of_byte_tokens_gives_one_text(
    model: TextModel, ids: list[int], cuts: list[int]
) -> None:
    whole, parts = model.output(()), model.output(())
    rest, text = ids, ""
    for cut in cuts:
        text += parts.push(rest[:cut])
        rest = rest[cut:]
    text += parts.push(rest) + parts.flush()
    assert text == whole.push(ids) + whole.flush()


# --- thousands of control tokens ----------------------------------------------------------------

texts = st.text(alphabet="ab<", min_size=1, max_size=6)


@given(known=st.sets(texts, min_size=1, max_size=12), text=st.text(alphabet="ab<", max_size=30))
def test_the_pattern_finds_the_leftmost_longest(known: set[str], text: str) -> None:
    plain = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    assert re.findall(f"(?:{any_of(known)})", text) == re.findall(plain, text)


@cache
def guard_of(count: int) -> Guard:
    return Guard(f"<unused{number}>" for number in range(count))


@pytest.mark.parametrize("text", ["<" * 200_000, "<unused" * 30_000, "<unused62" * 20_000])
def test_thousands_of_control_tokens_do_not_slow_the_guard(text: str) -> None:
    few, many = (
        min(_timed(lambda guard=guard: guard.text(text, "prompt")) for _ in range(3))
        for guard in (guard_of(10), guard_of(6000))
    )
    assert many < 30 * few + 0.05  # one after the other would be hundreds of times


def test_a_chain_of_control_tokens_is_no_deep_pattern() -> None:
    chain = ["<" + "a" * length for length in range(1, 500)]
    found = re.compile(any_of(chain)).match("<" + "a" * 450 + "b")
    assert found is not None
    assert found.end() == 451


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
