"""The slower tiers of one engine: how large they are, and where the one on disk lies.

An engine's folder is its alone: DIR/<node id>/<model>, so that nodes which share a home or a disk
never meet in one file, and a node finds its own pages again.
"""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

import structlog

from node_agent.config import NodeConfig
from node_agent.errors import NodeError

DEFAULT_HOST_MB = 512
DEFAULT_DISK_MB = 1024
ROOM = 16  # a disk tier that nobody asked for is made where so many times its size is free
MB = 1 << 20


def tier_flags(config: NodeConfig, node_id: str, model: str) -> tuple[str, ...]:
    """For `python -m engine serve`; makes the folder. Raises NodeError where it cannot be had."""
    if config.script is not None:  # what a script says has no pages worth keeping
        return ()
    host_mb = DEFAULT_HOST_MB if config.kv_host_mb is None else config.kv_host_mb
    folder = disk_folder(config, node_id, model)
    disk_mb = _disk_mb(config.kv_disk_mb, folder)
    flags: tuple[str, ...] = ("--kv-host-mb", str(host_mb), "--kv-disk-mb", str(disk_mb))
    if host_mb and config.kv_host_share is not None:
        flags += ("--kv-host-share", str(config.kv_host_share))
    if disk_mb:
        _make_private(folder)
        flags += ("--kv-disk-dir", str(folder))
    else:
        _remove(folder)
    if config.cluster_store is not None:
        flags += ("--cluster-store", config.cluster_store)
    return flags


def disk_folder(config: NodeConfig, node_id: str, model: str) -> Path:
    """A model's name may be a path or hold a slash: its digest tells apart what reads alike."""
    readable = "".join(c if c.isascii() and c.isalnum() else "-" for c in Path(model).name)[:40]
    name = f"{readable}-{sha256(model.encode()).hexdigest()[:8]}"
    return (config.kv_disk_dir or config.home / "kv") / node_id / name


def _disk_mb(asked: int | None, folder: Path) -> int:
    if asked == 0:
        return 0
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        free = shutil.disk_usage(there).free + _occupied(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    if asked is None:
        if free >= ROOM * DEFAULT_DISK_MB * MB:
            return DEFAULT_DISK_MB
        structlog.get_logger().warning("no_disk_tier", folder=str(there), free_mb=free // MB)
        return 0
    if free < asked * MB:
        raise NodeError(
            "--kv-disk-mb",
            found=str(asked),
            allowed=f"at most the {free // MB} MB that are free in {there}",
            remedy="pass a smaller --kv-disk-mb, or --kv-disk-dir on another disk",
        )
    return asked


def _occupied(folder: Path) -> int:
    """Bytes that the engine's earlier life has there and will use again."""
    if not folder.is_dir():
        return 0
    return sum([path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()])


def _remove(folder: Path) -> None:
    """What an earlier life had on disk: no purge would reach it there."""
    if not folder.is_dir():
        return
    try:
        shutil.rmtree(folder)
    except OSError as error:
        log = structlog.get_logger()
        log.warning("disk_pages_left", folder=str(folder), error=error.strerror or str(error))


def _make_private(folder: Path) -> None:
    """Pages are what tenants said: nobody else may read them. A base folder is left as it is."""
    try:
        folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (folder.parent, folder):
            path.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> NodeError:
    return NodeError(
        "--kv-disk-dir",
        found=f"{folder}: {error.strerror or error}",
        allowed="a folder that this user can write",
        remedy="pass another --kv-disk-dir, or --kv-disk-mb 0",
    )
