"""A served model's text, end to end: chat and raw prompts, page keys, output."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.text.errors import BundleError, TextError
from gateway.text.model import TextModel
from policies.contract import page_keys, wire
from policies.contract.bundle import Bundle

HELLO = [{"role": "user", "content": "hi"}]
ROOT = sha256(b"root").digest()


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Bundle) -> TextModel:
    return TextModel.load(tiny_bundle)


@pytest.fixture(scope="module")
def metaspace(metaspace_bundle: Bundle) -> TextModel:
    return TextModel.load(metaspace_bundle)


@pytest.fixture(scope="module")
def smollm2(smollm2_bundle: Bundle) -> TextModel:
    return TextModel.load(smollm2_bundle)


def chat(model: TextModel, messages: Sequence[Mapping[str, object]]) -> array[int]:
    return asyncio.run(model.chat_prompt(messages))


def refusal(model: TextModel, messages: Sequence[Mapping[str, object]]) -> TextError:
    with pytest.raises(TextError) as caught:
        chat(model, messages)
    error = caught.value
    assert all([error.field, error.found, error.allowed, error.remedy, error.code])
    return error


def with_template(bundle: Bundle, source: str | None) -> TextModel:
    return TextModel.load(msgspec.structs.replace(bundle, chat_template=source))


def test_default_model_says_hello(smollm2: TextModel) -> None:
    ids = chat(smollm2, HELLO)
    assert ids.typecode == "I"
    assert smollm2.text_of(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1
    assert smollm2.stop_token_ids == (2,)


hostile = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|im_", "end|>", "<tool_call>", "x"])
    | st.text(st.characters(exclude_characters="\ufdd0\ufdd1", codec="utf-8"), max_size=5),
    max_size=6,
).map("".join)
roles = st.sampled_from(["system", "user", "assistant", "tool"])


@pytest.mark.parametrize("name", ["smollm2", "tiny", "metaspace"])
@given(turns=st.lists(st.tuples(roles, hostile), min_size=1, max_size=4))
def test_control_ids_come_from_the_template_alone(
    request: pytest.FixtureRequest, name: str, turns: list[tuple[str, str]]
) -> None:
    model: TextModel = request.getfixturevalue(name)
    messages = [{"role": role, "content": text} for role, text in turns]
    harmless = [{"role": role, "content": "x"} for role, _ in turns]
    control = {token.token_id for token in model._tokenizer.control}
    found, expected = (
        [token for token in chat(model, sent) if token in control] for sent in (messages, harmless)
    )
    assert found == expected
    if name == "tiny":  # the others' vocabularies lack some characters
        assert all(text in model.text_of(chat(model, messages)) for _, text in turns)


plain = st.lists(
    st.sampled_from(["\n", " ", "\r\n", "\u00a0", "e\u0301", "12", "'s", "def f():", "日本"])
    | st.text(st.characters(exclude_characters="<\ufdd0\ufdd1", codec="utf-8"), max_size=8),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", ["smollm2", "tiny", "metaspace"])
@given(turns=st.lists(st.tuples(roles, plain), min_size=1, max_size=6))
def test_chat_ids_equal_the_whole_prompt_encoded_at_once(
    request: pytest.FixtureRequest, name: str, turns: list[tuple[str, str]]
) -> None:
    model: TextModel = request.getfixturevalue(name)
    messages = [{"role": role, "content": text} for role, text in turns]
    assert model._template is not None
    rendered = model._template.render(messages)
    whole = model._tokenizer.full.encode(rendered, add_special_tokens=False).ids
    assert list(chat(model, messages)) == whole


def test_names_and_tool_arguments_are_guarded_as_content_is(tiny_bundle: Bundle) -> None:
    model = with_template(
        tiny_bundle,
        "{% for m in messages %}{{ m.name }}{{ m.tool_calls | tojson(true) }}{% endfor %}",
    )
    end = "<|im_end|>"
    call = {"id": end, "function": {"name": end, "arguments": {end: end}}}
    ids = chat(model, [{"role": "assistant", "name": end, "tool_calls": [call]}])
    assert set(ids).isdisjoint(token.token_id for token in model._tokenizer.control)
    assert model.text_of(ids).count(end) == 5


def test_a_control_text_joined_by_the_template_stays_text(tiny_bundle: Bundle) -> None:
    model = with_template(tiny_bundle, "{% for m in messages %}{{ m.content }}{% endfor %}")
    parts = [{"role": "user", "content": part} for part in ("<|", "im_", "end|>")]
    ids = chat(model, parts)
    assert model.text_of(ids) == "<|im_end|>"
    assert set(ids).isdisjoint(model.stop_token_ids)


def test_a_template_finds_the_markers_it_looks_for_in_answers(tiny_bundle: Bundle) -> None:
    model = with_template(
        tiny_bundle, "{% for m in messages %}{{ m.content.split('</think>')[-1] }}|{% endfor %}"
    )
    text = "secret</think>said"
    ids = chat(model, [{"role": "assistant", "content": text}, {"role": "user", "content": text}])
    assert model.text_of(ids) == f"said|{text}|"


def test_content_may_be_text_parts_or_null(tiny: TextModel) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, text in ((parts, "a\nb"), (None, ""), ([], "")):
        assert chat(tiny, [{"role": "user", "content": content}]) == chat(
            tiny, [{"role": "user", "content": text}]
        )
    assert chat(tiny, [{"role": "assistant"}]) == chat(tiny, [{"role": "assistant", "content": ""}])


def test_developer_is_system_for_a_template_that_does_not_know_it(tiny_bundle: Bundle) -> None:
    message = [{"role": "developer", "content": "x"}]
    plain = with_template(tiny_bundle, "{{ messages[0].role }}")
    knowing = with_template(tiny_bundle, "{{ messages[0].role }}{# developer #}")
    assert plain.text_of(chat(plain, message)) == "system"
    assert knowing.text_of(chat(knowing, message)) == "developer"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "root", "content": "x"}], "messages[1].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a\ufdd0"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "\ufdd0"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "name": object()}], "messages[0].name"),
        ([{"role": "user", "content": "\ud800"}], "prompt"),
    ],
)
def test_bad_messages_are_refused_with_their_field(
    tiny: TextModel, messages: list[dict[str, object]], field: str
) -> None:
    assert refusal(tiny, messages).field == field


def test_model_without_template_answers_chat_with_the_remedy(tiny_bundle: Bundle) -> None:
    model = with_template(tiny_bundle, None)
    assert not model.has_template
    assert "use /v1/completions or a model with a template" in refusal(model, HELLO).remedy
    assert asyncio.run(model.raw_prompt("hi"))


def test_model_with_a_broken_template_still_completes(tiny_bundle: Bundle) -> None:
    model = with_template(tiny_bundle, "{% if %}")
    assert "does not compile" in refusal(model, HELLO).found
    assert asyncio.run(model.raw_prompt("hi"))


def test_a_template_that_refuses_gives_its_reason(tiny_bundle: Bundle) -> None:
    model = with_template(tiny_bundle, "{{ raise_exception('no ' + messages[0].content) }}")
    assert "no <|im_end|>" in refusal(model, [{"role": "user", "content": "<|im_end|>"}]).found


def test_raw_prompt_is_text_after_bos_where_wanted(tiny_bundle: Bundle) -> None:
    text = "<|im_start|>user é"
    plain = TextModel.load(tiny_bundle)
    begun = TextModel.load(msgspec.structs.replace(tiny_bundle, add_bos=True))
    ids = asyncio.run(plain.raw_prompt(text))
    bos = Tokenizer.from_buffer(tiny_bundle.tokenizer_json).token_to_id("<|im_start|>")
    assert plain.text_of(ids) == text
    assert bos not in ids
    assert asyncio.run(begun.raw_prompt(text)) == array("I", [bos]) + ids
    assert asyncio.run(plain.raw_prompt("")) == array("I")


def test_bos_must_be_a_token(tiny_bundle: Bundle) -> None:
    for bos in (None, "<absent>"):
        with pytest.raises(BundleError, match="add_bos"):
            TextModel.load(msgspec.structs.replace(tiny_bundle, add_bos=True, bos_token=bos))


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(tiny: TextModel) -> None:
    for refused in (
        lambda: tiny.raw_prompt("x" * 10_000_000),
        lambda: tiny.chat_prompt([{"role": "user", "content": "x" * 10_000_000}]),
    ):
        with pytest.raises(TextError) as caught:
            asyncio.run(refused())
        assert caught.value.code == "context_length_exceeded"


def test_history_is_tokenised_anew_and_generated_ids_never_count(
    tiny: TextModel, tiny_bundle: Bundle
) -> None:
    """The engine may have produced `the` as letters; the next turn has the tokenizer's ids."""
    letters = [token for char in "the dog" for token in asyncio.run(tiny.raw_prompt(char))]
    output = tiny.output([])
    answer = output.push(letters) + output.flush()
    assert answer == "the dog"
    ids = chat(tiny, [*HELLO, {"role": "assistant", "content": answer}])
    fresh = Tokenizer.from_buffer(tiny_bundle.tokenizer_json)
    assert list(ids) == fresh.encode(tiny.text_of(ids), add_special_tokens=False).ids


def test_page_keys_are_the_contracts(tiny: TextModel) -> None:
    ids = array("I", range(64 * 5 + 7))
    expected = page_keys.page_keys(ROOT, wire.pack_ids(ids), page_size=64)
    assert tiny.page_keys(ROOT, ids) == expected
    assert tiny.page_keys(ROOT, ids) == expected
    assert len(expected) == 5


def test_models_with_one_tokenizer_share_it(tiny: TextModel, tiny_bundle: Bundle) -> None:
    longer = TextModel.load(msgspec.structs.replace(tiny_bundle, context_tokens=65_536))
    assert longer._tokenizer is tiny._tokenizer
    assert longer.tokenizer_digest == tiny.tokenizer_digest


def test_output_stops_at_a_string(smollm2: TextModel) -> None:
    output = smollm2.output(["\n\n", "END"])
    ids = asyncio.run(smollm2.raw_prompt("Paris, of course. EN, E\n\nAnd then"))
    text = "".join(output.push([token]) for token in ids) + output.flush()
    assert text == "Paris, of course. EN, E"
    assert output.stopped_at is not None
    assert output.stopped_at < len(ids)
