"""Greedy tokens equal transformers' until the two best logits are too close to call."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peer import transformers_llama
from benchmarks.steps import Steps
from engine.execute.runner import ModelRunner
from engine.execute.weights import RopeScaling, open_checkpoint
from tests.engine.execute.family_checks import (
    GAPS,
    agreed_steps,
    assert_equals_peer,
    peer_logits,
    run_every_way,
)
from tests.engine.execute.tiny_families import YARN

PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "The three laws of motion are",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
)


def agreed(peer: Any, prompt: list[int], completion: list[int], gap: float) -> int:
    return agreed_steps(peer_logits(peer, prompt, completion), completion, gap)


def test_the_benchmarks_peer_equals_a_saved_llama(tiny_folder: Any) -> None:
    folder = tiny_folder(rope_parameters=YARN, num_attention_heads=7, num_key_value_heads=1)
    peer = transformers_llama(open_checkpoint(folder), dtype=torch.float32)
    from transformers import LlamaForCausalLM

    saved = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [(7 * at + 3) % 160 for at in range(181)]
    assert torch.equal(peer_logits(peer, prompt), peer_logits(saved, prompt))


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
        agreed(real_peer, prompt, completion, gap)
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
            agreed(real_peer, prompt, completion, gap)


def test_llama_family_stretched_by_its_entry_equals_transformers_past_the_original_context(
    tiny_folder: Any, make_runner: Any
) -> None:
    """A rope table sized by the original context would fail or wrap here."""
    folder = tiny_folder(max_position_embeddings=64)
    stretched = RopeScaling("yarn", 4.0, 64)
    peer = transformers_llama(open_checkpoint(folder), dtype=torch.float32, stretched=stretched)
    runner = make_runner(folder, rope_scaling=stretched)
    assert runner.context_tokens == 256
    prompt = [(13 * at + 1) % 160 for at in range(200)]
    assert_equals_peer(runner, peer, [prompt])


TEXTS = (
    "The capital of France is",
    "Once upon a time there was a little",
    "The three most important things in life are",
    "In this paper we show that",
)


def gemma_prompts(path: Path, lengths: tuple[int, ...]) -> list[list[int]]:
    """The texts' words, each of which is a token; then words at random, so many tokens in all."""
    tokens: Any = open_checkpoint(path).metadata["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(tokens)}
    prompts = [
        [2, *(ids[f"▁{word}" if at else word] for at, word in enumerate(text.split()))]
        for text in TEXTS
    ]
    words = [index for token, index in ids.items() if token.startswith("▁") and len(token) > 3]
    return prompts + [
        [2, *(words[(at * at * 31 + at * 7919) % len(words)] for at in range(length - 1))]
        for length in lengths
    ]


@pytest.fixture(scope="module")
def gemma_peer(gemma_path: Path) -> Any:
    """transformers reads the file by itself, names, values and config."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(gemma_path.parent), gguf_file=gemma_path.name, dtype=torch.float32
    ).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gemma3_family_real_weights_equal_transformers_own_gguf_loader(
    gemma_path: Path, gemma_peer: Any
) -> None:
    checkpoint = open_checkpoint(gemma_path)
    state = gemma_peer.state_dict()
    assert len(checkpoint.tensors) == 236
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.read(name), state[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gemma3_family_real_model_equals_transformers(
    gemma_path: Path, gemma_peer: Any, make_runner: Any
) -> None:
    """Prompts within the window of 512, past it, and past whole key blocks before it."""
    runner = make_runner(gemma_path, num_pages=40, page_size=64)
    prompts = gemma_prompts(gemma_path, (300, 505, 700, 1300))
    assert_equals_peer(runner, gemma_peer, prompts, tokens=16, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gemma3_family_real_model_in_bf16_equals_transformers_on_the_rounded_weights(
    gemma_path: Path, gemma_peer: Any, make_runner: Any
) -> None:
    peer = copy.deepcopy(gemma_peer)
    peer.lm_head.weight = torch.nn.Parameter(peer.lm_head.weight.clone())  # stays fp32
    for name, parameter in peer.named_parameters():
        if parameter.ndim > 1 and not name.startswith("lm_head"):
            parameter.data = parameter.data.bfloat16().float()
    scale = peer.model.embed_tokens.embed_scale
    scale.data = scale.data.bfloat16().float()
    runner = make_runner(gemma_path, precision="bf16", num_pages=80, page_size=64)
    steps = Steps(runner)
    prompts = gemma_prompts(gemma_path, (300, 700, 1300))
    completions = steps.generate([steps.stream(prompt) for prompt in prompts], 16)
    compared = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        compared += agreed(peer, prompt, completion, GAPS["bf16"])
    assert compared >= 12


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gemma3_family_real_model_is_exact_however_it_is_run(
    precision: str, threads: int, gemma_path: Path, make_runner: Any
) -> None:
    runner = make_runner(
        gemma_path, precision=precision, num_pages=150, page_size=64, threads=threads
    )
    prompts = gemma_prompts(gemma_path, (700, 1300))[2:]
    run_every_way(runner, prompts, 4, chunk_sizes=((1 << 20,), (333, 64, 1)))
