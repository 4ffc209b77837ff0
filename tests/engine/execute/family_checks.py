"""What every family is held to: transformers' logits and tokens, and its own in any batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.steps import Steps
from engine.execute.models.model import Head
from engine.execute.runner import ModelRunner
from policies.contract.wire import Sampling

GAPS = {
    "fp32": 1e-3,
    "int16": 0.05,
    "bf16": 0.1,
}  # of the two best logits: closer ones are not compared
RANDOM = Sampling(max_tokens=99, temperature=1.3, top_p=0.95, top_k=40, seed=11)


def peer_logits(peer: Any, prompt: Sequence[int], completion: Sequence[int] = ()) -> Tensor:
    """fp32 [len(completion), vocab]: what each token of it was chosen by; of the prompt's all
    positions where there is none."""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *completion]])
        if not completion:
            return peer(ids).logits[0].float()
        return peer(ids[:, :-1], logits_to_keep=len(completion)).logits[0].float()


def agreed_steps(logits: Tensor, completion: Sequence[int], gap: float) -> int:
    """Steps compared; asserts equality until the first whose best two logits are close."""
    for step, (row, token) in enumerate(zip(logits, completion, strict=True)):
        best = row.topk(2)
        if float(best.values[0] - best.values[1]) < gap:
            return step
        assert token == int(best.indices[0]), f"step {step}, gap {best.values}"
    return len(completion)


def assert_equals_peer(
    runner: ModelRunner,
    peer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 24,
    atol: float = 1e-4,
) -> None:
    """Logits of every step within atol, and greedy tokens equal, of each prompt alone."""
    seen: list[Tensor] = []
    head = runner.model.head

    def spy(token_rows: Sequence[int]) -> Head:
        found = head(token_rows)
        seen.append(found.logits.clone())
        return found

    steps = Steps(runner)
    compared = 0
    for prompt in prompts:
        steps.reset()
        seen.clear()
        runner.model.head = spy  # type: ignore[method-assign]
        (completion,) = steps.generate([steps.stream(prompt)], tokens)
        runner.model.head = head  # type: ignore[method-assign]
        expected = peer_logits(peer, prompt, completion)
        torch.testing.assert_close(torch.cat(seen), expected, atol=atol, rtol=0)
        compared += agreed_steps(expected, completion, max(GAPS["fp32"], 2 * atol))
    assert compared >= tokens * len(prompts) // 3


def run_every_way(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    chunk_sizes: Sequence[Sequence[int]] = ((1 << 20,), (7, 33, 1, 64), (150,)),
    sampling: Sampling = RANDOM,
) -> None:
    """Alone and cold; then batched, chunked, preempted and warm: the same tokens."""
    steps = Steps(runner)
    expected = []
    for prompt in prompts:
        steps.reset()
        expected += steps.generate([steps.stream(prompt, sampling=sampling)], tokens)
    for chunks in chunk_sizes:
        steps.reset()
        streams = [steps.stream(prompt, sampling=sampling) for prompt in prompts]
        assert steps.generate(streams, tokens, chunks=chunks) == expected
    steps.reset()
    streams = [steps.stream(prompt, sampling=sampling) for prompt in prompts]
    steps.generate(streams, tokens // 2, chunks=chunk_sizes[1])
    steps.preempt(streams[1])
    steps.preempt(streams[-1])
    assert steps.generate(streams, tokens - tokens // 2, chunks=chunk_sizes[-1]) == expected
    donor = streams[-1]
    warm = steps.stream(prompts[-1], sampling=sampling, prefix_of=donor)
    assert warm.num_computed > 0
    assert steps.generate([warm], tokens) == [expected[-1]]
