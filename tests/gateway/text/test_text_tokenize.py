"""Prompts to ids: segments equal the whole, and untrusted text never yields a control id."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.text import tokenize
from gateway.text.border_check import borders_hold
from gateway.text.errors import BundleError, TextError
from gateway.text.segments import SegmentCache
from gateway.text.specials import build_tokenizer, plain_tokenizer
from gateway.text.tokenize import PromptTokenizer
from policies.contract.bundle import Bundle

CONTROL = ["<|im_start|>", "<|im_end|>", "<|im_end|>x", "<tool_call>", "</think>", "<|endoftext|>"]
AWKWARD = [" ", "\n", "\r\n", "\u00a0", "\u200d", "e\u0301", "1", "'s", "<|", "im_end|>", "the dog"]
any_text = st.text(st.characters(exclude_characters="\ufdd0\ufdd1", codec="utf-8"), max_size=6)
plain_text = st.lists(st.sampled_from(AWKWARD) | any_text, max_size=8).map("".join)
hostile_text = st.lists(st.sampled_from([*CONTROL, *AWKWARD]) | any_text, max_size=8).map("".join)


@pytest.fixture(scope="module")
def tiny(tiny_json: bytes) -> PromptTokenizer:
    return PromptTokenizer(tiny_json)


@pytest.fixture(scope="module")
def metaspace(metaspace_json: bytes) -> PromptTokenizer:
    return PromptTokenizer(metaspace_json)


def encode(tokenizer: PromptTokenizer, rendered: str) -> list[int]:
    return list(asyncio.run(tokenizer.encode(rendered)))


def whole(tokenizer: PromptTokenizer, rendered: str) -> list[int]:
    ids: list[int] = tokenizer.full.encode(rendered, add_special_tokens=False).ids
    return ids


@given(parts=st.lists(plain_text | st.sampled_from(CONTROL), max_size=10))
def test_segments_equal_the_whole(tiny: PromptTokenizer, parts: list[str]) -> None:
    assert tiny.is_segmented
    rendered = "".join(parts)
    assert encode(tiny, rendered) == whole(tiny, rendered)
    assert encode(tiny, rendered) == whole(tiny, rendered)  # again, from the cache


@given(parts=st.lists(plain_text | st.sampled_from(CONTROL[:3]), max_size=10))
def test_without_hard_borders_the_whole_is_encoded(
    metaspace: PromptTokenizer, parts: list[str]
) -> None:
    assert not metaspace.is_segmented
    rendered = "".join(parts)
    assert encode(metaspace, rendered) == whole(metaspace, rendered)


@pytest.mark.parametrize("name", ["tiny", "metaspace"])
@given(text=hostile_text)
def test_special_text_in_content_stays_text(
    request: pytest.FixtureRequest, name: str, text: str
) -> None:
    tokenizer: PromptTokenizer = request.getfixturevalue(name)
    start, end = (tokenizer.full.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>"))
    control = {token.token_id for token in tokenizer.control}
    ids = encode(tokenizer, f"<|im_start|>{tokenizer.guard.text(text, 'x')}<|im_end|>")
    assert (ids[0], ids[-1]) == (start, end)
    assert not control.intersection(ids[1:-1])
    if name == "tiny":
        assert tokenizer.full.decode(ids[1:-1], skip_special_tokens=False) == text


def test_cutting_inside_a_literal_would_be_wrong(smollm2: PromptTokenizer) -> None:
    """Why segments end at control tokens only: a literal's newline merges with the content's."""
    rendered = "<|im_start|>user\n\n\nhello<|im_end|>"
    pieces = [whole(smollm2, part) for part in ("<|im_start|>user\n", "\n\nhello", "<|im_end|>")]
    assert [token for piece in pieces for token in piece] != whole(smollm2, rendered)
    assert encode(smollm2, rendered) == whole(smollm2, rendered)


def test_next_turn_encodes_only_its_new_segments(
    tiny: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[str]] = []
    real = tokenize._encode

    def recorded(tokenizer: Tokenizer, texts: list[str]) -> list[array[int]]:
        batches.append(texts)
        return real(tokenizer, texts)

    monkeypatch.setattr(tokenize, "_encode", recorded)
    first = "<|im_start|>user\nfirst turn<|im_end|>"
    encode(tiny, first)
    encode(tiny, f"{first}<|im_start|>user\nsecond<|im_end|><|im_start|>user\nsecond<|im_end|>")
    assert batches == [["user\nfirst turn"], ["user\nsecond"]]


def test_long_new_text_is_encoded_in_a_thread(tiny: PromptTokenizer) -> None:
    rendered = "<|im_start|>" + "the dog and 日本 " * 3_000
    seen: list[str] = []

    async def both() -> list[int]:
        async with asyncio.TaskGroup() as tasks:
            long = tasks.create_task(tiny.encode(rendered))
            await asyncio.sleep(0)
            seen.append("loop ran" if not long.done() else "loop was held")
        return list(long.result())

    assert asyncio.run(both()) == whole(tiny, rendered)
    assert seen == ["loop ran"]


@pytest.mark.parametrize("name", ["tiny", "metaspace"])
def test_lone_surrogate_is_refused_as_the_callers_fault(
    request: pytest.FixtureRequest, name: str
) -> None:
    with pytest.raises(TextError, match="surrogate"):
        encode(request.getfixturevalue(name), "<|im_start|>\ud800")


def changed(tokenizer_json: bytes, **values: object) -> bytes:
    return json.dumps(json.loads(tokenizer_json) | values).encode()


def with_rule(tokenizer_json: bytes, rule: str) -> bytes:
    parsed = json.loads(tokenizer_json)
    for token in parsed["added_tokens"]:
        token[rule] = True
    return json.dumps(parsed).encode()


@pytest.mark.parametrize("rule", ["lstrip", "rstrip", "single_word", "normalized"])
def test_soft_borders_are_tokenised_whole(tiny_json: bytes, rule: str) -> None:
    tokenizer = PromptTokenizer(with_rule(tiny_json, rule))
    assert not tokenizer.is_segmented
    rendered = "<|im_start|> user <|im_end|> x"
    assert encode(tokenizer, rendered) == whole(tokenizer, rendered)


def test_a_space_put_in_front_is_tokenised_whole(tiny_json: bytes) -> None:
    step = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert not PromptTokenizer(changed(tiny_json, pre_tokenizer=step)).is_segmented


def test_the_fuzz_finds_borders_that_do_not_hold(
    smollm2_bundle: Bundle, smollm2: PromptTokenizer
) -> None:
    parsed = json.loads(smollm2_bundle.tokenizer_json)

    def cut_at_newlines_too(texts: list[str]) -> list[list[int]]:
        lines = [text.splitlines(keepends=True) for text in texts]
        return [[token for line in parts for token in whole(smollm2, line)] for parts in lines]

    def check(by_segments: Callable[[list[str]], list[list[int]]]) -> bool:
        return borders_hold(parsed, smollm2.control, full=smollm2.full, by_segments=by_segments)

    assert check(lambda texts: [whole(smollm2, text) for text in texts])
    assert not check(cut_at_newlines_too)


def test_normalised_control_text_in_content_stays_text(tiny_json: bytes) -> None:
    """Full-width `＜|im_end|＞` becomes the control token inside a tokenizer that normalises."""
    parsed = json.loads(with_rule(tiny_json, "normalized"))
    parsed["normalizer"] = {"type": "NFKC"}
    tokenizer = PromptTokenizer(json.dumps(parsed).encode())
    end = tokenizer.full.token_to_id("<|im_end|>")
    text = "\uff1c|im_end|\uff1e"
    assert end in whole(tokenizer, text)
    ids = encode(tokenizer, f"<|im_start|>{tokenizer.guard.text(text, 'x')}")
    assert end not in ids


def test_truncation_and_padding_of_the_file_never_cut_a_prompt(tiny_json: bytes) -> None:
    tokenizer = Tokenizer.from_buffer(tiny_json)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    cutting = PromptTokenizer(tokenizer.to_str().encode())
    rendered = "<|im_start|>one two three four five six"
    assert encode(cutting, rendered) == whole(PromptTokenizer(tiny_json), rendered)


def test_a_model_cannot_find_control_tokens_by_itself() -> None:
    """Unigram knows its control tokens as pieces; without added tokens it would still match."""
    pieces = [["<unk>", 0.0], ["</s>", 0.0], *([char, -5.0] for char in "<>/sab")]
    parsed = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, text in enumerate(["<unk>", "</s>"])
        ],
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces},
    }
    naive = build_tokenizer(parsed | {"added_tokens": []})
    assert 1 in naive.encode("a</s>b").ids
    assert 1 not in plain_tokenizer(parsed, {"<unk>", "</s>"}).encode("a</s>b").ids


def test_what_the_vocabulary_lacks_is_dropped_and_never_a_control_token(tiny_json: bytes) -> None:
    parsed = json.loads(tiny_json)
    del parsed["model"]["vocab"]["Ė"]  # byte 0x16
    parsed["model"]["unk_token"] = "<|endoftext|>"
    tokenizer = PromptTokenizer(json.dumps(parsed).encode())
    assert tokenizer.is_segmented
    assert encode(tokenizer, "a\x16b") == whole(tokenizer, "a") + whole(tokenizer, "b")


def test_whitespace_runs_among_added_tokens_stay_text(tiny_json: bytes) -> None:
    tokenizer = Tokenizer.from_buffer(tiny_json)
    tokenizer.add_tokens(["        ", "\n\n\n"])
    prompt = PromptTokenizer(tokenizer.to_str().encode())
    assert {token.text for token in prompt.control}.isdisjoint({"        ", "\n\n\n"})
    rendered = "<|im_start|>a        b\n\n\n"
    assert encode(prompt, rendered) == whole(prompt, rendered)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"model": {}}', b"\xff\xfe", b'{"model": 3}']
)
def test_a_bundle_without_a_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(BundleError, match="tokenizer_json"):
        PromptTokenizer(data)


@given(
    puts=st.lists(st.tuples(st.text(max_size=30), st.integers(0, 40)), max_size=40),
    max_bytes=st.integers(0, 4_000),
)
def test_segment_cache_keeps_its_bound(puts: list[tuple[str, int]], max_bytes: int) -> None:
    cache = SegmentCache(max_bytes)
    for text, length in puts:
        cache.put(text, array("I", range(length)))
        assert cache.num_bytes <= max_bytes
        assert (len(cache) == 0) == (cache.num_bytes == 0)


def test_segment_cache_drops_the_least_recently_used() -> None:
    cache = SegmentCache(1_000)
    for text in ("a", "b", "c"):
        cache.put(text, array("I", [1]))
    assert cache.get("a") is not None
    cache.put("d", array("I", [1]))
    assert cache.get("b") is None
    assert cache.get("a") is not None


@pytest.fixture(scope="module")
def smollm2(smollm2_bundle: Bundle) -> PromptTokenizer:
    return PromptTokenizer(smollm2_bundle.tokenizer_json)


def test_default_model_is_segmented(smollm2: PromptTokenizer) -> None:
    assert smollm2.is_segmented


@pytest.mark.slow
@settings(max_examples=15_000, deadline=None)
@given(parts=st.lists(plain_text | st.sampled_from(CONTROL), max_size=12))
def test_default_model_segments_equal_the_whole(smollm2: PromptTokenizer, parts: list[str]) -> None:
    rendered = "".join(parts)
    assert encode(smollm2, rendered) == whole(smollm2, rendered)
