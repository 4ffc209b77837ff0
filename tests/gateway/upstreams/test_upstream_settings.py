"""Tables and flags of upstreams: what cannot be stops the start, with its name and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.__main__ import main, named_upstreams, parser
from gateway.config import ConfigError, load
from gateway.upstreams.settings import base_url


def loaded(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "k.toml"
    path.write_text(text)
    return load(path, environment={}).config.upstreams


def test_a_table_is_an_upstream(tmp_path) -> None:
    (one, two) = loaded(
        tmp_path,
        '[[upstreams]]\nurl = "http://10.0.0.1:8000/v1"\nmodels = {"a/b" = "b"}\n'
        '[[upstreams]]\nname = "pd"\ndialect = "vllm"\n'
        'prefill = ["http://p:1"]\ndecode = ["http://d:1", "http://d:2"]\n',
    )
    assert (one.label, one.dialect, one.models) == ("10.0.0.1:8000", "openai", {"a/b": "b"})
    assert (two.label, two.prefilling) == ("pd", ("http://p:1",))
    assert base_url(one.url) == base_url("http://10.0.0.1:8000/") == "http://10.0.0.1:8000"
    assert base_url("https://h/openai/v1/") == "https://h/openai"


@pytest.mark.parametrize(
    ("table", "name", "hint"),
    [
        ("", "upstreams.0.url", "url, or prefill and decode"),
        ('url = "http://h"\nprefill = ["http://p"]', "upstreams.0.url", "both"),
        ('prefill = ["http://p"]\ndialect = "vllm"', "upstreams.0.url", "half"),
        ('prefill = ["http://p"]\ndecode = ["http://d"]', "upstreams.0.dialect", "vllm"),
        ('url = "ftp://h"', "upstreams.0.url", "no http URL"),
        ('url = "http://u:secret@h"', "upstreams.0.url", "api_key_file"),
        ('url = "http://h/?key=secret"', "upstreams.0.url", "query"),
        ('url = "http://[h"', "upstreams.0.url", "no URL"),
        ('url = "http://u:secret@h"\ndialekt = "vllm"', "upstreams", "dialekt"),
        ('url = "http://h"\ndialect = "tgi"', "upstreams", "tgi"),
        ('url = "http://h"\nmax_in_flight = 0', "upstreams.0.max_in_flight", "above 0"),
        ('url = "http://h"\npage_size = 65', "upstreams.0.page_size", "power of two"),
        ('url = "http://h"\nkv_events = ["tcp://h:1"]', "upstreams.0.kv_events", "tokenizer"),
        (
            'url = "http://h"\ndialect = "vllm"\ntokenizer = "t"\nkv_events = ["a", "b"]',
            "upstreams.0.kv_events",
            "one a server",
        ),
        (
            'url = "http://h"\ndialect = "vllm"\ntokenizer = "t"\nkv_replay = ["a"]',
            "upstreams.0.kv_replay",
            "kv_events",
        ),
        (
            'url = "http://h"\nmodels = {a = "b"}\naliases = {x = "c"}',
            "upstreams.0.aliases.x",
            "a",
        ),
    ],
)
def test_what_cannot_be_is_named(tmp_path, table, name, hint) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, f"[[upstreams]]\n{table}\n")
    assert caught.value.name == name
    assert hint in str(caught.value)
    assert "secret" not in str(caught.value)


def test_two_of_one_name_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, '[[upstreams]]\nurl = "http://h:1"\n' * 2)
    assert caught.value.name == "upstreams.1.name"


def test_flags_stand_for_tables() -> None:
    told = vars(parser().parse_args(["--upstream", "http://a", "--upstream", "http://b"]))
    assert named_upstreams(told) == [{"url": "http://a"}, {"url": "http://b"}]
    with_more = ["--upstream", "http://a", "--dialect", "vllm", "--tokenizer", "dir"]
    told = vars(parser().parse_args(with_more))
    assert named_upstreams(told) == [{"url": "http://a", "dialect": "vllm", "tokenizer": "dir"}]
    assert named_upstreams(vars(parser().parse_args([]))) is None
    with pytest.raises(ConfigError, match="--upstream"):
        named_upstreams(vars(parser().parse_args(["--dialect", "vllm"])))


def test_a_tokenizer_that_is_none_stops_the_start(tmp_path, capsys) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    flags = ["--upstream", "http://127.0.0.1:9", "--tokenizer", str(tmp_path)]
    ports = ["--port", "0", "--link-port", "0", "--admin-port", "0"]
    assert main([*flags, *ports, "--home", str(tmp_path / "home")]) == 2
    assert "upstreams.0.tokenizer" in capsys.readouterr().err
