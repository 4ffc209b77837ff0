"""A whole model folder in Hugging Face's form, tokenizer and template too, for foreign servers."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.weights_folder import bf16_folder
from engine.execute.weights import open_checkpoint
from node_agent.bundle import load_bundle
from policies.contract.bundle import decode_bundle


def served_folder(checkpoint: Path, home: Path, *, chat_template: str | None = None) -> Path:
    """Of a .gguf file; made once under home for each set of weights."""
    opened = open_checkpoint(checkpoint)
    folder = bf16_folder(opened, home)
    _, encoded = load_bundle(
        checkpoint,
        home / "bundles",
        source_digest=opened.weights_digest,
        context_tokens=None,
        page_size=64,
        labels=(),
        chat_template=chat_template,
    )
    bundle = decode_bundle(encoded)
    (folder / "tokenizer.json").write_bytes(bundle.tokenizer_json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": bundle.chat_template,
        "bos_token": bundle.bos_token,
        "eos_token": bundle.eos_token,
        "add_bos_token": bundle.add_bos,
        "model_max_length": bundle.context_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
