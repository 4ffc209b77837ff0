"""`kagari serve --model ORG/NAME`: pulled from a hub on loopback, served, and again without it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.children import python_module
from gateway.cli.client import call
from gateway.demo.stack import Stack
from tests.node_agent.hub_server import FakeHub

REPO = "org/tiny-qwen"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A random Llama over bytes, as a repository holds one."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("repository")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")]
    )
    torch.manual_seed(3)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "pytorch_model.bin").write_bytes(b"not to be touched")
    return {file.name: file.read_bytes() for file in path.iterdir()}


def ask(stack: Stack, model: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi?"}]}
    return call(stack.api, "POST", "/v1/chat/completions", {**body, "max_tokens": 8, "seed": 1})


@pytest.mark.slow
def test_a_model_is_served_by_its_hub_name_with_and_without_the_hub(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAGARI_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_test")
    flags = ("--port", "0", "--model", REPO, "--threads", "1", "--kv-device-tokens", "2048")
    with FakeHub().running() as hub:
        hub.needs_token = "hf_secret_of_the_test"
        hub.add(REPO, files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with Stack(tmp_path / "home", *flags) as stack:
            assert stack.model == REPO
            first = ask(stack, REPO)
        assert not hub.requests_of("pytorch_model.bin")
    with Stack(tmp_path / "home", *flags) as stack:  # the hub is gone
        again = ask(stack, REPO)
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"] == again["choices"]
    told = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert not [path for path in told if b"hf_secret" in path.read_bytes()]


def test_a_name_that_no_hub_has_stops_the_start_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAGARI_MODELS", str(tmp_path / "models"))
    with FakeHub().running() as hub:
        hub.add(REPO, {})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        words = ("serve", "--home", str(tmp_path / "home"), "--port", "0")
        done = subprocess.run(
            python_module("gateway.cli.main", *words, "--model", "org/tiny-qwenn"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    said = done.stderr[done.stderr.index("error: n1: ") :]
    assert f"did you mean {REPO}?" in said
    assert "Traceback" not in said
