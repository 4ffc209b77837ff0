"""A Hugging Face folder served end to end, and folders that are refused before anything serves."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.children import python_module
from gateway.cli.client import call
from gateway.demo.stack import Stack
from tests.cluster.byte_llama import save_byte_llama

GAP = 0.1  # of the two best logits: below it bf16 and fp32 may choose differently
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
QUESTION = "Does the lantern burn? "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over bytes, saved by transformers and tokenizers."""
    path = tmp_path_factory.mktemp("folder") / "tiny-llama"
    save_byte_llama(
        path,
        template=TEMPLATE,
        seed=11,
        also=("<|im_start|>",),
        end="<|im_end|>",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    return path


def expected_text(folder: Path, prompt: str, most: int) -> str:
    """What transformers says greedily, up to the first step without a clear winner."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    start = len(ids)
    with torch.inference_mode():
        for _ in range(most):
            logits = model(torch.tensor([ids])).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            token = int(logits.argmax())
            if best - second < GAP or token == model.config.eos_token_id:
                break
            ids.append(token)
    return str(tokenizer.decode(ids[start:]))


def test_a_folder_is_served_and_says_what_transformers_says(
    folder: Path, tmp_path: Path, balanced: Callable[[Stack], list[dict[str, Any]]]
) -> None:
    flags = ("--port", "0", "--model", str(folder), "--kv-dtype", "fp32", "--threads", "1")
    content = QUESTION * 8
    with Stack(tmp_path / "home", *flags) as stack:
        assert stack.model == "tiny-llama"
        body = {
            "model": "tiny-llama",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 48,
            "temperature": 0,
        }
        cold, warm = (call(stack.api, "POST", "/v1/chat/completions", body) for _ in range(2))
        rows = balanced(stack)
    said = cold["choices"][0]["message"]["content"]
    assert said == warm["choices"][0]["message"]["content"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    rendered = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    expected = expected_text(folder, rendered, 48)
    assert len(expected) >= 8
    assert said.startswith(expected)
    assert [row["status"] for row in rows] == ["ok", "ok"]


def other_architecture(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"], config["model_type"] = ["FalconForCausalLM"], "falcon"
    (folder / "config.json").write_text(json.dumps(config))
    return "falcon"


def missing_tensor(folder: Path) -> str:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    return "up_proj"


def truncated(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return "model.safetensors"


def without_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "tokenizer.json"


@pytest.mark.parametrize(
    "damage", [other_architecture, missing_tensor, truncated, without_tokenizer]
)
def test_a_damaged_folder_is_refused_before_it_serves(
    folder: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    named = damage(copy)
    done = subprocess.run(
        python_module(
            "gateway.cli.main",
            *("serve", "--home", str(tmp_path / "home"), "--port", "0", "--model", str(copy)),
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "ready http" not in done.stdout
    said = done.stderr[done.stderr.index("error: n1: ") :]
    for part in (named, "found: ", "allowed: ", "remedy: "):
        assert part in said
    assert "Traceback" not in said
    assert '"event"' not in said, "a log line is no error message"
