"""Small random Llama folders, the real model, and runners over them, all on one thread."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.steps import Steps
from engine.execute.runner import ModelRunner, RunnerConfig, load_runner
from engine.execute.weights import RopeScaling

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Spec:
    """What load_runner reads of a ModelSpec."""

    path: str
    rope_scaling: RopeScaling | None = None
    context_tokens: int | None = None


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A runner's self-test holds for one number of threads; small products gain nothing by two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_path() -> Path:
    folder = Path(os.environ.get("KAGARI_MODELS", "~/.cache/kagari/models")).expanduser()
    path = folder / MODEL_FILE
    if not path.is_file():
        pytest.fail(f"{path} is absent: run `kagari models pull smollm2-135m`", pytrace=False)
    return path


TinyFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """Makes a folder with a random Llama as transformers saves it; keyword = config field."""

    def make(*, shard_size: str = "1GB", **changes: object) -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM

        fields: dict[str, object] = {
            "vocab_size": 160,
            "hidden_size": 210,  # a multiple of every number of heads in use, of no vector width
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "initializer_range": 0.08,
        }
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**(fields | changes)))
        folder = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(folder, max_shard_size=shard_size)
        return folder

    return make


RunnerMaker = Callable[..., ModelRunner]


@pytest.fixture(scope="session")
def make_runner() -> RunnerMaker:
    def make(
        path: Path,
        *,
        precision: str = "fp32",
        num_pages: int = 64,
        page_size: int = 16,
        **rest: object,
    ) -> ModelRunner:
        spec = Spec(str(path), **rest)  # type: ignore[arg-type]
        config = RunnerConfig(
            num_pages=num_pages,
            page_size=page_size,
            dtype=precision,  # type: ignore[arg-type]
            kv_dtype=precision,  # type: ignore[arg-type]
            device="cpu",
            threads=1,
        )
        return load_runner(spec, config)

    return make


@pytest.fixture(scope="session", params=["fp32", "bf16"])
def tiny_runner(
    request: pytest.FixtureRequest, tiny_folder: TinyFolder, make_runner: RunnerMaker
) -> ModelRunner:
    return make_runner(tiny_folder(), precision=request.param, num_pages=256)


@pytest.fixture
def tiny_steps(tiny_runner: ModelRunner) -> Steps:
    return Steps(tiny_runner)


@pytest.fixture(scope="session", params=["fp32", "bf16"])
def real_runner(
    request: pytest.FixtureRequest, model_path: Path, make_runner: RunnerMaker
) -> ModelRunner:
    return make_runner(model_path, precision=request.param, num_pages=160, page_size=64)
