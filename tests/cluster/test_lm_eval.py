"""lm-eval from PyPI, unmodified, against a gateway: its numbers are those of its own backend.

Its own backend is transformers on the same weights, dequantised and saved as a folder. `make
clients` makes the environment that lm-eval runs in.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peer import transformers_llama
from engine.execute.weights import open_checkpoint
from gateway.cli.children import python_module
from gateway.demo.stack import Stack
from policies.contract.bundle import decode_bundle
from tests.cluster.conftest import MODEL

TASKS = Path(__file__).parent / "lm_eval_task"
CLIENTS = Path("~/.cache/kagari/clients").expanduser()
ATOL = 2e-3  # of a sum of log probabilities, in fp32; the tasks' endings have few tokens

pytestmark = pytest.mark.slow

Samples = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def lm_eval() -> Path:
    client = Path(os.environ.get("KAGARI_CLIENTS", CLIENTS)) / "lm-eval" / "bin" / "lm_eval"
    if not client.is_file():
        pytest.fail(f"{client} is absent: run `make clients`", pytrace=False)
    return client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as transformers reads it."""
    command = python_module("node_agent", "models", "spec", MODEL, "--json")
    spec = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    bundle = decode_bundle(Path(spec["bundle_path"]).read_bytes())
    made = tmp_path_factory.mktemp("peer")
    transformers_llama(
        open_checkpoint(Path(spec["model_spec"]["path"])), dtype=torch.float32
    ).save_pretrained(made)
    (made / "tokenizer.json").write_bytes(bundle.tokenizer_json)
    names = {"bos_token": bundle.bos_token, "eos_token": bundle.eos_token}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (made / "tokenizer_config.json").write_text(json.dumps(names | kind))
    return made


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("lm-eval") / "home"
    exact = ("--dtype", "fp32", "--kv-dtype", "fp32")
    with Stack(home, "--port", "0", "--kv-device-tokens", "8192", *exact) as running:
        yield running


def evaluate(
    lm_eval: Path, out: Path, kind: str, key: str = "", *, tasks: str, **arguments: object
) -> Samples:
    """Every sample by task: what lm-eval asked, what it was told, what it made of that."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "cache")}
    calm = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    told = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [str(lm_eval), "--model", kind, "--model_args", told, "--tasks", tasks,
               "--include_path", str(TASKS), "--output_path", str(out), "--log_samples",
               "--batch_size", "4" if kind != "hf" else "1", "--device", "cpu"]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=TASKS,
        env={**os.environ, **offline, **calm, "OPENAI_API_KEY": key, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "API request failed" not in done.stderr
    samples: Samples = {}
    for path in out.rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        name = path.name.removeprefix("samples_").rpartition("_")[0]
        samples[name] = sorted(lines, key=lambda sample: int(sample["doc_id"]))
    return samples


@pytest.fixture(scope="module")
def expected(lm_eval: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return evaluate(
        lm_eval,
        tmp_path_factory.mktemp("hf"),
        "hf",
        tasks="kagari_choice,kagari_next_line",
        pretrained=folder,
        dtype="float32",
    )


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Log-likelihoods within rounding, everything else equal."""
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        for mine, peer in zip(ours["filtered_resps"], theirs["filtered_resps"], strict=True):
            if isinstance(peer, str):
                assert mine == peer
            else:
                assert float(mine[0]) == pytest.approx(float(peer[0]), abs=ATOL)
                assert str(mine[1]) == str(peer[1])
        for metric in theirs["metrics"]:
            assert ours[metric] == theirs[metric]


@pytest.mark.parametrize("tokenized", [True, False], ids=["ids", "text"])
def test_lm_eval_measures_the_same_through_the_gateway(
    lm_eval: Path, folder: Path, stack: Stack, expected: Samples, tmp_path: Path, tokenized: bool
) -> None:
    found = evaluate(
        lm_eval,
        tmp_path,
        "local-completions",
        stack.api.secret,
        tasks="kagari_choice,kagari_next_line",
        model=stack.model,
        base_url=stack.ready["url"] + "/completions",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        tokenized_requests=tokenized,
        num_concurrent=3,
    )
    assert set(found) == set(expected) == {"kagari_choice", "kagari_next_line"}
    for task, samples in expected.items():
        assert_same(found[task], samples)


def test_lm_eval_generates_without_a_tokenizer_of_its_own(
    lm_eval: Path, stack: Stack, expected: Samples, tmp_path: Path
) -> None:
    found = evaluate(
        lm_eval,
        tmp_path,
        "local-completions",
        stack.api.secret,
        tasks="kagari_next_line",
        model=stack.model,
        base_url=stack.ready["url"] + "/completions",
        tokenizer_backend=None,
    )
    assert_same(found["kagari_next_line"], expected["kagari_next_line"])
