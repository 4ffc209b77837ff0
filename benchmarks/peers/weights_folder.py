"""A checkpoint's dequantised weights as a folder in Hugging Face's form, for peers."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks.peer import transformers_llama
from engine.execute.weights import Checkpoint


def bf16_folder(checkpoint: Checkpoint, home: Path) -> Path:
    """Made once for each set of weights, and whole or not at all."""
    folder = home / f"{checkpoint.weights_digest[:16]}-bf16"
    if folder.exists():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=home, prefix=f"{folder.name}."))
    try:
        transformers_llama(checkpoint, dtype=torch.bfloat16).save_pretrained(new)
        os.rename(new, folder)
    finally:
        if new.exists():
            shutil.rmtree(new)
    return folder
