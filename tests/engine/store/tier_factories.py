"""Every tier there is, made alike for the contract suite; one more tier is one more entry here."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256, shake_128
from itertools import repeat
from pathlib import Path

import pytest

from engine.store.fault_tier import Fault, FaultTier
from engine.store.guard import Guard
from engine.store.host import HostTier
from engine.store.mooncake import MooncakeTier
from engine.store.page_codec import PageLayout
from engine.store.shared_arena import SharedArenaTier
from engine.store.slot_file import FILE_NAME, SlotFileTier
from engine.store.tier import PageRecord, Tier
from tests.engine.store.mooncake_cluster import Inside, lasting_cluster

# Whole blocks, so that aligned memory is read into directly; ODD_LAYOUT's pages end within one.
LAYOUT = PageLayout("bf16", num_layers=2, num_kv_heads=2, page_size=16, head_dim=64)
ODD_LAYOUT = PageLayout("bf16", num_layers=2, num_kv_heads=3, page_size=16, head_dim=4)
KIND = "kind"  # of pages: see engine/store/page_kind.py
OWNERS = (b"owner-a" + bytes(9), b"owner-b" + bytes(9))
NEVER = 1e12  # a deadline


def key_of(number: int) -> bytes:
    return sha256(b"key %d" % number).digest()


def record_of(number: int, owner: bytes = OWNERS[0], *, depth: int = 0) -> PageRecord:
    return PageRecord(key_of(number), key_of(number - 1), depth, owner, generation=number)


def payload_of(key: bytes, layout: PageLayout = LAYOUT) -> bytes:
    """What a page of this key must hold, whoever asks."""
    return shake_128(key).digest(layout.page_bytes)


@dataclass
class Rig:
    """A tier and what a test may do to it from outside.

    at_rest: every byte that it keeps. overwrite: changes some of them, at an offset into at_rest.
    reopen: ends the tier and starts another over what it left, where anything outlives it.
    is_exact: it holds capacity_pages and says what it holds (a store of its own mind does not).
    """

    tier: Tier
    layout: PageLayout
    at_rest: Callable[[], bytes] | None = None
    overwrite: Callable[[int, bytes], None] | None = None
    reopen: Callable[[], Tier] | None = None
    is_exact: bool = True

    def flip(self, key: bytes, *, bit: int = 0) -> bool:
        """A bit of the payload that is stored under this key; False: it is not there."""
        assert self.at_rest is not None
        assert self.overwrite is not None
        payload = payload_of(key, self.layout)
        at = self.at_rest().find(payload)
        if at < 0:
            return False
        byte, mask = bit // 8 % len(payload), 1 << bit % 8
        self.overwrite(at + byte, bytes([payload[byte] ^ mask]))
        return True


Factory = Callable[[Path, int], Rig]  # folder, capacity in pages


def host(folder: Path, capacity: int, *, layout: PageLayout = LAYOUT) -> Rig:
    arena = memoryview(mmap.mmap(-1, capacity * layout.page_bytes))

    def overwrite(at: int, data: bytes) -> None:
        arena[at : at + len(data)] = data

    tier = HostTier(layout, capacity, arena=arena)
    return Rig(tier, layout, arena.tobytes, overwrite)


def slot_file(
    folder: Path, capacity: int, *, direct: bool = True, layout: PageLayout = LAYOUT
) -> Rig:
    path = folder / FILE_NAME

    def start() -> SlotFileTier:
        tier = SlotFileTier(folder, layout, capacity, direct=direct)
        if direct and not tier.is_direct:
            tier.close()
            pytest.skip(f"no direct I/O in {folder}: {tier.notes}")
        return tier

    def overwrite(at: int, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, data, at)
        os.close(fd)

    def reopen() -> Tier:
        rig.tier.close()
        rig.tier = start()
        return rig.tier

    rig = Rig(start(), layout, path.read_bytes, overwrite, reopen)
    return rig


def buffered(folder: Path, capacity: int) -> Rig:
    return slot_file(folder, capacity, direct=False)


def odd_host(folder: Path, capacity: int) -> Rig:
    return host(folder, capacity, layout=ODD_LAYOUT)


def odd_slot_file(folder: Path, capacity: int) -> Rig:
    return slot_file(folder, capacity, layout=ODD_LAYOUT)


def within_faults(rig: Rig, faults: Iterable[Fault | None]) -> FaultTier:
    """The rig's tier from now on."""
    tier = FaultTier(rig.tier, faults, flip=rig.flip if rig.at_rest else None)
    rig.tier = tier
    return tier


def faultless(folder: Path, capacity: int) -> Rig:
    rig = host(folder, capacity)
    within_faults(rig, repeat(None, 1000))
    return rig


def guarded(folder: Path, capacity: int) -> Rig:
    rig = host(folder, capacity)
    rig.tier = Guard(rig.tier, max_in_flight=8)
    return rig


def shared_arena(folder: Path, capacity: int, *, layout: PageLayout = LAYOUT) -> Rig:
    tier = SharedArenaTier(folder, layout, capacity, folder=folder)

    def overwrite(at: int, data: bytes) -> None:
        fd = os.open(tier.path, os.O_WRONLY)
        os.pwrite(fd, data, at)
        os.close(fd)

    return Rig(tier, layout, tier.path.read_bytes, overwrite)


def odd_shared_arena(folder: Path, capacity: int) -> Rig:
    return shared_arena(folder, capacity, layout=ODD_LAYOUT)


def mooncake(folder: Path, capacity: int) -> Rig:
    cluster, memory, client = lasting_cluster()
    client.remove_by_regex(".*", True)
    memory.clear()
    with cluster.network.inside():
        tier = MooncakeTier(cluster.url, LAYOUT, KIND)
        assert tier.wait_joined(time.monotonic() + 30)
    walled: Tier = Inside(cluster.network, tier)  # type: ignore[assignment]
    return Rig(walled, LAYOUT, memory.read, memory.write, is_exact=False)


FACTORIES: dict[str, Factory] = {
    "host": host,
    "host_odd": odd_host,
    "slot_file_direct": slot_file,
    "slot_file_direct_odd": odd_slot_file,
    "slot_file_buffered": buffered,
    "fault_tier": faultless,
    "shared_arena": shared_arena,
    "shared_arena_odd": odd_shared_arena,
    "guard": guarded,
    "mooncake": mooncake,
}
