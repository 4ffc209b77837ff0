"""GGUF vocabularies: the ids that llama.cpp gave, and SentencePiece merging done by hand.

llama_cpp_tokens.jsonl holds what llama_tokenize (llama-cpp-python 0.3.36, parse_special) answered:
for SmolLM2's vocabulary (with_digits) under each pre-tokenizer name, for gemma3-270m, and for the
vocabulary of Gemma without settings, which means a bos and a space in front.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, trainers

from node_agent import gguf_vocab
from node_agent.bundle import gguf_bundle
from node_agent.catalogue import load_catalogue
from node_agent.checkpoints import ensure, models_folder, resolve
from node_agent.errors import NodeError
from node_agent.gguf import read_gguf
from node_agent.gguf_vocab import BYTES, PRE_RULES, SPACE, gguf_tokenizer, read_vocabulary

RECORDED = Path(__file__).with_name("llama_cpp_tokens.jsonl")
Values = dict[str, object]


@cache
def recorded() -> list[dict[str, object]]:
    return [json.loads(line) for line in RECORDED.read_text().splitlines()]


@cache
def file_values(name: str) -> Values:
    checkpoint = ensure(resolve(name, load_catalogue(), models_folder()))
    return read_gguf(checkpoint.path).metadata


def tokenizer_of(values: Values) -> Tokenizer:
    return gguf_tokenizer(read_vocabulary(values), values)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def with_digits(values: Values) -> Values:
    """SmolLM2's vocabulary knows digits alone: here also pairs and triples of them."""
    tokens, merges = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.merges"]
    types = values["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(merges, list) and isinstance(types, list)  # noqa: PT018
    pairs = [f"{number:02}" for number in range(100)]
    triples = [f"{number:03}" for number in range(1000)]
    return {
        **values,
        "tokenizer.ggml.tokens": [*tokens, *pairs, *triples],
        "tokenizer.ggml.token_type": [*types, *[1] * (len(pairs) + len(triples))],
        "tokenizer.ggml.merges": [
            *merges,
            *(f"{pair[0]} {pair[1]}" for pair in pairs),
            *(f"{triple[:2]} {triple[2]}" for triple in triples),
        ],
    }


def differing(tokenizer: Tokenizer, rule: str) -> list[object]:
    return [row["text"] for row in recorded() if ids_of(tokenizer, str(row["text"])) != row[rule]]


# --- as llama.cpp -------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"])
def test_every_pre_tokenizer_gives_the_ids_of_llama_cpp(pre: str) -> None:
    values = {**with_digits(file_values("smollm2-135m")), "tokenizer.ggml.pre": pre}
    assert len(recorded()) > 150
    assert differing(tokenizer_of(values), pre) == []


def test_the_pre_tokenizers_differ() -> None:
    """Else the test above could not tell them apart."""
    names = ("smollm", "gpt-2", "default", "llama-bpe", "qwen2")
    columns = {name: [row[name] for row in recorded()] for name in names}
    assert len({json.dumps(column) for column in columns.values()}) == len(names)
    assert set(names) <= set(PRE_RULES)


def test_llama_3_wants_a_bos_unless_the_file_says_otherwise() -> None:
    values = file_values("smollm2-135m")
    values = {key: value for key, value in values.items() if key != "tokenizer.ggml.add_bos_token"}
    assert read_vocabulary({**values, "tokenizer.ggml.pre": "llama-bpe"}).add_bos
    assert not read_vocabulary({**values, "tokenizer.ggml.pre": "qwen2"}).add_bos
    said = {**values, "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    assert not read_vocabulary(said).add_bos


def test_the_end_of_a_turn_that_the_file_names_is_a_stop() -> None:
    values = {**file_values("smollm2-135m"), "tokenizer.ggml.eot_token_id": 7}
    bundle = gguf_bundle(values, context_tokens=None, page_size=64, labels=())
    assert bundle.stop_token_ids == (2, 7, 0)


@pytest.mark.slow
def test_gemma_gives_the_ids_of_llama_cpp() -> None:
    values = file_values("gemma3-270m")
    assert differing(tokenizer_of(values), "gemma") == []
    bare = {
        key: value
        for key, value in values.items()
        if key not in ("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_bos_token")
    }
    assert differing(tokenizer_of(bare), "gemma with a space in front") == []
    assert read_vocabulary(bare).add_bos


@pytest.mark.slow
def test_the_bundle_of_gemma_says_what_the_model_is() -> None:
    bundle = gguf_bundle(file_values("gemma3-270m"), context_tokens=None, page_size=64, labels=())
    # <eos> and <end_of_turn>; </s> is a tag of HTML here, and no end
    assert bundle.stop_token_ids == (1, 106)
    assert (bundle.bos_token, bundle.eos_token, bundle.add_bos) == ("<bos>", "<eos>", True)
    assert (bundle.context_tokens, bundle.vocab_size) == (32768, 262144)
    assert bundle.chat_template is None


@pytest.mark.slow
def test_gemma_merges_as_by_hand() -> None:
    values = file_values("gemma3-270m")
    tokenizer = tokenizer_of(values)
    by_hand = ByHand(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"])

    @settings(max_examples=2000, deadline=None)
    @given(text=plain_texts)
    def check(text: str) -> None:
        assert ids_of(tokenizer, text) == by_hand.ids(text)

    check()


# --- SentencePiece by hand ----------------------------------------------------------------------


class ByHand:
    """The best score joins first, of equals the leftmost; what is no token becomes its bytes."""

    def __init__(self, tokens: object, scores: object) -> None:
        assert isinstance(tokens, list)
        assert isinstance(scores, list)
        self._id = {token: index for index, token in enumerate(tokens)}
        self._scores = scores

    def ids(self, text: str) -> list[int]:
        symbols = list(text.replace(" ", SPACE))
        while True:
            joins = [
                (-self._scores[self._id[left + right]], place)
                for place, (left, right) in enumerate(pairwise(symbols))
                if left + right in self._id
            ]
            if not joins:
                break
            _, place = min(joins)
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        ids: list[int] = []
        for symbol in symbols:
            if symbol in self._id:
                ids.append(self._id[symbol])
            else:
                ids += [self._id[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return ids


# Runs of spaces, tabs, newlines and tags are tokens of their own in Gemma: other tests see to them.
words = st.sampled_from(
    ["the ", "cat", " sat", "on", "mat", "aa", "a", "==", "--", "0", "12", "é", "日本", "🙂", "x_"]
)
plain_texts = st.lists(
    words | st.text(st.characters(exclude_categories=("Cs",)), max_size=3), max_size=12
).map(lambda parts: "".join(parts).translate(dict.fromkeys(map(ord, "\n\t<["), "n")))
plain_texts = plain_texts.map(lambda text: " ".join(text.split(" ")).replace("  ", " x"))


@cache
def small_vocabulary() -> Values:
    """As SentencePiece trains one: pieces that joined, each scored by when it did."""
    corpus = [
        "the cat sat on the mat and the hat of the bat was flat",
        "aaaa aaa aa a ==== === == ---- x_y x_z 0123 120 12 1212 cat12",
        "der Hut der Katze, die Matte: été ét é",
    ] * 5
    learner = Tokenizer(models.BPE())
    learner.train_from_iterator(
        [line.replace(" ", SPACE) for line in corpus],
        trainers.BpeTrainer(vocab_size=200, show_progress=False),
    )
    pieces = [learner.id_to_token(index) for index in range(learner.get_vocab_size())]
    added = ["<unk>", "<s>", "</s>", "\n\n", "<h1>"]
    tokens = [*added, *BYTES, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - len(pieces))
        + [-float(place) for place in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, 4, 4] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.add_space_prefix": False,
        "llama.context_length": 512,
        "general.architecture": "llama",
    }


@settings(max_examples=300, deadline=None)
@given(text=plain_texts)
def test_sentencepiece_merges_as_by_hand(text: str) -> None:
    values = small_vocabulary()
    by_hand = ByHand(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"])
    assert ids_of(tokenizer_of_small(), text) == by_hand.ids(text)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", min_size=2, max_size=5), unique=True, max_size=15),
    text=st.text("ab", max_size=25),
)
def test_any_pieces_with_any_scores_merge_as_by_hand(pieces: list[str], text: str) -> None:
    tokens = ["a", "b", *BYTES, *pieces]
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(place) for place in range(len(pieces))]
    tokenizer = tokenizer_of(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    assert ids_of(tokenizer, text) == ByHand(tokens, scores).ids(text)


@cache
def tokenizer_of_small() -> Tokenizer:
    return tokenizer_of(small_vocabulary())


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters=SPACE)))
def test_sentencepiece_text_comes_back_from_its_ids(text: str) -> None:
    tokenizer = tokenizer_of_small()
    assert tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False) == text


def test_a_space_goes_in_front_of_each_part_where_the_file_does_not_forbid_it() -> None:
    values = small_vocabulary()
    values = {key: value for key, value in values.items() if "space_prefix" not in key}
    tokenizer = tokenizer_of(values)
    assert ids_of(tokenizer, "cat") == ids_of(tokenizer_of_small(), " cat")
    assert tokenizer.decode(ids_of(tokenizer, "cat")) == "cat"
    cat = ids_of(tokenizer, "cat")
    assert ids_of(tokenizer, "cat</s>cat") == [*cat, 2, *cat]
    vocabulary = read_vocabulary(values)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.add_bos) == (1, 2, True)


def test_user_defined_tokens_are_found_before_merging_and_are_text() -> None:
    tokenizer = tokenizer_of_small()
    ids = ids_of(tokenizer, "a\n\n<h1>a\n")
    a, newline = ids_of(tokenizer, "a"), BYTES.index("<0x0A>") + 5
    assert ids == [*a, 3, 4, *a, newline]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a\n\n<h1>a\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.scores", None),
        ("tokenizer.ggml.scores", [0.0]),
        ("tokenizer.ggml.tokens", ["a", "b"]),
        ("tokenizer.ggml.token_type", None),
        ("tokenizer.ggml.bos_token_id", 1 << 40),
    ],
)
def test_a_damaged_sentencepiece_vocabulary_is_refused(key: str, value: object) -> None:
    with pytest.raises(NodeError, match="tokenizer"):
        gguf_bundle(
            {**small_vocabulary(), key: value}, context_tokens=None, page_size=64, labels=()
        )


def with_scores(*scores: object) -> Values:
    values = small_vocabulary()
    tokens = values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return {**values, "tokenizer.ggml.scores": [*scores, *[0.0] * (len(tokens) - len(scores))]}


def with_tokens(*more: str) -> Values:
    added: dict[str, list[object]] = {"tokens": [*more], "scores": [0.0] * len(more)}
    added["token_type"] = [1] * len(more)
    values = dict(small_vocabulary())
    for name, items in added.items():
        old = values[f"tokenizer.ggml.{name}"]
        assert isinstance(old, list)
        values[f"tokenizer.ggml.{name}"] = [*old, *items]
    return values


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (with_scores(float("nan")), "no number"),
        (with_scores("high"), "no number"),
        (with_tokens("x" * 200_000), "200000 characters"),  # 40 GB of characters to cut
        (with_tokens(*("\u4e00" * size for size in range(1, 300))), "more than 400 pairs"),
    ],
)
def test_a_sentencepiece_vocabulary_whose_merges_have_no_end_or_order_is_refused(
    values: Values, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_vocab, "MAX_MERGES", 400)
    with pytest.raises(NodeError, match=found):
        tokenizer_of(values)


def test_more_tokens_than_an_engine_takes_are_refused_before_they_are_named() -> None:
    values = {**small_vocabulary(), "tokenizer.ggml.tokens": [""] * ((1 << 22) + 1)}
    with pytest.raises(NodeError, match="4194305 tokens"):
        read_vocabulary(values)


def test_a_vocabulary_without_its_bytes_is_refused() -> None:
    values = small_vocabulary()
    tokens = values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    renamed = ["<0xZZ>" if token == "<0x41>" else token for token in tokens]
    with pytest.raises(NodeError, match="<0x41>"):
        tokenizer_of({**values, "tokenizer.ggml.tokens": renamed})


def test_a_bundle_of_a_small_sentencepiece_vocabulary_is_built() -> None:
    bundle = gguf_bundle(small_vocabulary(), context_tokens=None, page_size=64, labels=())
    assert (bundle.bos_token, bundle.eos_token, bundle.add_bos) == ("<s>", "</s>", True)
    assert bundle.stop_token_ids == (2,)
    assert bundle.context_tokens == 512
