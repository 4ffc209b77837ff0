"""Models over pages of codes: exact like any, near bf16, and refused where they are not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.steps import Steps
from engine.config import ConfigError
from engine.execute import page_room
from engine.execute.layers import page_values
from engine.execute.page_room import STEP_BYTES, require_room
from engine.execute.page_self_test import BOUND, TOKENS, self_test
from engine.execute.runner import ModelRunner
from engine.store.page_codec import QUANTISED, PageLayout
from policies.contract.wire import Sampling
from tests.engine.execute.conftest import RunnerMaker, TinyFolder
from tests.engine.execute.family_checks import run_every_way

GREEDY = Sampling(max_tokens=99, temperature=0.0)


def prompts_of(runner: ModelRunner, *lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, runner.vocab_size, (length,), generator=random).tolist()
        for length in lengths
    ]


@pytest.mark.parametrize("pages", QUANTISED)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_way_gives_the_same_tokens(
    tiny_gguf: Callable[[str], Path], make_runner: RunnerMaker, family: str, pages: str
) -> None:
    runner = make_runner(tiny_gguf(family), precision="native", num_pages=128, pages=pages)
    run_every_way(runner, prompts_of(runner, 70, 3, 130), 8)


@pytest.mark.parametrize("pages", QUANTISED)
def test_every_way_gives_the_same_tokens_in_torch(
    tiny_folder: TinyFolder, make_runner: RunnerMaker, pages: str
) -> None:
    runner = make_runner(tiny_folder(), precision="fp32", num_pages=128, pages=pages)
    run_every_way(runner, prompts_of(runner, 70, 3, 130), 8)


@pytest.mark.parametrize("pages", QUANTISED)
def test_the_default_model_is_exact_over_codes(
    model_path: Path, make_runner: RunnerMaker, pages: str
) -> None:
    runner = make_runner(
        model_path, precision="native", num_pages=48, page_size=64, pages=pages, step_tokens=512
    )
    assert runner.divergence is not None
    assert 0 < runner.divergence.divergence < BOUND / 10
    assert not runner.arena.pages.any(), "the self-test has pages of its own"
    prompts = prompts_of(runner, 150, 40, 200)
    run_every_way(runner, prompts, 6, chunk_sizes=((200,), (77, 3), (33,)), sampling=GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("pages", QUANTISED)
def test_the_default_model_is_exact_over_codes_for_long_prompts_and_threads(
    model_path: Path, make_runner: RunnerMaker, threads: int, pages: str
) -> None:
    runner = make_runner(
        model_path,
        precision="native",
        num_pages=220,
        page_size=64,
        pages=pages,
        threads=threads,
        step_tokens=8 * 1400,
    )
    prompts = prompts_of(runner, 1400, 1, 1000, 64, 700, 17, 300, 1399)
    run_every_way(runner, prompts, 24, chunk_sizes=((1 << 20,), (333, 64, 1), (512,)))


def test_a_scale_that_is_no_number_fails_its_row_alone(
    tiny_gguf: Callable[[str], Path], make_runner: RunnerMaker
) -> None:
    runner = make_runner(tiny_gguf("llama"), precision="native", num_pages=16, pages="int8")
    steps = Steps(runner)
    sick, well = (steps.stream(prompt) for prompt in prompts_of(runner, 40, 40))
    steps.generate([sick, well], 1)
    runner.arena.by_token[1][sick.pages[1], 1, 0, 1, 3] = 255
    result = steps.step([(sick, 1), (well, 1)])
    assert (result.insane, result.corrupt) == ((0,), ())


# --- what is refused --------------------------------------------------------------------------


def test_a_model_beyond_the_bound_is_refused(
    tiny_folder: TinyFolder, make_runner: RunnerMaker
) -> None:
    runner = make_runner(tiny_folder(), precision="fp32", pages="fp8")
    found = runner.divergence
    assert found is not None
    assert (found.bound, found.positions) == (BOUND, 64)
    with pytest.raises(ConfigError) as refused:
        self_test(runner.model, runner.arena, tokens=TOKENS, first_token=None, bound=0)
    message = str(refused.value)
    assert message.startswith(
        "--kv-dtype: found fp8, whose pages move this model's next tokens by "
    )
    assert "allowed up to 0 nats (mean of 64 positions of a fixed prompt)" in message
    assert message.endswith("pass --kv-dtype bf16, or the other of fp8 and int8")


@pytest.mark.parametrize("factor", [4.0, float("nan")])
def test_broken_scales_are_found_at_load(
    tiny_folder: TinyFolder,
    make_runner: RunnerMaker,
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
) -> None:
    quantise = page_values.quantise

    def broken(values: Tensor, precision: str) -> tuple[Tensor, Tensor]:
        codes, scales = quantise(values, precision)
        return codes, scales * factor

    monkeypatch.setattr(page_values, "quantise", broken)
    with pytest.raises(ConfigError, match=r"^--kv-dtype: found int8"):
        make_runner(tiny_folder(initializer_range=0.2), precision="fp32", pages="int8")


def test_pages_that_memory_does_not_hold_are_refused() -> None:
    layout = PageLayout("bf16", num_layers=30, num_kv_heads=3, page_size=64, head_dim=64)
    room = 100 * layout.page_bytes + STEP_BYTES
    require_room(layout, 99, room)  # and the null page
    require_room(layout, 1 << 40, None)
    with pytest.raises(ConfigError) as refused:
        require_room(layout, 100, room)
    assert str(refused.value) == (
        "--kv-device-tokens: found 6400 tokens in bf16 pages, 149 MB, allowed up to 6336: 282 MB "
        "of memory are free, of which a step takes 134; lower it, or pass --kv-dtype int8 for "
        "pages of half the size"
    )


@pytest.mark.parametrize("checks", [1, 2])
def test_a_runner_looks_before_and_after_its_weights(
    tiny_folder: TinyFolder,
    make_runner: RunnerMaker,
    monkeypatch: pytest.MonkeyPatch,
    checks: int,
) -> None:
    told = iter([1 << 40] * (checks - 1) + [1 << 20])
    monkeypatch.setattr(page_room, "available_bytes", lambda: next(told))
    with pytest.raises(ConfigError, match=r"^--kv-device-tokens: found 1024 tokens in int8 pages"):
        make_runner(tiny_folder(), precision="fp32", pages="int8")
