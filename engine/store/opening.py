"""Opens the tiers that an engine's flags ask for, each behind its guard.

A flag that cannot be meant is refused. A tier that cannot be used (its disk is broken, its folder
another's) is left out and said so: without a cache an engine is slower, and serves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.config import ConfigError, EngineConfig, TierConfig
from engine.store.block_file import BLOCK, remove_unused, whole_blocks
from engine.store.guard import Guard
from engine.store.host import HostTier
from engine.store.mooncake import MooncakeTier
from engine.store.page_codec import PageLayout
from engine.store.shared_arena import SharedArenaTier
from engine.store.shared_host import SharedHostTier
from engine.store.slot_file import FILE_NAME, SlotFileTier
from engine.store.tier import PageRecord, Tier
from engine.store.tiered import PageMemory, TieredStore
from policies.contract.wire import Tier as TierName

Progress = Callable[[str, float], None]

# Bytes/s and seconds to the first byte, until fetches were measured.
_ASSUMED: Mapping[TierName, tuple[float, float]] = {
    "host": (4e9, 0.001),
    "disk": (1e9, 0.002),
    "cluster": (2e8, 0.01),
}
_CALLS_AT_ONCE = 8  # of a tier: its lane's reads and write, reads for slower tiers, some that hang


@dataclass(slots=True)
class OpenTiers:
    """found: what each tier holds already, parents before children. peeks: of tiers that others
    fill too, how many leading pages are there now. host_arena: see wire.EngineInfo."""

    store: TieredStore
    configs: tuple[TierConfig, ...]
    found: dict[TierName, list[PageRecord]]
    peeks: dict[TierName, Callable[[Sequence[bytes]], int]]
    lost: tuple[TierName, ...]
    host_arena: str = ""


@dataclass(slots=True)
class _Opened:
    tiers: list[Tier] = field(default_factory=list)
    lost: list[TierName] = field(default_factory=list)

    def add(self, name: TierName, make: Callable[[], Tier]) -> None:
        try:
            self.tiers.append(make())
        except ConfigError as error:
            self.lost.append(name)
            _tell("engine_tier_lost", name, error)


def open_tiers(
    config: EngineConfig,
    layout: PageLayout,
    memory: PageMemory,
    *,
    kind: str,
    progress: Progress,
) -> OpenTiers:
    """kind: a page_kind; pages of another are never asked for. Raises ConfigError where a size has
    no room for a page."""
    opened = _Opened()
    host_pages = _pages("--kv-host-mb", config.kv_host_mb, layout.page_bytes)
    slot_bytes = BLOCK + whole_blocks(layout.page_bytes)
    disk_pages = _pages("--kv-disk-mb", config.kv_disk_mb, slot_bytes, BLOCK)
    shared: SharedHostTier | None = None
    if host_pages and config.kv_host_share is not None:
        shared = _share_host(Path(config.kv_host_share) / kind, layout, host_pages)
    if shared is not None:
        opened.tiers.append(shared)
    elif host_pages:
        opened.add("host", lambda: HostTier(layout, host_pages))
    if disk_pages:
        assert config.kv_disk_dir is not None
        folder = Path(config.kv_disk_dir) / kind
        opened.add("disk", lambda: _open_disk(folder, layout, disk_pages, progress))
    if config.cluster_store:
        url = config.cluster_store
        opened.add("cluster", lambda: MooncakeTier(url, layout, kind))
    found = {tier.name: list(tier.records()) for tier in opened.tiers if tier is not shared}
    configs = tuple(
        TierConfig(
            name=tier.name,
            capacity_pages=tier.capacity_pages,
            bytes_per_s=_ASSUMED[tier.name][0],
            latency_s=_ASSUMED[tier.name][1],
        )
        for tier in opened.tiers
    )
    guards = [Guard(tier, max_in_flight=_CALLS_AT_ONCE) for tier in opened.tiers]
    return OpenTiers(
        TieredStore(guards, memory),
        configs,
        found,
        {} if shared is None else {"host": shared.peek},
        tuple(opened.lost),
        "" if shared is None else shared.arena_id,
    )


def _share_host(home: Path, layout: PageLayout, capacity_pages: int) -> SharedHostTier | None:
    """None: it cannot be had, so this engine keeps a memory of its own."""
    try:
        return SharedHostTier(SharedArenaTier(home, layout, capacity_pages))
    except ConfigError as error:
        _tell("engine_host_tier_not_shared", "host", error)
        return None


def _tell(event: str, tier: TierName, error: ConfigError) -> None:
    line = {"event": event, "tier": tier, "error": str(error)}
    sys.stderr.write(msgspec.json.encode(line).decode() + "\n")


def _pages(flag: str, megabytes: int, page_bytes: int, overhead: int = 0) -> int:
    pages = max(0, (megabytes << 20) - overhead) // page_bytes
    if megabytes and not pages:
        raise ConfigError(
            flag,
            found=megabytes,
            allowed=f"{-(-(page_bytes + overhead) >> 20)} or more: a page has {page_bytes} bytes",
            remedy="raise it, or give 0 for no such tier",
        )
    return pages


def _open_disk(
    folder: Path, layout: PageLayout, capacity_pages: int, progress: Progress
) -> SlotFileTier:
    left = _remove_others(folder)
    tier = SlotFileTier(folder, layout, capacity_pages, lambda share: progress("scan", share))
    for note in (*left, *tier.notes):
        sys.stderr.write(f"engine: {note}\n")
    return tier


def _remove_others(folder: Path) -> list[str]:
    """What this engine left beside it, pages of another kind: the disk that it was
    promised is in use once, and no purge would reach there. Returns what could not be removed."""
    left: list[str] = []
    for path in folder.parent.glob(f"*/{FILE_NAME}"):
        if path.parent == folder:
            continue
        try:
            remove_unused(path)
            path.parent.rmdir()
        except OSError as error:
            left.append(f"{path}: pages of another kind stay there ({error.strerror})")
    return left
