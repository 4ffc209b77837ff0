"""Small random models, the real ones, and runners over them, all on one thread."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.steps import Steps
from engine.config import ConfigError
from engine.execute.kernels.cpu import library
from engine.execute.models.native import NativeDecoder
from engine.execute.runner import ModelRunner, RunnerConfig, load_runner
from engine.execute.weights import RopeScaling
from tests.engine.execute.tiny_families import GGUF_SHAPES, SHAPES, rope, tiny_model, write_gguf

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


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set of the CPU kernels that this CPU has."""
    try:
        if library.load(isa=request.param) is None:
            pytest.skip(f"no CPU kernels here: {library.why_absent()}")
    except ConfigError:
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture
def kernels(isa: str) -> Iterator[library.Library]:
    """The CPU kernels of an instruction set on two threads."""
    loaded = library.load(isa=isa, threads=2)
    assert loaded is not None
    yield loaded
    loaded.close()


# How a runner may compute: torch's forward pass, or the CPU's own kernels (16-bit activations; 8).
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32", "kv_dtype": "fp32"},
    "bf16": {"dtype": "bf16", "kv_dtype": "bf16", "kernels": "torch"},
    "native": {},
    "fast": {"compute": "fast"},
}
QUICK = {("llama", "fp32"), ("llama", "bf16"), ("llama", "native"), ("gemma3", "native")}
PACKED = ("Q4_1", "Q8_0", "Q5_0", "Q6_K", "Q4_0", "Q4_K", "Q5_1", "Q5_K")
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
        step_tokens: int = 4096,
        pages: str | None = None,
        **rest: object,
    ) -> ModelRunner:
        """precision: a key of WAYS; pages: another precision for them."""
        spec = Spec(str(path), **rest)  # type: ignore[arg-type]
        way = WAYS[precision] | ({"kv_dtype": pages} if pages else {})
        config = RunnerConfig(
            num_pages=num_pages,
            page_size=page_size,
            device="cpu",
            threads=threads,
            step_tokens=step_tokens,
            **way,
        )
        runner = load_runner(spec, config)
        if precision in ("native", "fast") and not isinstance(runner.model, NativeDecoder):
            pytest.skip(f"no CPU kernels here: {library.why_absent()}")
        return runner

    return make


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of a family whose products all have kernels, in every packed format."""

    def make(family: str) -> Path:
        path = tmp_path_factory.mktemp("packed") / "tiny.gguf"
        model = tiny_model(family, GGUF_SHAPES[family]["groups"])
        write_gguf(path, family, model, PACKED)
        return path

    return make


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(
            (family, precision),
            id=f"{family}-{precision}",
            marks=() if (family, precision) in QUICK else pytest.mark.slow,
        )
        for family in ("llama", "qwen3", "gemma3")
        for precision in WAYS
    ],
)
def tiny_runner(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_gguf: Callable[[str], Path],
    make_runner: RunnerMaker,
) -> ModelRunner:
    family, precision = request.param
    if precision in ("native", "fast"):
        return make_runner(tiny_gguf(family), precision=precision, num_pages=256)
    folder = tmp_path_factory.mktemp("family")
    (shape, *_) = SHAPES[family].values()
    tiny_model(family, shape).save_pretrained(folder)
    return make_runner(folder, precision=precision, num_pages=256)


@pytest.fixture
def tiny_steps(tiny_runner: ModelRunner) -> Steps:
    return Steps(tiny_runner)


@pytest.fixture(
    scope="session",
    params=["fp32", pytest.param("bf16", marks=pytest.mark.slow), "native"],
)
def real_runner(
    request: pytest.FixtureRequest, model_path: Path, make_runner: RunnerMaker
) -> ModelRunner:
    return make_runner(model_path, precision=request.param, num_pages=160, page_size=64)
