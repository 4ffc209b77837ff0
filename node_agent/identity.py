"""Who this node is: an id that stays and an epoch that grows at every start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from node_agent.disk import write_atomically
from node_agent.errors import NodeError


@dataclass(frozen=True, slots=True)
class Identity:
    node_id: str
    node_epoch: int


def node_id_of(home: Path, chosen: str | None, draw: Callable[[], str]) -> str:
    """The chosen id, else the persisted one, else a drawn one that is persisted."""
    if chosen is not None:
        return chosen
    file = home / "node-id"
    persisted = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    if persisted:
        return persisted
    node_id = draw()
    write_atomically(file, node_id.encode() + b"\n")
    return node_id


def begin_epoch(home: Path, node_id: str, *, wall_s: float) -> Identity:
    """Persists and returns the next epoch. Call with the folder's lock held.

    Several nodes may share a home, so the epoch lies in home/nodes/<id>/. The wall clock is a
    floor: an epoch grows even where the folder was lost.
    """
    file = home / "nodes" / node_id / "node-epoch"
    try:
        last = int(file.read_text(encoding="utf-8")) if file.exists() else 0
    except (OSError, ValueError) as error:
        raise NodeError(
            f"{file}",
            found=str(error),
            allowed="one whole number",
            remedy="remove the file: the wall clock then gives the next epoch",
        ) from error
    epoch = max(last + 1, int(wall_s))
    write_atomically(file, b"%d\n" % epoch)
    return Identity(node_id, epoch)
