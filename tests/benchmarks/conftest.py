"""A tiny random model that benchmarks can run on in no time."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves it; 160 tokens, no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=160,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2304,
            initializer_range=0.1,
        )
    ).save_pretrained(folder)
    return folder
