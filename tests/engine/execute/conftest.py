"""Small random models, the real ones, and runners over them, all on one thread."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.steps import Steps
from engine.config import ConfigError
from engine.execute.kernels.cpu import library
from engine.execute.runner import ModelRunner, RunnerConfig, load_runner
from engine.execute.weights import RopeScaling
from tests.engine.execute.tiny_families import SHAPES, rope, tiny_model

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"


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


def pulled(file: str, name: str) -> Path:
    folder = Path(os.environ.get("KAGARI_MODELS", "~/.cache/kagari/models")).expanduser()
    path = folder / file
    if not path.is_file():
        pytest.fail(f"{path} is absent: run `kagari models pull {name}`", pytrace=False)
    return path


@pytest.fixture(scope="session")
def model_path() -> Path:
    return pulled(MODEL_FILE, "smollm2-135m")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    return pulled(GEMMA_FILE, "gemma3-270m")


TinyFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """Makes a folder with a random Llama as transformers saves it; keyword = config field."""

    def make(*, shard_size: str = "1GB", **changes: object) -> Path:
        folder = tmp_path_factory.mktemp("tiny")
        model = tiny_model("llama", {"rope_parameters": rope(), **changes})
        model.save_pretrained(folder, max_shard_size=shard_size)
        return folder

    return make


@pytest.fixture(params=library.TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    """Each tier of the CPU kernels that this CPU has."""
    try:
        if library.load(tier=request.param) is None:
            pytest.skip(f"no CPU kernels here: {library.why_absent()}")
    except ConfigError:
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture
def kernels(tier: str) -> Iterator[library.Library]:
    """The CPU kernels of a tier on two threads."""
    loaded = library.load(tier=tier, threads=2)
    assert loaded is not None
    yield loaded
    loaded.close()


RunnerMaker = Callable[..., ModelRunner]


@pytest.fixture(scope="session")
def make_runner() -> RunnerMaker:
    def make(
        path: Path,
        *,
        precision: str = "fp32",
        num_pages: int = 64,
        page_size: int = 16,
        threads: int = 1,
        **rest: object,
    ) -> ModelRunner:
        spec = Spec(str(path), **rest)  # type: ignore[arg-type]
        config = RunnerConfig(
            num_pages=num_pages,
            page_size=page_size,
            dtype=precision,  # type: ignore[arg-type]
            kv_dtype=precision,  # type: ignore[arg-type]
            device="cpu",
            threads=threads,
        )
        return load_runner(spec, config)

    return make


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(
            (family, precision),
            id=f"{family}-{precision}",
            marks=() if family == "llama" else pytest.mark.slow,
        )
        for family in ("llama", "qwen3", "gemma3")
        for precision in ("fp32", "bf16")
    ],
)
def tiny_runner(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_runner: RunnerMaker,
) -> ModelRunner:
    family, precision = request.param
    folder = tmp_path_factory.mktemp("family")
    (shape, *_) = SHAPES[family].values()
    tiny_model(family, shape).save_pretrained(folder)
    return make_runner(folder, precision=precision, num_pages=256)


@pytest.fixture
def tiny_steps(tiny_runner: ModelRunner) -> Steps:
    return Steps(tiny_runner)


@pytest.fixture(scope="session", params=["fp32", "bf16"])
def real_runner(
    request: pytest.FixtureRequest, model_path: Path, make_runner: RunnerMaker
) -> ModelRunner:
    return make_runner(model_path, precision=request.param, num_pages=160, page_size=64)
