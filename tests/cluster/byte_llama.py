"""Saves a small random Llama over single bytes as a folder, as transformers and tokenizers do."""

from __future__ import annotations

import json
from pathlib import Path


def save_byte_llama(
    path: Path,
    *,
    template: str,
    seed: int,
    end: str | None = None,
    also: tuple[str, ...] = (),
    **config: int,
) -> None:
    """It speaks ASCII, so that text tells its tokens, and stops at `end`, or never.

    also: further special tokens. config: fields of LlamaConfig.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = (*also, *([] if end is None else [end]))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None if end is None else tokenizer.token_to_id(end),
            **config,
        )
    )
    with torch.no_grad():
        for index, letter in enumerate([*alphabet, *names]):
            if not (len(letter) == 1 and letter.isascii()):
                model.lm_head.weight[index] = 0.0
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": end, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
