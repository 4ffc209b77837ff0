"""A GGUF file's header, with the agent's kind of error."""

from __future__ import annotations

from pathlib import Path

from engine.execute.weights.facts import CheckpointError
from engine.execute.weights.gguf_header import Header, read_header
from node_agent.errors import NodeError


def read_gguf(path: Path) -> Header:
    """Raises NodeError when the file is absent, truncated or not GGUF version 2 or 3."""
    try:
        return read_header(path)
    except (OSError, CheckpointError) as error:
        raise NodeError(
            f"checkpoint {path.name}",
            found=str(error),
            allowed="a whole GGUF file of version 2 or 3, little endian",
            remedy="pull or copy the file again",
        ) from error
