"""The slot file through every end and every damage: right bytes or a miss, never anything else."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ConfigError
from engine.store import slot_file
from engine.store.block_file import BLOCK, aligned, try_direct, whole_blocks
from engine.store.page_codec import PageLayout
from engine.store.slot_file import FILE_NAME, SlotFileTier
from engine.store.tier import Status
from tests.engine.store.tier_factories import (
    LAYOUT,
    NEVER,
    ODD_LAYOUT,
    OWNERS,
    key_of,
    payload_of,
    record_of,
)

A, B = OWNERS
OK, MISS = Status.OK, Status.MISS
ROOT = Path(__file__).resolve().parents[3]
SLOT_BYTES = BLOCK + whole_blocks(LAYOUT.page_bytes)
SECTOR = 512  # what a disk writes whole


def put(tier: SlotFileTier, *numbers: int) -> list[Status]:
    """Of owner A if even, else of B."""
    records = [record_of(number, OWNERS[number % 2]) for number in numbers]
    payloads = [memoryview(payload_of(record.key)) for record in records]
    return tier.put(records, payloads, NEVER)


def get(tier: SlotFileTier, *keys: bytes) -> list[Status]:
    """Whatever is OK is checked to be right."""
    views = [aligned(LAYOUT.page_bytes) for _ in keys]
    statuses = tier.get(keys, views, NEVER)
    for key, view, status in zip(keys, views, statuses, strict=True):
        assert status is not OK or view == payload_of(key)
    return statuses


def held(tier: SlotFileTier) -> list[bytes]:
    return [record.key for record in tier.records()]


@contextmanager
def opened(folder: Path, capacity: int, layout: PageLayout = LAYOUT) -> Iterator[SlotFileTier]:
    tier = SlotFileTier(folder, layout, capacity)
    try:
        yield tier
    finally:
        tier.close()


def assert_nothing_of(owner: bytes, numbers: range, raw: bytes) -> None:
    assert owner not in raw
    for number in numbers:
        if OWNERS[number % 2] == owner:
            payload = payload_of(key_of(number))
            assert not any(payload[at : at + 32] in raw for at in range(0, len(payload), SECTOR))


# --- the file -----------------------------------------------------------------------------------


def test_its_size_is_obeyed_from_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "node" / "engine"
    path = folder / FILE_NAME
    for capacity in (5, 3, 8):  # as made, shrunk, grown
        with opened(folder, capacity) as tier:
            size = BLOCK + capacity * SLOT_BYTES
            assert path.stat().st_size == size
            assert path.stat().st_blocks * 512 >= size
            assert tier.capacity_pages == capacity
            put(tier, *range(20))
            assert len(held(tier)) == capacity
            assert path.stat().st_size == size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_pages_survive_a_change_of_capacity_as_far_as_there_is_room(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as tier:
        put(tier, 0, 1, 2, 3)
    with opened(tmp_path, 6) as tier:
        assert get(tier, *map(key_of, range(4))) == [OK] * 4
        assert "another layout, size or version" in tier.notes[0]
    with opened(tmp_path, 2) as tier:
        assert len(held(tier)) == 2
        assert get(tier, *held(tier)) == [OK] * 2


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout("fp32", num_layers=1, num_kv_heads=2, page_size=16, head_dim=64),
        PageLayout("bf16", num_layers=1, num_kv_heads=2, page_size=16, head_dim=64),
    ],
)
def test_pages_of_another_layout_are_gone_and_can_still_be_purged(
    layout: PageLayout, tmp_path: Path
) -> None:
    with opened(tmp_path, 4) as tier:
        put(tier, 0, 1, 2, 3)
    with opened(tmp_path, 4, layout) as tier:
        assert held(tier) == []
        assert "another layout, size or version" in tier.notes[0]
        assert tier.purge(A, NEVER) is OK
    assert_nothing_of(A, range(4), (tmp_path / FILE_NAME).read_bytes())


def test_a_scan_tells_how_far_it_is(tmp_path: Path) -> None:
    for expected in (1, 3):  # nothing to read at first
        shares: list[float] = []
        SlotFileTier(tmp_path, LAYOUT, 40, shares.append).close()
        assert len(shares) == expected
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_where_direct_io_is_refused_it_says_why(tmp_path: Path) -> None:
    fd = os.open("/proc/self/comm", os.O_RDWR)  # a file that cannot
    assert try_direct(fd) == "Invalid argument"
    os.close(fd)
    tier = SlotFileTier(tmp_path, LAYOUT, 1, direct=False)
    assert "through the page cache" in tier.notes[0]
    tier.close()


def test_a_second_process_is_refused_in_four_parts(tmp_path: Path) -> None:
    with writer(tmp_path, 4, "hold"), pytest.raises(ConfigError) as refused:
        SlotFileTier(tmp_path, LAYOUT, 4)
    assert refused.value.field == "--kv-disk-dir"
    for part in ("which another process uses", "allowed a folder of its own", "end the other"):
        assert part in str(refused.value)
    SlotFileTier(tmp_path, LAYOUT, 4).close()


def test_a_folder_that_cannot_be_used_is_refused_in_four_parts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--kv-disk-dir: found .*, allowed .*; give another"):
        SlotFileTier(tmp_path / "file", LAYOUT, 4)
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "file")  # not followed to another's file
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        SlotFileTier(tmp_path, LAYOUT, 4)


# --- a disk without room, a disk that fails -----------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """This process can make none larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_at_the_start_is_refused_in_four_parts_and_leaves_nothing(tmp_path: Path) -> None:
    with largest_file(BLOCK), pytest.raises(ConfigError) as refused:
        SlotFileTier(tmp_path, LAYOUT, 4)
    assert refused.value.field == "--kv-disk-mb"
    assert "allowed what the disk has room for" in str(refused.value)
    assert not (tmp_path / FILE_NAME).exists()


def test_a_full_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"only root can mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(ConfigError, match=r"No space left on device.*0 MB are free"):
            SlotFileTier(tmp_path, LAYOUT, 40)
        with opened(tmp_path, 4) as tier:  # what was tried left nothing behind
            assert put(tier, 1, 2) == [OK, OK]
            assert get(tier, key_of(1), key_of(2)) == [OK, OK]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_disk_that_fills_up_costs_only_what_is_put(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as tier:
        assert put(tier, 0, 1) == [OK, OK]
        with largest_file(BLOCK):
            assert put(tier, 0, 2, 3) == [OK, Status.NOSPACE, Status.NOSPACE]
        assert get(tier, *map(key_of, range(4))) == [OK, OK, MISS, MISS]
        assert put(tier, 2, 3) == [OK, OK]
        assert get(tier, *map(key_of, range(4))) == [OK] * 4


@contextmanager
def failing_disk(tier: SlotFileTier, *, writes_too: bool = True) -> Iterator[None]:
    """Reads of its file, and writes, give an error: EIO where nothing is mapped at such offsets."""
    path = str(tier._file.path)
    links = [(int(name), f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    (fd,) = [fd for fd, link in links if os.path.exists(link) and os.readlink(link) == path]
    good = os.dup(fd)
    bad = os.open("/proc/self/mem", os.O_RDWR) if writes_too else os.open(path, os.O_WRONLY)
    os.dup2(bad, fd, inheritable=False)
    try:
        yield
    finally:
        os.dup2(good, fd, inheritable=False)
        os.close(good)
        os.close(bad)


def test_errors_of_the_disk_make_pages_unavailable_while_they_last(tmp_path: Path) -> None:
    gone = Status.UNAVAILABLE
    with opened(tmp_path, 4) as tier:
        put(tier, 0, 1)
        with failing_disk(tier):
            assert get(tier, key_of(0), key_of(1), key_of(2)) == [gone, gone, MISS]
            assert put(tier, 2, 3) == [gone, gone]
            assert tier.flush(NEVER) is gone
            assert tier.purge(A, time.monotonic() + 5) is gone
        assert get(tier, key_of(0), key_of(1)) == [MISS, OK]
        assert tier.purge(A, NEVER) is OK
        assert_nothing_of(A, range(4), (tmp_path / FILE_NAME).read_bytes())
        assert put(tier, 0, 2, 3) == [OK] * 3


def test_what_a_purge_cannot_read_it_overwrites(tmp_path: Path) -> None:
    """After an end out of order: whose bytes they are cannot be known any more."""
    old, new = tmp_path / "old", tmp_path / "new"
    new.mkdir()
    with opened(old, 4) as tier:
        put(tier, 0, 1)
        shutil.copy(old / FILE_NAME, new)
    with opened(new, 4) as tier:
        assert get(tier, key_of(1)) == [OK]
        with failing_disk(tier, writes_too=False):
            assert get(tier, key_of(0)) == [Status.UNAVAILABLE]
            assert tier.purge(B, time.monotonic() + 5) is OK
        assert held(tier) == []
        assert (new / FILE_NAME).read_bytes()[BLOCK:].count(0) == 4 * SLOT_BYTES


def test_slots_whose_header_cannot_be_read_are_free(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as tier:
        put(tier, 0, 1)
        with failing_disk(tier):
            tier._scan(lambda share: None, is_trusted=True)
        assert held(tier) == []
        assert put(tier, 0, 1, 2, 3) == [OK] * 4


class SlowDisk:
    """Stands before a tier's file: counts syncs, and holds reads and syncs until released."""

    def __init__(self, tier: SlotFileTier) -> None:
        self.syncs = 0
        self.released = threading.Event()
        self._file = tier._file
        tier._file = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, *arguments: Any) -> int:
        self.released.wait(10)
        return self._file.read(*arguments)

    def sync(self) -> None:
        self.syncs += 1
        self.released.wait(10)
        self._file.sync()


def test_puts_are_synced_now_and_then_and_wait_for_none(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as tier:
        disk = SlowDisk(tier)
        assert put(tier, 0) == [OK]
        assert disk.syncs == 0
        tier._next_sync = time.monotonic()
        assert put(tier, 1) == put(tier, 2) == [OK]
        disk.released.set()
        tier.flush(NEVER)
        assert disk.syncs == 2


def test_a_disk_that_hangs_holds_a_flush_until_its_deadline(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as tier:
        disk = SlowDisk(tier)
        assert tier.flush(time.monotonic() + 0.02) is Status.TIMEOUT
        assert tier.purge(A, time.monotonic() + 0.02) is Status.TIMEOUT
        disk.released.set()
        assert tier.flush(NEVER) is OK


def test_a_disk_that_hangs_does_not_hold_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_file, "CLOSE_S", 0.05)
    tier = SlotFileTier(tmp_path, LAYOUT, 4)
    put(tier, 0)
    disk = SlowDisk(tier)
    with ThreadPoolExecutor(1) as caller:
        late = caller.submit(get, tier, key_of(0))
        while not tier._places._calls:
            time.sleep(0.001)
        tier.close()
        assert not late.done()
        assert get(tier, key_of(0)) == [Status.UNAVAILABLE]
        disk.released.set()
        assert late.result(10) == [OK]
    with pytest.raises(ConfigError, match="another process uses"):  # it was never given back
        SlotFileTier(tmp_path, LAYOUT, 4)


# --- damage -------------------------------------------------------------------------------------


@cache
def whole_file() -> bytes:
    """Four slots, three pages, closed in order."""
    with tempfile.TemporaryDirectory() as name:
        with opened(Path(name), 4) as tier:
            put(tier, 0, 1, 2)
        return (Path(name) / FILE_NAME).read_bytes()


@settings(max_examples=40, deadline=None)
@given(bit=st.integers(0, 8 * (BLOCK + 4 * SLOT_BYTES) - 1))
def test_a_flipped_bit_costs_a_page_at_most(bit: int) -> None:
    damaged = bytearray(whole_file())
    damaged[bit // 8] ^= 1 << bit % 8
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / FILE_NAME).write_bytes(damaged)
        with opened(Path(name), 4) as tier:
            statuses = get(tier, *map(key_of, range(4)))
            assert statuses.count(OK) >= 2
            assert statuses[3] is MISS
            assert set(statuses) <= {OK, MISS, Status.CORRUPT}
            assert tier.purge(A, NEVER) is OK
        assert_nothing_of(A, range(3), (Path(name) / FILE_NAME).read_bytes())


@settings(max_examples=25, deadline=None)
@given(size=st.integers(0, BLOCK + 4 * SLOT_BYTES))
def test_a_truncated_file_costs_what_was_cut(size: int) -> None:
    whole = max(0, size - BLOCK) // SLOT_BYTES
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / FILE_NAME
        path.write_bytes(whole_file())
        with opened(Path(name), 4) as tier:
            os.truncate(path, size)
            statuses = get(tier, *map(key_of, range(3)))
            assert statuses.count(OK) >= min(whole, 3)
            assert set(statuses) <= {OK, Status.CORRUPT, Status.STALE}
            put(tier, 7)
            assert get(tier, key_of(7)) == [OK]
        os.truncate(path, size)
        with opened(Path(name), 4) as tier:
            assert set(get(tier, *held(tier))) <= {OK, Status.CORRUPT}
            assert path.stat().st_size == BLOCK + 4 * SLOT_BYTES


def test_memory_that_still_holds_a_page_does_not_pass_for_the_file(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as tier:
        put(tier, 0)
        view = aligned(LAYOUT.page_bytes)
        assert tier.get([key_of(0)], [view], NEVER) == [OK]
        os.truncate(tmp_path / FILE_NAME, BLOCK)
        assert tier.get([key_of(0)], [view], NEVER) == [Status.CORRUPT]


def test_a_file_swapped_underneath_gives_no_foreign_bytes(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with opened(theirs, 4) as tier:
        put(tier, 5, 6, 7, 8)
    with opened(ours, 4) as tier:
        put(tier, 0, 1, 2, 3)
        with (ours / FILE_NAME).open("r+b") as file:  # its contents
            file.write((theirs / FILE_NAME).read_bytes())
        assert set(get(tier, *map(key_of, range(4)))) == {Status.STALE}
        assert put(tier, 0) == [OK]
        assert tier.flush(NEVER) is OK
        shutil.move(theirs / FILE_NAME, ours / FILE_NAME)  # the file itself
        assert get(tier, key_of(0)) == [OK]
        assert tier.flush(NEVER) is Status.UNAVAILABLE
    with opened(ours, 4) as tier:
        assert set(held(tier)) == {key_of(number) for number in (5, 6, 7, 8)}
        assert get(tier, *held(tier)) == [OK] * 4


def test_bytes_of_an_owner_in_a_slot_of_another_are_purged_too(tmp_path: Path) -> None:
    """As a torn write leaves them; found at a start after one, or by a get, even long before."""
    with opened(tmp_path, 4) as tier:
        put(tier, 0, 1, 2)
    raw = bytearray((tmp_path / FILE_NAME).read_bytes())
    at = raw.find(payload_of(key_of(0)))  # of A
    raw[at : at + SECTOR] = payload_of(key_of(1))[:SECTOR]  # of B
    (tmp_path / FILE_NAME).write_bytes(raw)
    with opened(tmp_path, 4) as tier:
        assert get(tier, key_of(0), key_of(1)) == [Status.CORRUPT, OK]
    for _ in range(2):
        with opened(tmp_path, 4) as tier:
            assert tier.purge(B, NEVER) is OK
            assert get(tier, key_of(2)) == [OK]
        assert_nothing_of(B, range(3), (tmp_path / FILE_NAME).read_bytes())


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_of_before_is_left_beside_a_page(direct: bool, tmp_path: Path) -> None:
    """A header and a payload need not fill their blocks; another layout's bytes lay there."""
    with opened(tmp_path, 4) as tier:
        put(tier, 0, 2, 4, 6)  # of A
    raw = tmp_path / FILE_NAME
    tier = SlotFileTier(tmp_path, ODD_LAYOUT, 4, direct=direct)
    for number in (1, 3, 5, 7):  # of B, in every slot
        payload = memoryview(payload_of(key_of(number), ODD_LAYOUT))
        assert tier.put([record_of(number, B)], [payload], NEVER) == [OK]
    assert tier.purge(A, NEVER) is OK
    assert len(held(tier)) == 4
    assert_nothing_of(A, range(8), raw.read_bytes())
    torn = bytearray(raw.read_bytes())  # as an end out of order leaves it
    tier.close()
    leftover = payload_of(key_of(0))[:SECTOR]
    torn[BLOCK + SECTOR : BLOCK + 2 * SECTOR] = leftover
    for end in range(BLOCK + 4 * BLOCK, len(torn) + 1, 2 * BLOCK):  # of the slots behind
        torn[end - SECTOR : end] = leftover
    raw.write_bytes(torn)
    tier = SlotFileTier(tmp_path, ODD_LAYOUT, 4, direct=direct)
    assert tier.purge(A, NEVER) is OK
    assert held(tier) == []
    for number in (9, 11):  # nor in the memory that it goes through
        payload = memoryview(payload_of(key_of(number), ODD_LAYOUT))
        assert tier.put([record_of(number, B)], [payload], NEVER) == [OK]
    assert_nothing_of(A, range(8), raw.read_bytes())
    tier.close()


# --- ends out of order --------------------------------------------------------------------------


@contextmanager
def writer(folder: Path, capacity: int, verb: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.engine.store.slot_file_writer"]
    with subprocess.Popen(
        [*command, str(folder), str(capacity), verb], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip().isdigit()
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_amid_its_writes_it_keeps_what_is_whole(kills: int, tmp_path: Path) -> None:
    chance = random.Random(kills)
    survivors = 0
    for turn in range(kills):
        with writer(tmp_path, 32, "write"):
            time.sleep(chance.uniform(0.01, 0.2))
        with opened(tmp_path, 32) as tier:
            keys = held(tier)
            statuses = get(tier, *keys)
            assert set(statuses) <= {OK, Status.CORRUPT}
            assert statuses.count(Status.CORRUPT) <= 4  # as many as are written at once
            survivors += statuses.count(OK)
            if turn % 2:
                assert tier.purge(A, NEVER) is OK
                assert A not in (tmp_path / FILE_NAME).read_bytes()
                assert set(get(tier, *held(tier))) <= {OK}
    assert survivors > 8 * kills


@cache
def recorded_life() -> tuple[bytes, list[bytes], list[int]]:
    """A file as last synced, as it is after each write since, and the pages that none has touched.

    Pages 0 to 5 are synced; then pages leave and others take their slots, some twice.
    """
    with tempfile.TemporaryDirectory() as name:
        tier = SlotFileTier(Path(name), LAYOUT, 7)
        path = Path(name) / FILE_NAME
        put(tier, *range(6))
        tier.flush(NEVER)
        synced, states = path.read_bytes(), []
        for leaves, comes in ((1, 8), (2, 6), (6, 7), (8, 9), (7, 11)):
            tier.remove([key_of(leaves)], NEVER)
            assert put(tier, comes) == [OK]
            states.append(path.read_bytes())
        tier.close()
    untouched = [
        number
        for number in range(6)
        if all(payload_of(key_of(number)) in state for state in states)
    ]
    return synced, states, untouched


def power_cut(seed: int, writes: int) -> bytes:
    """What a disk may hold when only some sectors of the writes since the last sync reached it, in
    any order, and each in any of the versions that were on their way."""
    synced, states, _ = recorded_life()
    chance = random.Random(seed)
    reached = bytearray(synced)
    share = chance.random()
    for at in range(0, len(synced), SECTOR):
        end = at + SECTOR
        versions = list(dict.fromkeys(state[at:end] for state in (synced, *states[:writes])))
        if len(versions) > 1 and chance.random() < share:
            reached[at:end] = chance.choice(versions)
    return bytes(reached)


def check_after_power_cut(seed: int, writes: int) -> None:
    _, states, untouched = recorded_life()
    assert len(untouched) >= 3
    assert len(states) == 5
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / FILE_NAME
        path.write_bytes(power_cut(seed, writes))
        with opened(Path(name), 7) as tier:
            statuses = get(tier, *map(key_of, range(12)))
            assert set(statuses) <= {OK, MISS, Status.CORRUPT}
            assert all(statuses[number] is OK for number in untouched)
            assert set(get(tier, *held(tier))) == {OK}
        with opened(Path(name), 7) as tier:
            assert tier.purge(B, NEVER) is OK
            assert all(get(tier, key_of(number)) == [OK] for number in untouched if not number % 2)
        assert_nothing_of(B, range(12), path.read_bytes())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), writes=st.integers(1, 5))
def test_after_a_power_cut_each_page_is_right_or_a_miss(seed: int, writes: int) -> None:
    check_after_power_cut(seed, writes)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(seed=st.integers(0, 1 << 32), writes=st.integers(1, 5))
def test_after_any_power_cut_each_page_is_right_or_a_miss(seed: int, writes: int) -> None:
    check_after_power_cut(seed, writes)
