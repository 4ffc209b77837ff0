"""Steps planned ahead on a real model: the tokens and log probabilities of steps one by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.execute.runner import ModelRunner
from policies.contract.wire import Sampling
from tests.engine.engine_bench import EngineBench
from tests.engine.execute.test_lanes import PENALISED, RANDOM, TOLD, Told, Work, prompt_of, run

GREEDY = Sampling(40, temperature=0.0)
WORKS = [
    Work(prompt_of(37), GREEDY),
    Work(prompt_of(5), Sampling(31, temperature=0.0, stop_token_ids=tuple(range(0, 160, 9)))),
    Work(prompt_of(15), RANDOM, lanes=3),
    Work(prompt_of(20), Sampling(70, temperature=0.0, logprobs=2)),
    Work(prompt_of(33), TOLD),
]


@pytest.fixture(scope="module")
def path(tiny_gguf: Callable[[str], Path]) -> Path:
    return tiny_gguf("llama")


def both(
    runner: ModelRunner, works: list[Work], monkeypatch: pytest.MonkeyPatch, **limits: int
) -> tuple[list[Told], list[Told], int]:
    """Steps one by one; the next one under way; and how many of these were planned ahead."""
    one_by_one, _ = run(runner, works, **limits)
    monkeypatch.setattr(EngineBench, "overlap", "yes")
    num_ahead = 0
    launch = runner.launch

    def count(plan: Any) -> None:
        nonlocal num_ahead
        num_ahead += bool(plan.follows)
        launch(plan)

    monkeypatch.setattr(runner, "launch", count)
    overlapped, _ = run(runner, works, **limits)
    return one_by_one, overlapped, num_ahead


@pytest.mark.parametrize("precision", ["native", "fast"])
@pytest.mark.parametrize("limits", [{}, {"num_pages": 26, "step_tokens": 24}])
def test_tokens_and_logprobs_are_those_of_steps_one_by_one(
    path: Path,
    make_runner: Any,
    precision: str,
    limits: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner(path, precision=precision, num_pages=200, threads=2)
    assert runner.runs_ahead
    one_by_one, overlapped, num_ahead = both(runner, WORKS, monkeypatch, **limits)
    assert overlapped == one_by_one
    assert num_ahead > 30


def test_penalties_are_told_the_whole_history(
    path: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(path, precision="native", num_pages=200, threads=2)
    works = [Work(prompt_of(12), GREEDY), Work(prompt_of(9), PENALISED, lanes=2)]
    one_by_one, overlapped, num_ahead = both(runner, works, monkeypatch)
    assert overlapped == one_by_one
    assert 10 < num_ahead <= 20, "only once the penalised ones are over"


@pytest.mark.parametrize(("precision", "threads"), [("native", 1), ("fp32", 2)])
def test_what_cannot_compute_beside_its_caller_goes_step_by_step(
    path: Path,
    make_runner: Any,
    precision: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner(path, precision=precision, num_pages=200, threads=threads)
    assert not runner.runs_ahead
    one_by_one, overlapped, num_ahead = both(runner, WORKS[2:3], monkeypatch)
    assert overlapped == one_by_one
    assert num_ahead == 0
