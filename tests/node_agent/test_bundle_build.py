"""Tokenizer bundles: the default model's, and those of local folders."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from node_agent.bundle import folder_bundle, gguf_bundle, load_bundle
from node_agent.catalogue import load_catalogue
from node_agent.checkpoints import models_folder, prepare, resolve
from node_agent.errors import NodeError
from node_agent.gguf import read_gguf
from node_agent.gguf_vocab import gguf_tokenizer, read_vocabulary
from policies.contract.bundle import decode_bundle


def default_gguf() -> Path:
    catalogue = load_catalogue()
    checkpoint = resolve(catalogue.default, catalogue, models_folder())
    assert checkpoint.path.exists(), (
        f"{checkpoint.path} is absent: python -m node_agent models pull {catalogue.default}"
    )
    return checkpoint.path


@pytest.fixture(scope="module")
def values() -> dict[str, object]:
    return read_gguf(default_gguf()).metadata


@pytest.fixture(scope="module")
def tokenizer(values: dict[str, object]) -> Tokenizer:
    return gguf_tokenizer(read_vocabulary(values), values)


# --- the default model ---------------------------------------------------------------------------


def test_the_default_bundle_says_what_the_model_is(values: dict[str, object]) -> None:
    bundle = gguf_bundle(values, context_tokens=None, page_size=64, labels=("a",))
    assert bundle.stop_token_ids == (2, 0)
    assert (bundle.bos_token, bundle.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert bundle.add_bos is False
    assert bundle.context_tokens == 8192
    assert bundle.vocab_size == 49152
    assert bundle.chat_template == values["tokenizer.chat_template"]
    assert bundle.labels == ("a",)
    assert Tokenizer.from_str(bundle.tokenizer_json.decode()).get_vocab_size() == 49152


def test_every_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x²12 ½ 2026", add_special_tokens=False).ids
    pieces = [tokenizer.decode([i]) for i in ids]
    assert [piece for piece in pieces if piece.strip().isdigit() and piece.isascii()] == list(
        "122026"
    )


def test_a_space_is_not_put_in_front(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hi").ids != tokenizer.encode(" hi").ids


def test_control_tokens_are_whole_and_keep_their_ids(
    tokenizer: Tokenizer, values: dict[str, object]
) -> None:
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    control = [i for i, kind in enumerate(types) if kind == 3]
    assert len(control) == 17
    for index in control:
        assert tokenizer.encode(f"a{tokens[index]}b").ids[1:-1] == [index]
    for index in range(0, len(tokens), 97):
        assert tokenizer.id_to_token(index) == tokens[index]


# SmolLM2's vocabulary has no token for these bytes (six control characters, and planes 4 to 11,
# where no character is assigned): llama.cpp drops them, and so does a tokenizer of this vocabulary.
NO_TOKEN = bytes([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2])


def has_tokens(character: str) -> bool:
    return not set(character.encode()) & set(NO_TOKEN)


texts = st.text(alphabet=st.characters(exclude_categories=("Cs",)).filter(has_tokens), max_size=200)


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_text_comes_back_from_its_ids(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_bytes_without_a_token_are_dropped_as_in_llama_cpp(tokenizer: Tokenizer) -> None:
    for code in (*NO_TOKEN[:6], 0x40000):
        ids = tokenizer.encode(f"a{chr(code)}b", add_special_tokens=False).ids
        kept = bytes(byte for byte in f"a{chr(code)}b".encode() if byte not in NO_TOKEN)
        assert tokenizer.decode(ids) == kept.decode(errors="replace")


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(text=texts)
def test_text_comes_back_from_its_ids_full_count(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(texts, max_size=4))
def test_control_tokens_are_hard_borders(tokenizer: Tokenizer, parts: list[str]) -> None:
    whole = tokenizer.encode("<|im_end|>".join(parts), add_special_tokens=False).ids
    pieces: list[int] = []
    for index, part in enumerate(parts):
        pieces += [2] * (index > 0)
        pieces += tokenizer.encode(part, add_special_tokens=False).ids
    assert whole == pieces


def test_unknown_pre_tokenizer_is_refused_with_the_remedy(values: dict[str, object]) -> None:
    with pytest.raises(NodeError, match=r"tokenizer\.ggml\.pre") as caught:
        read_vocabulary({**values, "tokenizer.ggml.pre": "falcon"})
    assert "'falcon'" in caught.value.found
    assert "smollm" in caught.value.allowed
    assert "tokenizer.json" in caught.value.remedy
    with pytest.raises(NodeError, match=r"tokenizer\.ggml\.model"):
        read_vocabulary({**values, "tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.merges", ["zz qq"]),
        ("tokenizer.ggml.merges", None),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.tokens", ["a", "a"]),
        ("tokenizer.ggml.tokens", 5),
        ("tokenizer.ggml.eos_token_id", 1 << 30),
        ("llama.context_length", "long"),
        ("llama.context_length", -1),
    ],
)
def test_a_damaged_vocabulary_is_an_error_and_not_a_crash(
    values: dict[str, object], key: str, value: object
) -> None:
    damaged = {**values, key: value}
    if value == ["a", "a"]:
        damaged["tokenizer.ggml.token_type"] = [1, 1]
    with pytest.raises(NodeError):
        gguf_bundle(damaged, context_tokens=None, page_size=64, labels=())


def test_a_vocabulary_that_loses_text_is_refused() -> None:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1, 1],
    }
    with pytest.raises(NodeError, match="round trip"):
        gguf_bundle(values, context_tokens=10, page_size=64, labels=())


def test_the_long_model_has_its_own_identity_and_label(tmp_path: Path) -> None:
    default_gguf()
    catalogue, folder = load_catalogue(), models_folder()
    short, long = (
        prepare(resolve(name, catalogue, folder), bundle_caches=(tmp_path,))
        for name in ("smollm2-135m", "smollm2-135m-32k")
    )
    assert short.spec.identity != long.spec.identity
    assert short.spec.tokenizer_digest == long.spec.tokenizer_digest
    assert short.spec.bundle_digest != long.spec.bundle_digest
    assert decode_bundle(long.bundle).context_tokens == 32768
    assert decode_bundle(long.bundle).labels == ("protocol demo",)
    assert long.spec.rope_scaling is not None
    assert long.spec.rope_scaling.factor == 4.0


# --- kept on disk --------------------------------------------------------------------------------


def test_a_bundle_is_built_once_and_a_damaged_one_again(tmp_path: Path) -> None:
    def load(context: int | None = None) -> tuple[Path, bytes]:
        return load_bundle(
            folder, cache, source_digest="d", context_tokens=context, page_size=64, labels=()
        )

    folder, cache = write_folder(tmp_path), tmp_path / "cache"
    file, encoded = load()
    assert file.read_bytes() == encoded
    (folder / "tokenizer.json").unlink()  # a second build would fail
    assert load() == (file, encoded)
    write_folder(tmp_path)
    file.write_bytes(encoded[:-5])
    assert load() == (file, encoded)
    assert load(context=99)[0] != file
    assert not list(cache.glob(".*"))


def test_a_cached_default_bundle_is_found_in_a_moment(tmp_path: Path) -> None:
    default_gguf()
    catalogue = load_catalogue()
    checkpoint = resolve(catalogue.default, catalogue, models_folder())
    prepare(checkpoint, bundle_caches=(tmp_path,))
    begun = time.process_time()
    prepare(checkpoint, bundle_caches=(tmp_path,))
    assert time.process_time() - begun < 1.0


def test_a_read_only_models_folder_falls_back_to_home(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    checkpoint = resolve(str(folder), load_catalogue(), tmp_path)
    prepared = prepare(checkpoint, bundle_caches=(blocked / "bundles", tmp_path / "home"))
    assert prepared.bundle_path.is_relative_to(tmp_path / "home")
    with pytest.raises(NodeError, match="folder"):
        prepare(checkpoint, bundle_caches=(blocked / "bundles",))


# --- Hugging Face folders ------------------------------------------------------------------------


def write_folder(parent: Path, **settings: object) -> Path:
    folder = parent / "model"
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                },
                "decoder": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                },
                "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
            }
        )
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<s>", "</s>", "<|eot_id|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        json.dumps({"max_position_embeddings": 512, "vocab_size": 8, "eos_token_id": 3})
    )
    written = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "own"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**written, **settings}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 3]}))
    return folder


def test_folder_bundle_gathers_stop_ids_from_all_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    bundle = folder_bundle(folder, context_tokens=None, page_size=16, labels=())
    assert bundle.stop_token_ids == (4, 3)
    assert (bundle.bos_token, bundle.eos_token, bundle.add_bos) == ("<s>", "</s>", False)
    assert (bundle.context_tokens, bundle.vocab_size, bundle.page_size) == (512, 8, 16)
    assert bundle.chat_template == "own"
    assert bundle.tokenizer_json == (folder / "tokenizer.json").read_bytes()


def test_a_template_file_wins_over_the_setting(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ 'file' }}\n")
    bundle = folder_bundle(folder, context_tokens=None, page_size=16, labels=())
    assert bundle.chat_template == "{{ 'file' }}\n"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ([{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool", "template": "t"}], None),
        (None, None),
    ],
)
def test_named_templates_and_none(tmp_path: Path, setting: object, expected: object) -> None:
    folder = write_folder(tmp_path, chat_template=setting)
    bundle = folder_bundle(folder, context_tokens=None, page_size=16, labels=())
    assert bundle.chat_template == expected


def test_a_tokenizer_that_begins_with_bos_says_so(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = write_folder(tmp_path)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.save(str(file))
    assert folder_bundle(folder, context_tokens=None, page_size=16, labels=()).add_bos


def test_what_the_tokenizer_settings_leave_out_the_config_says(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, bos_token=None, eos_token=None, add_bos_token=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "bos_token_id": 2,
                "eos_token_id": [3, 4, -1],
                "text_config": {"max_position_embeddings": 64, "vocab_size": 9},
            }
        )
    )
    (folder / "generation_config.json").unlink()
    bundle = folder_bundle(folder, context_tokens=None, page_size=16, labels=())
    assert (bundle.bos_token, bundle.eos_token, bundle.add_bos) == ("<s>", "</s>", True)
    assert bundle.stop_token_ids == (3, 4)
    assert (bundle.context_tokens, bundle.vocab_size) == (64, 9)


def test_the_end_of_a_turn_stops_where_the_files_do_not_name_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<end_of_turn>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<|end|>", special=False)])  # text: no end
    tokenizer.save(str(file))
    bundle = folder_bundle(folder, context_tokens=None, page_size=16, labels=())
    assert bundle.stop_token_ids == (4, 3, 6, 5)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("config.json", "[1"),
        ("config.json", "{}"),
    ],
)
def test_a_broken_folder_names_the_file(tmp_path: Path, name: str, content: str | None) -> None:
    folder = write_folder(tmp_path)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(NodeError):
        folder_bundle(folder, context_tokens=None, page_size=16, labels=())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "BPE", "continuing_subword_prefix": "####", "vocab": {"a": 0, "b": 1,
                   "ab": 2}, "merges": ["a b"]}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                            "single": [{"SpecialToken": {"id": "Q", "type_id": 0}}]}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 4294967295}, "merges": []}},
    ],
)  # fmt: skip
def test_a_tokenizer_that_the_library_panics_at_or_that_fills_memory_is_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    folder = write_folder(tmp_path)
    found = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(found | changes))
    with pytest.raises(NodeError, match=r"tokenizer\.json") as caught:
        folder_bundle(folder, context_tokens=None, page_size=16, labels=())
    assert len(caught.value.found) <= 200


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_text_file_in_another_encoding_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path)
    (folder / name).write_bytes("{{ 'é' }}".encode("utf-16"))
    with pytest.raises(NodeError, match=name):
        folder_bundle(folder, context_tokens=None, page_size=16, labels=())


def test_ids_that_no_tokenizer_has_are_no_stops(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, eos_token=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"eos_token_id": [1 << 40, True, 3], "bos_token_id": 1 << 40})
    )
    bundle = folder_bundle(folder, context_tokens=None, page_size=16, labels=())
    assert 3 in bundle.stop_token_ids
    assert max(bundle.stop_token_ids) < 8


# --- hostile GGUF headers ------------------------------------------------------------------------


def gguf(*pairs: bytes, values: int | None = None, tensors: int = 0, version: int = 3) -> bytes:
    count = len(pairs) if values is None else values
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + b"".join(pairs)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(40),
        gguf(version=1),
        gguf(values=1 << 62),
        gguf(tensors=1 << 62),
        gguf(struct.pack("<Q", 1 << 63)),
        gguf(text(b"k") + struct.pack("<I", 99)),
        gguf(text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60)),
        gguf(text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 62)),
        gguf(text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 500),
        gguf(text(b"k") + struct.pack("<I", 8) + text(b"\xff\xfe")),
    ],
)
def test_truncated_or_hostile_header_is_a_clear_error(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(data)
    with pytest.raises(NodeError, match=r"checkpoint bad\.gguf") as caught:
        read_gguf(file)
    assert caught.value.remedy


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 1_785_663))
def test_a_default_model_cut_in_its_header_is_refused(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    file = tmp_path_factory.mktemp("cut") / "cut.gguf"
    with default_gguf().open("rb") as source:
        file.write_bytes(source.read(cut))
    with pytest.raises(NodeError):
        read_gguf(file)
    file.unlink()


def test_scalars_and_arrays_are_read(tmp_path: Path) -> None:
    file = tmp_path / "good.gguf"
    file.write_bytes(
        gguf(
            text(b"a") + struct.pack("<Ii", 5, -3),
            text(b"b") + struct.pack("<I?", 7, True),
            text(b"c") + struct.pack("<IIQ", 9, 8, 2) + text(b"x") + text("é".encode()),
            text(b"d") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5),
        )
    )
    assert read_gguf(file).metadata == {
        "a": -3,
        "b": True,
        "c": ["x", "é"],
        "d": [0.5, 1.5],
    }
