"""The same tokens alone, batched, cold, warm, in odd chunks and after preemption, bit for bit."""

from pathlib import Path

import pytest
import torch

from benchmarks.steps import Steps, Stream
from engine.execute.runner import ModelRunner
from policies.contract.wire import Sampling
from tests.engine.execute.conftest import RunnerMaker

RANDOM = Sampling(max_tokens=99, temperature=1.3, top_p=0.95, top_k=40, seed=11)


def prompts_of(runner: ModelRunner, count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(
            3, runner.vocab_size, (1 + (at * 37 + longest) % longest,), generator=generator
        ).tolist()
        for at in range(count)
    ]


def alone(
    steps: Steps, prompts: list[list[int]], tokens: int, sampling: Sampling
) -> list[list[int]]:
    found = []
    for prompt in prompts:
        steps.reset()
        found += steps.generate([steps.stream(prompt, sampling=sampling)], tokens)
    steps.reset()
    return found


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=99, temperature=0.0), RANDOM])
def test_batched_equals_alone(tiny_steps: Steps, sampling: Sampling) -> None:
    prompts = prompts_of(tiny_steps.runner, 16, 150)
    expected = alone(tiny_steps, prompts, 12, sampling)
    streams = [tiny_steps.stream(prompt, sampling=sampling) for prompt in prompts]
    assert tiny_steps.generate(streams, 12) == expected


@pytest.mark.parametrize("chunks", [(1,), (7, 33, 1, 64), (48,), (5, 129)])
def test_chunked_at_odd_sizes_equals_whole(tiny_steps: Steps, chunks: tuple[int, ...]) -> None:
    prompts = prompts_of(tiny_steps.runner, 4, 140)
    expected = alone(tiny_steps, prompts, 8, RANDOM)
    streams = [tiny_steps.stream(prompt, sampling=RANDOM) for prompt in prompts]
    assert tiny_steps.generate(streams, 8, chunks=chunks) == expected


def test_warm_equals_cold(tiny_steps: Steps) -> None:
    """Prefix pages of another stream, computed in other chunks and beside others, are as good."""
    (prompt,) = prompts_of(tiny_steps.runner, 1, 130)
    prompt = (prompt * 130)[:130]
    (expected,) = alone(tiny_steps, [prompt], 10, RANDOM)
    donor = tiny_steps.stream([*prompt[:96], 5, 6, 7])
    tiny_steps.generate([donor, tiny_steps.stream(prompt[:40])], 3, chunks=(11, 50))
    warm = tiny_steps.stream(prompt, sampling=RANDOM, prefix_of=donor)
    assert warm.num_computed == 96
    assert tiny_steps.generate([warm], 10) == [expected]


def test_full_hit_still_computes_the_last_token(tiny_steps: Steps) -> None:
    prompt = list(range(10, 10 + 64))
    (expected,) = alone(tiny_steps, [prompt], 6, RANDOM)
    donor = tiny_steps.stream(prompt)
    tiny_steps.generate([donor], 1)
    warm = tiny_steps.stream(prompt, sampling=RANDOM, prefix_of=donor)
    assert warm.num_computed == 48
    assert tiny_steps.generate([warm], 6) == [expected]


def test_preempted_equals_undisturbed(tiny_steps: Steps) -> None:
    prompts = prompts_of(tiny_steps.runner, 3, 90)
    expected = alone(tiny_steps, prompts, 14, RANDOM)
    streams = [tiny_steps.stream(prompt, sampling=RANDOM) for prompt in prompts]
    tiny_steps.generate(streams, 5)
    tiny_steps.preempt(streams[1])
    tiny_steps.generate(streams, 4, chunks=(13,))
    tiny_steps.preempt(streams[0])
    tiny_steps.preempt(streams[2])
    tiny_steps.generate(streams, 5)
    assert [stream.completion for stream in streams] == expected


def test_prefill_and_decode_rows_share_a_step(tiny_steps: Steps) -> None:
    prompts = prompts_of(tiny_steps.runner, 2, 120)
    expected = alone(tiny_steps, prompts, 8, RANDOM)
    first = tiny_steps.stream(prompts[0], sampling=RANDOM)
    tiny_steps.generate([first], 3)
    second = tiny_steps.stream(prompts[1], sampling=RANDOM)
    while len(first.completion) < 8 or len(second.completion) < 8:
        work: list[tuple[Stream, int]] = []
        for stream in (first, second):
            if len(stream.completion) < 8:
                left = len(stream.token_ids) - stream.num_computed
                work.append((stream, min(left, 19)))
        tiny_steps.step(work)
    assert [first.completion, second.completion] == expected


@pytest.mark.parametrize("tiny_runner", [("llama", "fp32"), ("llama", "bf16")], indirect=True)
def test_fixed_shapes_are_exact_too(
    tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a machine's kernels depend on shapes, one tile and one attention shape remain."""
    monkeypatch.setattr(tiny_runner.model.attention, "is_wide", False)
    monkeypatch.setattr(tiny_runner.model, "tiles", type(tiny_runner.model.tiles)((16,)))
    steps = Steps(tiny_runner)
    prompts = prompts_of(tiny_runner, 5, 80)
    expected = alone(steps, prompts, 5, RANDOM)
    streams = [steps.stream(prompt, sampling=RANDOM) for prompt in prompts]
    assert steps.generate(streams, 5, chunks=(23, 7)) == expected


def test_real_model_is_exact_however_it_is_run(real_runner: ModelRunner) -> None:
    steps = Steps(real_runner)
    prompts = prompts_of(real_runner, 16, 150)
    greedy = Sampling(max_tokens=99, temperature=0.0)
    expected = alone(steps, prompts[:4], 6, greedy)
    streams = [steps.stream(prompt) for prompt in prompts]
    assert steps.generate(streams, 6)[:4] == expected
    steps.reset()
    streams = [steps.stream(prompt) for prompt in prompts[:4]]
    steps.generate(streams, 2, chunks=(77, 3))
    steps.preempt(streams[1])
    assert steps.generate(streams, 4, chunks=(33,)) == expected
    warm = steps.stream(prompts[3], prefix_of=streams[3])
    assert steps.generate([warm], 6) == [expected[3]]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "native", "fast"])
def test_real_model_is_exact_for_long_prompts_and_threads(
    model_path: Path, make_runner: RunnerMaker, threads: int, precision: str
) -> None:
    runner = make_runner(
        model_path,
        precision=precision,
        num_pages=400,
        page_size=64,
        threads=threads,
        step_tokens=16 * 1400,
    )
    steps = Steps(runner)
    prompts = prompts_of(steps.runner, 16, 1400)
    expected = alone(steps, prompts, 24, RANDOM)
    for chunks in ((1 << 20,), (333, 64, 1), (512,)):
        steps.reset()
        streams = [steps.stream(prompt, sampling=RANDOM) for prompt in prompts]
        assert steps.generate(streams, 24, chunks=chunks) == expected
