"""Checkpoints on disk: their facts without torch, their tensors one at a time."""

from engine.execute.weights.checkpoint import open_checkpoint
from engine.execute.weights.facts import (
    Blocks,
    Checkpoint,
    CheckpointError,
    ModelConfig,
    RopeScaling,
    TensorInfo,
)

__all__ = [
    "Blocks",
    "Checkpoint",
    "CheckpointError",
    "ModelConfig",
    "RopeScaling",
    "TensorInfo",
    "open_checkpoint",
]
