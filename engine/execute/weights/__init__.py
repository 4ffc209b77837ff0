"""Checkpoints on disk: their facts without torch, their tensors one at a time."""

from engine.execute.weights.checkpoint import open_checkpoint
from engine.execute.weights.facts import (
    Checkpoint,
    CheckpointError,
    ModelConfig,
    RopeScaling,
    TensorInfo,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ModelConfig",
    "RopeScaling",
    "TensorInfo",
    "open_checkpoint",
]
