"""Names of a hub's models, who asks, and which files of a repository are taken."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.catalogue import load_catalogue
from node_agent.checkpoints import resolve
from node_agent.errors import NodeError
from node_agent.hub import (
    HubFile,
    HubName,
    choose,
    hub_settings,
    parse_commit,
    parse_hub_name,
    parse_tree,
)

TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def files(*paths: str) -> list[HubFile]:
    return [HubFile(path, 100) for path in paths]


def chosen(name: str, *paths: str) -> tuple[str, str, set[str]]:
    parsed = parse_hub_name(name)
    assert parsed is not None
    choice = choose(parsed, files(*paths))
    return choice.format, choice.path, {file.path for file in choice.files}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Org/Name", HubName("Org/Name", "Org/Name")),
        ("o/n@v1.0", HubName("o/n@v1.0", "o/n", "v1.0")),
        ("o/n@refs/pr/3", HubName("o/n@refs/pr/3", "o/n", "refs/pr/3")),
        ("o/n:a-Q8_0.gguf", HubName("o/n:a-Q8_0.gguf", "o/n", "main", "a-Q8_0.gguf")),
        ("o/n@abc:sub/a.gguf", HubName("o/n@abc:sub/a.gguf", "o/n", "abc", "sub/a.gguf")),
    ],
)
def test_a_name_says_repository_revision_and_file(text: str, expected: HubName) -> None:
    assert parse_hub_name(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "a/b/c", "./a/b", "/a/b", "~/a", "../x", "a/..", "a/b@../x", "a/b:../x.gguf"),
        *("a/b:x.bin", "a/b:/x.gguf", "a/b@", "a/b:", "a/ b", "a/b\n", "é/b", "a/b?x=1", "a/b#x"),
        *("https://x/a/b", "a/b:x/../../y.gguf", "a\\b/c", "a/.b", "-a/b"),
    ],
)
def test_other_texts_are_no_names(text: str) -> None:
    assert parse_hub_name(text) is None


@given(text=st.text(alphabet="ab/.@:~-\\ \n%", max_size=20))
def test_no_name_leaves_its_folder(text: str) -> None:
    name = parse_hub_name(text)
    if name is not None:
        inside = Path("/m") / name.repo / (name.file or "") / f"{name.key}.json"
        assert ".." not in inside.parts
        assert "/" not in name.key
        assert len(name.repo.split("/")) == 2


def test_a_long_name_is_still_the_name_of_a_file() -> None:
    keys = set()
    for end in ("a", "b"):
        name = parse_hub_name("o/n@" + "r/" * 60 + f"x:{'s/' * 60}{end}.gguf")
        assert name is not None
        keys.add(name.key)
    assert len(keys) == 2
    assert max(map(len, keys)) <= 200


# --- who asks -----------------------------------------------------------------------------------


def test_the_token_comes_from_the_variable_then_the_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hf_file\n")
    assert hub_settings({"HF_TOKEN": " hf_env ", "HF_TOKEN_PATH": str(file)}).token == "hf_env"
    assert hub_settings({"HF_TOKEN_PATH": str(file)}).token == "hf_file"
    assert hub_settings({"HF_HOME": str(tmp_path)}).token == "hf_file"
    assert hub_settings({"HF_TOKEN_PATH": str(tmp_path / "none")}).token is None


def test_the_token_is_not_shown(tmp_path: Path) -> None:
    assert "secret" not in repr(hub_settings({"HF_TOKEN": "secret"}))
    with pytest.raises(NodeError) as caught:
        hub_settings({"HF_TOKEN": "sécret two"})
    assert "cret" not in str(caught.value)


def test_the_endpoint_is_a_url() -> None:
    settings = hub_settings({"HF_ENDPOINT": "http://127.0.0.1:1/", "HF_TOKEN_PATH": "/none"})
    assert settings.endpoint == "http://127.0.0.1:1"
    assert not settings.is_offline
    assert hub_settings({"HF_HUB_OFFLINE": "1", "HF_TOKEN_PATH": "/none"}).is_offline
    with pytest.raises(NodeError, match="HF_ENDPOINT"):
        hub_settings({"HF_ENDPOINT": "file:///etc"})


# --- which files --------------------------------------------------------------------------------


def test_safetensors_are_taken_with_their_texts_and_nothing_else() -> None:
    found = chosen(
        "o/n",
        *TEXTS,
        *("generation_config.json", "special_tokens_map.json", "model.safetensors"),
        *("pytorch_model.bin", "model.pt", "modeling.py", "README.md", "tokenizer.model"),
        *("consolidated.safetensors", "adapter_model.safetensors", "onnx/model.onnx", "a.gguf"),
        *("sub/config.json", "weights.pkl", ".gitattributes", "config.json.py"),
    )
    taken = {*TEXTS, "generation_config.json", "special_tokens_map.json", "model.safetensors"}
    assert found == ("safetensors", "", taken)


def test_all_shards_and_their_index_are_taken() -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = "model.safetensors.index.json"
    assert chosen("o/n", *TEXTS, *shards, index)[2] == {*TEXTS, *shards, index}
    with pytest.raises(NodeError, match="no file that can be served"):
        chosen("o/n", *TEXTS, *shards[:2], index)
    with pytest.raises(NodeError, match="no file that can be served"):
        chosen("o/n", *TEXTS, *shards)


@pytest.mark.parametrize("absent", ["config.json", "tokenizer.json"])
def test_safetensors_without_their_texts_are_refused(absent: str) -> None:
    with pytest.raises(NodeError, match=absent):
        chosen("o/n", *(path for path in TEXTS if path != absent), "model.safetensors")


def test_a_named_gguf_is_taken_even_beside_safetensors() -> None:
    paths = (*TEXTS, "model.safetensors", "m-Q4_0.gguf", "m-Q8_0.gguf", "sub/m-Q6_K.gguf")
    assert chosen("o/n:m-Q4_0.gguf", *paths) == ("gguf", "m-Q4_0.gguf", {"m-Q4_0.gguf"})
    assert chosen("o/n:sub/m-Q6_K.gguf", *paths)[1] == "sub/m-Q6_K.gguf"
    with pytest.raises(NodeError) as caught:
        chosen("o/n:m-Q2_K.gguf", *paths)
    assert "m-Q8_0.gguf" in caught.value.allowed


@pytest.mark.parametrize(
    ("paths", "taken"),
    [
        (("m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-IQ2_XS.gguf", "m-F16.gguf"), "m-Q8_0.gguf"),
        (("m.Q4_K_S.gguf", "m.q4_k_m.gguf", "m.Q6_K.gguf"), "m.q4_k_m.gguf"),
        (("m-BF16.gguf", "m-f16.gguf"), "m-BF16.gguf"),
        (("only-IQ4.gguf",), "only-IQ4.gguf"),
        (("m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"), "m-Q8_0.gguf"),
        (
            ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "m-Q4_0.gguf"),
            "m-Q4_0.gguf",
        ),
    ],
)
def test_of_many_ggufs_the_order_decides(paths: tuple[str, ...], taken: str) -> None:
    assert chosen("o/n", *paths, "README.md") == ("gguf", taken, {taken})


@pytest.mark.parametrize(
    "paths",
    [
        ("a-Q8_0.gguf", "b-Q8_0.gguf", "x-IQ1.gguf"),
        ("m-IQ1_S.gguf", "m-IQ2_S.gguf"),
        ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"),
    ],
)
def test_where_no_gguf_is_the_obvious_one_the_list_is_shown(paths: tuple[str, ...]) -> None:
    with pytest.raises(NodeError) as caught:
        chosen("o/n", *paths)
    assert all(path in caught.value.allowed for path in paths)
    assert "o/n:" in caught.value.remedy


def test_a_gguf_in_parts_is_refused() -> None:
    with pytest.raises(NodeError, match="several parts"):
        chosen("o/n:m-00001-of-00002.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


def test_pickle_is_never_taken() -> None:
    with pytest.raises(NodeError) as caught:
        chosen("o/n", *TEXTS, "pytorch_model.bin", "model.pt")
    assert ".bin" in caught.value.found
    assert "pickle" in caught.value.allowed


def test_a_huge_text_is_refused() -> None:
    name = parse_hub_name("o/n")
    assert name is not None
    listed = [*files("config.json", "model.safetensors"), HubFile("tokenizer.json", 1 << 30)]
    with pytest.raises(NodeError, match=r"tokenizer\.json"):
        choose(name, listed)


# --- what the hub says --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "a//x.gguf", "..\\x.gguf", "./x", ""]
)
def test_a_listed_path_that_leaves_the_folder_is_refused(path: str) -> None:
    with pytest.raises(NodeError, match="list of files"):
        parse_tree(msgspec.json.encode([{"type": "file", "path": path, "size": 1, "oid": ""}]))


@pytest.mark.parametrize("data", [b"", b"<html>", b"{}", b'[{"path": 1}]', b'[{"type": "file"}]'])
def test_another_answer_is_refused(data: bytes) -> None:
    with pytest.raises(NodeError, match="hub"):
        parse_tree(data)
    with pytest.raises(NodeError, match="hub"):
        parse_commit(data)


def test_a_commit_is_hex() -> None:
    with pytest.raises(NodeError, match="sha"):
        parse_commit(b'{"sha": "../../x"}')


# --- what newcomers type -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("https://huggingface.co/org/tiny", "org/tiny"),
        ("http://hub.example:8080/org/tiny/", "org/tiny"),
        ("org/tiny/", "org/tiny"),
    ],
)
def test_a_pasted_address_is_told_its_name(typed: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="no such model") as caught:
        resolve(typed, load_catalogue(), tmp_path)
    assert caught.value.remedy == f"did you mean {meant}?"


def test_a_file_that_is_not_there_is_not_looked_for_on_a_hub(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="no such file"):
        resolve("models/tiny.gguf", load_catalogue(), tmp_path)
    assert resolve("org/tiny:tiny.gguf", load_catalogue(), tmp_path).hub is not None
