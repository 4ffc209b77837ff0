"""Opens a checkpoint by what lies at the path: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from engine.execute.weights.facts import Checkpoint, CheckpointError
from engine.execute.weights.gguf import GgufCheckpoint
from engine.execute.weights.safetensors import FolderCheckpoint


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads and checks the headers only. Raises CheckpointError before any weight is touched."""
    path = Path(path)
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise CheckpointError(
        "path",
        found=f"nothing at {path}",
        allowed="a .gguf file or a folder with config.json and safetensors",
        remedy="Fetch a model first: kagari models pull smollm2-135m.",
    )
