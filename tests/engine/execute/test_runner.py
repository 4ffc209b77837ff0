"""What a step does beside the forward pass: tags, tails, verdicts, limits."""

import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.steps import Steps
from engine.execute.runner import ModelRunner, RunnerConfig, choose_precision, load_runner
from engine.execute.weights import CheckpointError, RopeScaling
from engine.schedule.plan import Row, StepPlan
from engine.store.page_codec import decode_page, encode_page
from policies.contract.wire import Sampling

GREEDY = Sampling(max_tokens=9, temperature=0.0)


@pytest.fixture(scope="module", params=["fp32", "native"])
def runner(
    request: pytest.FixtureRequest, tiny_folder: Any, tiny_gguf: Any, make_runner: Any
) -> ModelRunner:
    is_native = request.param == "native"
    path = tiny_gguf("llama") if is_native else tiny_folder()
    made: ModelRunner = make_runner(path, precision=request.param, num_pages=80)
    return made


@pytest.fixture
def steps(runner: ModelRunner) -> Steps:
    runner.arena.pages.zero_()
    runner.arena.tags.zero_()
    return Steps(runner)


def test_a_page_of_another_generation_fails_its_row_and_no_other(steps: Steps) -> None:
    streams = [steps.stream(range(5, 40)) for _ in range(3)]
    steps.generate(streams, 1)
    (expected, *_) = [list(stream.completion) for stream in streams]
    steps.runner.arena.assign([(streams[1].pages[0], 10**12)])
    result = steps.step([(stream, 1) for stream in streams])
    assert result.corrupt == (1,)
    assert result.tokens[1] is None
    assert result.tokens[0] is not None
    assert result.tokens[0] == result.tokens[2]
    assert streams[1].completion == expected


def test_all_shared_pages_are_checked_for_every_row(steps: Steps) -> None:
    donor = steps.stream(range(3, 60))
    steps.generate([donor], 1)
    sharer = steps.stream(range(3, 60), prefix_of=donor)
    steps.generate([sharer], 1)
    steps.runner.arena.assign([(donor.pages[2], 10**12)])
    assert steps.step([(donor, 1), (sharer, 1)]).corrupt == (0, 1)


def test_logits_that_are_no_numbers_fail_the_row_and_no_other(steps: Steps) -> None:
    sane, sick = steps.stream(range(30)), steps.stream(range(30, 60))
    steps.generate([sane, sick], 2)
    steps.runner.arena.pages[sick.pages[0], 0, 1] = float("nan")
    result = steps.step([(sane, 1), (sick, 1)])
    assert (result.corrupt, result.insane) == ((), (1,))
    assert result.tokens[0] is not None


def test_a_reused_page_with_nan_in_its_tail_gives_the_same_tokens(steps: Steps) -> None:
    """Uninitialised or poisoned pages: masked lanes still do 0 × NaN."""
    prompt = range(7, 28)
    (expected,) = steps.generate([steps.stream(prompt)], 6)
    steps.runner.arena.pages[:-1] = float("nan")
    steps.reset()
    stream = steps.stream(prompt)
    assert steps.generate([stream], 6) == [expected]


def test_only_the_tail_is_zeroed(steps: Steps) -> None:
    arena = steps.runner.arena
    arena.pages[5] = 1.0
    arena.zero_tails([(5, 3)])
    assert arena.pages[5, :, :, :, :3].eq(1).all()
    assert arena.pages[5, :, :, :, 3:].eq(0).all()


def test_the_page_behind_the_last_stays_zero(steps: Steps) -> None:
    streams = [steps.stream(range(length)) for length in (1, 16, 33)]
    steps.generate(streams, 3)
    assert steps.runner.arena.pages[steps.runner.arena.null_page].eq(0).all()


def test_a_step_writes_its_own_slots_only(steps: Steps) -> None:
    arena = steps.runner.arena
    stream = steps.stream(range(20))
    steps.generate([stream], 1)
    before = arena.pages.clone()
    steps.step([(stream, 1)])
    changed = (arena.pages != before).nonzero()
    assert {int(page) for page in changed[:, 0]} == {stream.pages[1]}
    assert {int(offset) for offset in changed[:, 4]} == {20 - 16}


def test_a_row_that_does_not_sample_gets_no_token(steps: Steps) -> None:
    stream = steps.stream(range(30))
    result = steps.step([(stream, 11)])
    assert result.tokens == (None,)
    assert result.corrupt == ()
    assert result.compute_s > 0


def test_a_plan_without_rows_still_assigns(runner: ModelRunner) -> None:
    result = runner.execute(StepPlan(step=3, rows=(), assigned=((2, 99),), zero_tails=()))
    assert (result.step, result.tokens) == (3, ())
    assert int(runner.arena.tags[2]) == 99


def test_page_tables_are_read_not_kept(runner: ModelRunner) -> None:
    pages, generations = [4, 9], [1, 1]
    row = Row(1, 0, array("I", range(20)), (pages,), (generations,), GREEDY, 0, True)
    runner.execute(StepPlan(1, (row,), ((4, 1), (9, 1)), ()))
    assert (pages, generations) == ([4, 9], [1, 1])
    assert row.token_ids == array("I", range(20))


def test_pages_travel_as_bytes(steps: Steps) -> None:
    """A page that left through the codec and came back to another place serves as well."""
    runner = steps.runner
    prompt = range(9, 50)
    first = steps.stream(prompt)
    (expected,) = steps.generate([first], 5)
    key, layout = bytes(32), runner.arena.layout
    moved = steps.stream(prompt, prefix_of=first)
    for at, page in enumerate(moved.pages):
        blob = encode_page(runner.arena.bytes_of(page), page_key=key, layout=layout, generation=5)
        assert layout.layout_id == runner.layout_id
        found = decode_page(blob, page_key=key, layout=layout)
        runner.arena.load(50 + at, found.payload)  # type: ignore[union-attr]
        moved.pages[at], moved.generations[at] = 50 + at, 7
        runner.arena.assign([(50 + at, 7)])
    assert steps.generate([moved], 5) == [expected]


def test_a_token_in_the_last_position_of_the_context_is_computed(
    tiny_folder: Any, make_runner: Any
) -> None:
    runner = make_runner(tiny_folder(max_position_embeddings=48))
    assert runner.context_tokens == 48
    stream = Steps(runner).stream(range(48))
    steps = Steps(runner)
    assert len(steps.generate([stream], 1)[0]) == 1


def test_more_context_than_the_model_has_is_refused(tiny_folder: Any, make_runner: Any) -> None:
    folder = tiny_folder()
    with pytest.raises(CheckpointError, match="allowed: 1 to 512"):
        make_runner(folder, context_tokens=513)
    longer = make_runner(folder, rope_scaling=RopeScaling("yarn", 4.0, 512))
    assert longer.context_tokens == 2048
    shorter = make_runner(folder, context_tokens=100)
    assert shorter.context_tokens == 100


def test_precisions_are_disclosed(
    tiny_folder: Any, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(tiny_folder(), precision="bf16")
    assert (runner.weights_precision, runner.kv_precision) == ("bf16", "bf16")
    assert runner.layout_id == "kv1-bf16-layers0:2-heads0:2-page16-dim12"
    assert runner.page_bytes == 2 * 2 * 2 * 16 * 12 * 2
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert choose_precision("auto", cpu) == "bf16"
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert choose_precision("auto", cpu) == "fp32"
    assert choose_precision("bf16", cpu) == "bf16"


def test_pages_are_bf16_unless_asked_otherwise(tiny_folder: Any) -> None:
    from tests.engine.execute.conftest import Spec

    config = RunnerConfig(num_pages=8, page_size=16, dtype="fp32", device="cpu", threads=1)
    runner = load_runner(Spec(str(tiny_folder())), config)
    assert (runner.compute_precision, runner.kv_precision) == ("fp32", "bf16")
    (completion,) = Steps(runner).generate([Steps(runner).stream(range(20))], 3)
    assert len(completion) == 3


def test_loading_tells_its_stages(tiny_folder: Any) -> None:
    from tests.engine.execute.conftest import Spec

    told: list[tuple[str, float]] = []
    config = RunnerConfig(num_pages=8, page_size=16, device="cpu", threads=1)
    load_runner(Spec(str(tiny_folder())), config, lambda *stage: told.append(stage))
    assert list(dict(told)) == ["open", "self-test", "weights", "warm-up"]
    assert all(0 <= fraction <= 1 for _, fraction in told)
    assert all((stage, 1.0) in told for stage in dict(told))


def test_warm_up_leaves_clean_pages(tiny_folder: Any, make_runner: Any) -> None:
    runner = make_runner(tiny_folder())
    assert runner.arena.pages.eq(0).all()
    assert runner.arena.tags.eq(0).all()


def test_sequences_leave_nothing_behind(steps: Steps) -> None:
    runner = steps.runner
    kept = set(vars(runner))
    runner.begin(1, array("I", [1, 2, 3]))
    steps.generate([steps.stream([1, 2, 3])], 2)
    runner.end(1)
    assert set(vars(runner)) == kept


LOAD = """
import resource, sys
import torch
from benchmarks.steps import Steps
from engine.execute.runner import RunnerConfig, load_runner
from engine.memory import rss_bytes
from tests.engine.execute.conftest import Spec
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
config = RunnerConfig(int(sys.argv[2]), dtype=sys.argv[3], threads=1, kernels=sys.argv[4])
runner = load_runner(Spec(sys.argv[1]), config)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
steps = Steps(runner)
steps.generate([steps.stream([5] * 900)], 4, chunks=[512])
print(rss_bytes() >> 20)
"""


def megabytes(path: Path, num_pages: int, dtype: str, kernels: str) -> list[int]:
    """At most above the start while it loads, and resident once it has computed 15 pages."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), str(num_pages), dtype, kernels],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "most"), [("torch", 800), ("auto", 93 + 130)])
def test_loading_holds_no_second_full_copy(model_path: Path, kernels: str, most: int) -> None:
    """Of torch's products, with their fp32 head, and of the kernels', which hold the file's 93."""
    peak, _ = megabytes(model_path, 16, "bf16", kernels)
    assert peak < most


@pytest.mark.slow
@pytest.mark.parametrize("which", ["model_path", "gemma_path"])
def test_what_is_resident_is_the_file_the_pages_and_little_more(
    which: str, request: pytest.FixtureRequest
) -> None:
    """However long the context could be: only what is used of it takes memory."""
    path = request.getfixturevalue(which)
    _, resident = megabytes(path, 1024, "auto", "auto")
    assert resident < path.stat().st_size / (1 << 20) + 22 + 350


def test_the_row_order_of_a_plan_is_kept(steps: Steps) -> None:
    """The batch is sorted inside; results come back by plan row."""
    prompts = [list(range(at, at + length)) for at, length in ((3, 40), (9, 1), (50, 17), (7, 2))]
    expected = [steps.generate([steps.stream(prompt)], 1)[0][0] for prompt in prompts]
    streams = [steps.stream(prompt) for prompt in prompts]
    result = steps.step([(stream, len(stream.token_ids)) for stream in streams])
    assert list(result.tokens) == expected


def test_a_greedy_row_gets_the_same_token_beside_rows_that_ask_for_more(
    runner: ModelRunner,
) -> None:
    """Greedy tokens come from the kernels, and from the sampler where it runs anyway."""
    steps = Steps(runner)
    steps.runner.arena.pages.zero_()
    prompt = range(40, 71)
    plain = steps.stream(prompt)
    (expected,) = steps.generate([plain], 6)
    told = steps.stream(prompt, sampling=Sampling(9, temperature=0.0, logprobs=2))
    drawn = steps.stream(prompt, sampling=Sampling(9, temperature=2.0, seed=3))
    biased = steps.stream(prompt, sampling=Sampling(9, temperature=0.0, logit_bias=((7, 1e4),)))
    again = steps.stream(prompt)
    found = steps.generate([told, drawn, biased, again], 6)
    assert found[0] == found[3] == expected
    assert found[2] == [7] * 6
    assert found[1] != expected


def test_stop_tokens_are_banned_before_min_tokens_for_greedy_rows(runner: ModelRunner) -> None:
    steps = Steps(runner)
    (first, *_), = steps.generate([steps.stream(range(20, 45))], 1)  # fmt: skip
    banned = Sampling(9, temperature=0.0, min_tokens=1, stop_token_ids=(first,))
    (found,) = steps.generate([steps.stream(range(20, 45), sampling=banned)], 1)
    assert found != [first]


def test_more_sampling_rows_than_the_head_takes_at_once(runner: ModelRunner) -> None:
    prompts = [range(at % 90, at % 90 + 1 + at % 3) for at in range(runner.model.head_rows + 7)]
    steps = Steps(runner)
    expected = []
    for prompt in prompts:
        steps.reset()
        expected += steps.generate([steps.stream(prompt)], 1)
    steps.reset()
    assert len(prompts) > runner.model.head_rows
    assert len(prompts) <= runner.arena.num_pages
    assert steps.generate([steps.stream(prompt) for prompt in prompts], 1) == expected


def test_a_step_beyond_the_native_buffers_is_refused(tiny_gguf: Any, make_runner: Any) -> None:
    runner = make_runner(tiny_gguf("llama"), precision="native", step_tokens=20)
    steps = Steps(runner)
    steps.step([(steps.stream(range(20)), 20)])
    with pytest.raises(AssertionError, match="21 token rows, allowed 20"):
        steps.step([(steps.stream(range(21)), 21)])


def test_a_token_beyond_the_vocabulary_does_not_reach_a_kernel(
    tiny_gguf: Any, make_runner: Any
) -> None:
    runner = make_runner(tiny_gguf("llama"), precision="native")
    with pytest.raises(AssertionError, match="token 160, allowed below 160"):
        Steps(runner).generate([Steps(runner).stream([5, 160])], 1)


def test_torch_serves_where_there_are_no_kernels(
    tiny_gguf: Any, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.execute.models.decoder import Decoder
    from tests.engine.execute.conftest import Spec

    path = tiny_gguf("llama")
    expected = make_runner(path, pages="bf16")
    monkeypatch.setenv("KAGARI_CPU_ISA", "off")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    config = RunnerConfig(num_pages=64, page_size=16, device="cpu", threads=1)
    runner = load_runner(Spec(str(path)), config)
    assert isinstance(runner.model, Decoder)
    assert runner.compute_precision == "fp32"
    found = [Steps(one).generate([Steps(one).stream(range(30))], 8) for one in (runner, expected)]
    assert found[0] == found[1]
