"""Greedy tokens equal transformers' until the two best logits are too close to call."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.peer import transformers_llama
from benchmarks.steps import Steps
from engine.execute.runner import ModelRunner
from engine.execute.weights import RopeScaling, open_checkpoint

GAPS = {"fp32": 1e-3, "bf16": 0.1}
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "The three laws of motion are",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
)


def next_logits(peer: Any, ids: Sequence[int]) -> Tensor:
    """fp32 [len(ids), vocab]."""
    with torch.inference_mode():
        return peer(torch.tensor([list(ids)])).logits[0].float()


def agreed_steps(peer: Any, prompt: Sequence[int], completion: Sequence[int], gap: float) -> int:
    """Steps compared; asserts equality until the first step whose best two logits are close."""
    logits = next_logits(peer, [*prompt, *completion])[len(prompt) - 1 : -1]
    for step, (row, token) in enumerate(zip(logits, completion, strict=True)):
        best = row.topk(2)
        if float(best.values[0] - best.values[1]) < gap:
            return step
        assert token == int(best.indices[0]), f"step {step}, gap {best.values}"
    return len(completion)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="odd-groups"),
        pytest.param(
            {"num_attention_heads": 5, "num_key_value_heads": 5, "tie_word_embeddings": True},
            id="no-groups-tied",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
                "num_attention_heads": 7,
                "num_key_value_heads": 1,
            },
            id="yarn",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "head_dim": 16,
            },
            id="llama3",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
            id="linear",
        ),
    ],
)
def test_llama_family_greedy_tokens_equal_transformers(
    changes: dict[str, object], tiny_folder: Any, make_runner: Any
) -> None:
    folder = tiny_folder(**changes)
    peer = transformers_llama(open_checkpoint(folder), dtype=torch.float32)
    from transformers import LlamaForCausalLM

    saved = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [(7 * at + 3) % 160 for at in range(181)]
    assert torch.equal(next_logits(peer, prompt), next_logits(saved, prompt))
    runner = make_runner(folder)
    steps = Steps(runner)
    compared = 0
    for length in (1, 17, 181):
        (completion,) = steps.generate([steps.stream(prompt[:length])], 24)
        compared += agreed_steps(peer, prompt[:length], completion, GAPS["fp32"])
    assert compared >= 36


def test_llama_family_logits_equal_transformers(tiny_folder: Any, make_runner: Any) -> None:
    folder = tiny_folder()
    peer = transformers_llama(open_checkpoint(folder), dtype=torch.float32)
    runner = make_runner(folder)
    seen: list[Tensor] = []
    logits = runner.model.logits

    def spy(x: Tensor, rows: Tensor) -> Tensor:
        seen.append(logits(x, rows).clone())
        return seen[-1].clone()

    runner.model.logits = spy
    prompt = [(11 * at + 5) % 160 for at in range(90)]
    Steps(runner).generate([Steps(runner).stream(prompt)], 1)
    torch.testing.assert_close(seen[0][0], next_logits(peer, prompt)[-1], atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def real_peer(model_path: Path) -> Any:
    return transformers_llama(open_checkpoint(model_path), dtype=torch.float32)


def encode(model_path: Path, text: str) -> list[int]:
    """Token ids by the GGUF's own merges, enough for plain text: greedy BPE over GPT-2 letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    facts = open_checkpoint(model_path).metadata
    tokens: Any = facts["tokenizer.ggml.tokens"]
    merges: Any = facts["tokenizer.ggml.merges"]
    tokenizer = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            [tuple(merge.split(" ", 1)) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def test_llama_family_real_model_equals_transformers(
    real_runner: ModelRunner, real_peer: Any, model_path: Path
) -> None:
    steps = Steps(real_runner)
    prompts = [encode(model_path, text) for text in PROMPTS]
    completions = steps.generate([steps.stream(prompt) for prompt in prompts], 24)
    gap = GAPS[real_runner.compute_precision]
    compared = [
        agreed_steps(real_peer, prompt, completion, gap)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    assert sum(compared) >= 12, compared


@pytest.mark.slow
def test_llama_family_real_model_equals_transformers_64_by_64(
    real_runner: ModelRunner, real_peer: Any, model_path: Path
) -> None:
    steps = Steps(real_runner)
    gap = GAPS[real_runner.compute_precision]
    if real_runner.compute_precision == "bf16":
        # The weights that are served are the rounded ones; rounding them moves gaps by itself.
        real_peer = copy.deepcopy(real_peer)
        for parameter in real_peer.parameters():
            parameter.data = parameter.data.bfloat16().float()
    topics = ("rivers", "prime numbers", "bread", "the moon", "chess", "winter", "Rome", "whales")
    asks = (
        "Explain",
        "List five facts about",
        "Write a story about",
        "Why do people like",
        "Translate into French:",
        "What is the history of",
        "Compare dogs and",
        "Define",
    )
    for ask in asks:
        prompts = [
            encode(
                model_path,
                f"<|im_start|>user\n{ask} {topic}.<|im_end|>\n<|im_start|>assistant\n",
            )
            for topic in topics
        ]
        steps.reset()
        completions = steps.generate([steps.stream(prompt) for prompt in prompts], 64)
        for prompt, completion in zip(prompts, completions, strict=True):
            agreed_steps(real_peer, prompt, completion, gap)


def test_llama_family_yarn_positions_past_the_original_context_equal_transformers(
    tiny_folder: Any, make_runner: Any
) -> None:
    """A rope table sized by the original context would fail or wrap here."""
    folder = tiny_folder(max_position_embeddings=64)
    stretched = RopeScaling("yarn", 4.0, 64)
    peer = transformers_llama(open_checkpoint(folder), dtype=torch.float32, stretched=stretched)
    runner = make_runner(folder, rope_scaling=stretched)
    assert runner.context_tokens == 256
    prompt = [(13 * at + 1) % 160 for at in range(200)]
    steps = Steps(runner)
    (completion,) = steps.generate([steps.stream(prompt)], 24)
    assert agreed_steps(peer, prompt, completion, GAPS["fp32"]) >= 8
