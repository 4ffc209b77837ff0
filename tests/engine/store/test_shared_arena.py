"""Engines that share one arena, and one of them killed at any line: never a wrong byte."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.config import ConfigError
from engine.store import shared_arena
from engine.store.arena_table import KEY_AT, OWNER_AT
from engine.store.page_codec import PageLayout, encode_header
from engine.store.shared_arena import SharedArenaTier
from engine.store.tier import PageRecord, Status
from tests.engine.store.tier_factories import (
    LAYOUT,
    NEVER,
    OWNERS,
    key_of,
    payload_of,
    record_of,
)

OK, MISS = Status.OK, Status.MISS
ROOT = Path(__file__).resolve().parents[3]


def arena(folder: Path, capacity: int = 6, layout: PageLayout = LAYOUT) -> SharedArenaTier:
    return SharedArenaTier(folder, layout, capacity, folder=folder)


def put(tier: SharedArenaTier, *numbers: int, seconds: float = 20.0) -> list[Status]:
    payloads = [memoryview(payload_of(key_of(number))) for number in numbers]
    records = [record_of(number, OWNERS[number % 2], depth=number) for number in numbers]
    return tier.put(records, payloads, time.monotonic() + seconds)


def get(tier: SharedArenaTier, *numbers: int) -> list[Status]:
    """Whatever is OK is checked to be right."""
    views = [memoryview(bytearray(LAYOUT.page_bytes)) for _ in numbers]
    statuses = tier.get([key_of(number) for number in numbers], views, NEVER)
    for number, view, status in zip(numbers, views, statuses, strict=True):
        assert status is not OK or view == payload_of(key_of(number))
    return statuses


def test_the_table_knows_where_a_header_has_key_and_owner() -> None:
    record = PageRecord(b"k" * 32, b"p" * 32, 7, b"o" * 16, 9)
    header = encode_header(record, bytes(LAYOUT.page_bytes), layout=LAYOUT)
    assert header[KEY_AT : KEY_AT + 32] == record.key
    assert header[OWNER_AT : OWNER_AT + 16] == record.owner


def test_engines_of_one_home_and_layout_share_and_others_do_not(tmp_path: Path) -> None:
    first, second = arena(tmp_path), arena(tmp_path, capacity=99)
    other = arena(tmp_path, layout=PageLayout("bf16", 1, 2, 16, 128))
    home = tmp_path / "elsewhere"
    apart = SharedArenaTier(home, LAYOUT, 6, folder=tmp_path)
    try:
        assert second.capacity_pages == first.capacity_pages == 6
        assert put(first, 1, 2) == [OK, OK]
        assert get(second, 1, 2) == [OK, OK]
        assert [record.depth for record in second.records()] == [1, 2]
        assert second.remove([key_of(1)], NEVER) == [OK]
        assert get(first, 1) == get(apart, 2) == [MISS]
        assert list(other.records()) == []
        assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    finally:
        for tier in (first, second, other, apart):
            tier.close()
    assert list(tmp_path.iterdir()) == [], "the last to leave removes it"


def test_a_full_arena_names_the_least_recently_used_of_all_engines(tmp_path: Path) -> None:
    first, second = arena(tmp_path), arena(tmp_path)
    put(first, 0, 1, 2)
    put(second, 3, 4, 5)
    get(second, 0, 1)
    assert put(first, 6) == [Status.NOSPACE]
    # One put or get is one use; of one use the deepest go first, so that chains lose their tail.
    assert [record.depth for record in first.oldest(4)] == [2, 5, 4, 3]
    first.remove([record.key for record in first.oldest(1)], NEVER)
    assert put(first, 6) == [OK]
    assert [record.depth for record in second.oldest(99)][-1] == 6
    first.close()
    second.close()


def test_the_pages_of_a_killed_engine_are_found_and_a_new_size_makes_a_new_arena(
    tmp_path: Path,
) -> None:
    pid = _fork_put_and_die(tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    tier = arena(tmp_path)
    assert get(tier, 1, 2) == [OK, OK]
    larger = arena(tmp_path, capacity=7)  # while another is in it, it stays
    assert larger.capacity_pages == 6
    larger.close()
    pid = _fork_put_and_die(tmp_path)
    os.waitpid(pid, 0)
    path = tier.path
    left = path.read_bytes()
    tier.close()
    path.write_bytes(left)
    path.chmod(0o600)
    tier = arena(tmp_path, capacity=7)
    assert (tier.capacity_pages, tier.records()) == (7, [])
    tier.close()


def test_what_killed_engines_left_is_removed_by_whoever_makes_an_arena_next(
    tmp_path: Path,
) -> None:
    os.waitpid(_fork_put_and_die(tmp_path), 0)
    (left,) = (path for path in tmp_path.glob("kagari-*") if path.suffix != ".lock")
    used = SharedArenaTier(tmp_path / "used", LAYOUT, 6, folder=tmp_path)
    assert not left.exists()
    assert not left.with_suffix(".lock").exists()
    another = SharedArenaTier(tmp_path / "another", LAYOUT, 6, folder=tmp_path)
    assert put(used, 1) == [OK]
    assert used.path.exists()
    assert used.arena_id != another.arena_id
    for tier in (used, another):
        tier.close()


def test_who_waits_for_the_lock_of_an_arena_that_goes_takes_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = arena(tmp_path)
    lock = last.path.with_suffix(".lock")
    really_open = shared_arena._open_private

    def open_as_it_goes(path: Path) -> int:
        fd = really_open(path)
        last.close()  # the first time, which removes both files
        return fd

    monkeypatch.setattr(shared_arena, "_open_private", open_as_it_goes)
    tier = arena(tmp_path)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert put(tier, 1, seconds=0.05) == [Status.TIMEOUT]
    assert put(tier, 1) == [OK]
    tier.close()


def _fork_put_and_die(folder: Path) -> int:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.engine.store.test_shared_arena import arena, put\n"
        "tier = arena(Path(sys.argv[1])); put(tier, 1, 2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    return os.spawnve(
        os.P_NOWAIT,
        sys.executable,
        [sys.executable, "-c", script, str(folder)],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("spoil", ["torn", "another version", "empty"])
def test_an_arena_that_is_not_whole_is_made_anew(tmp_path: Path, spoil: str) -> None:
    tier = arena(tmp_path)
    put(tier, 1)
    data = tier.path.read_bytes()
    tier.close()
    data = {"torn": data[:-1], "another version": data[:4] + b"\xff" + data[5:], "empty": b""}[
        spoil
    ]
    tier.path.write_bytes(data)
    tier.path.chmod(0o600)
    tier = arena(tmp_path)
    assert tier.records() == []
    assert put(tier, 1) == get(tier, 1) == [OK]
    tier.close()


def test_what_is_not_ours_or_has_no_room_is_refused_in_four_parts(tmp_path: Path) -> None:
    tier = arena(tmp_path)
    path = tier.path
    tier.close()
    path.touch(mode=0o644)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--kv-host-mb: found .*mode 644.*allowed .*; remove"):
        arena(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="--kv-host-mb: found"):
        arena(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"found \d+ MB, and .* refuses them .*; lower"):
        arena(tmp_path, capacity=1 << 40)
    assert not path.exists()


def test_a_stopped_writer_costs_writers_a_deadline_and_readers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = arena(tmp_path)
    put(tier, 1)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX);"
            "print(1, flush=True); time.sleep(600)",
            tier.path.with_suffix(".lock"),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        assert put(tier, 2, seconds=0.05) == [Status.TIMEOUT]
        assert tier.remove([key_of(1)], time.monotonic() + 0.05) == [Status.TIMEOUT]
        assert tier.purge(OWNERS[0], time.monotonic() + 0.05) is Status.TIMEOUT
        assert get(tier, 1) == [OK]
        monkeypatch.setattr(shared_arena, "START_S", 0.05)
        with pytest.raises(ConfigError, match="another engine has held"):
            arena(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    assert put(tier, 2) == [OK]
    tier.close()


# --- killed at any line -------------------------------------------------------------------------

CASUALTY = """
import os, signal, sys, time
from pathlib import Path
from engine.store import arena_table, shared_arena
from tests.engine.store.test_shared_arena import *

folder, step = Path(sys.argv[1]), int(sys.argv[2])
survivor = arena(folder)
DEEDS = {
    "put": lambda tier: put(tier, 7, 8),
    "remove": lambda tier: tier.remove([key_of(2), key_of(3)], NEVER),
    "purge": lambda tier: tier.purge(OWNERS[0], NEVER),
}
FILES = (arena_table.__file__, shared_arena.__file__)
kept = {"put": [1, 2, 3, 4], "remove": [1, 4], "purge": [1, 3]}
total = 0
for name, deed in DEEDS.items():
    for line in range(0, 100_000, step):
        put(survivor, 1, 2, 3, 4)
        pid = os.fork()
        if not pid:
            tier, left = arena(folder), line

            def trace(frame, event, argument):
                global left
                if frame.f_code.co_filename not in FILES:
                    return None
                if event == "line":
                    if not left:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left -= 1
                return trace

            sys.settrace(trace)
            deed(tier)
            sys.settrace(None)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL), code
        assert get(survivor, *kept[name]) == [OK] * len(kept[name]), (name, line)
        assert set(get(survivor, *range(10))) <= {OK, MISS}, (name, line)
        for number in range(30):
            survivor.remove([key_of(number)], NEVER)
        # The lock is free; no place and no entry of the index is lost.
        assert (survivor.records(), survivor.stats().used_pages) == ([], 0), (name, line)
        assert not survivor._table.index.any()
        assert put(survivor, *range(30, 36)) == [OK] * 6
        assert get(survivor, *range(30, 36)) == [OK] * 6
        assert survivor.purge(OWNERS[0], NEVER) is survivor.purge(OWNERS[1], NEVER) is OK
        data = survivor.path.read_bytes()
        assert OWNERS[0] not in data and OWNERS[1] not in data
        assert not any(payload_of(key_of(number))[:64] in data for number in range(36))
        if not code:
            break
        total += 1
print(total)
"""


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_line_leaves_a_whole_arena(tmp_path: Path, step: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CASUALTY, str(tmp_path), str(step)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300 // step  # lines at which one was killed


WRITER = """
import os, random, sys, time
from pathlib import Path
from tests.engine.store.test_shared_arena import *

tier, chance = arena(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
print("up", flush=True)
while True:
    numbers = chance.sample(range(12), 3)
    assert set(put(tier, *numbers)) <= {OK, Status.NOSPACE}
    assert set(get(tier, *numbers)) <= {OK, MISS}
    tier.remove([key_of(number) for number in numbers[:2]], NEVER)
"""


@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_processes_that_write_and_are_killed_never_leave_a_wrong_byte(
    tmp_path: Path, rounds: int
) -> None:
    tier, chance = arena(tmp_path), random.Random(rounds)

    def start(seed: int) -> subprocess.Popen[str]:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(seed)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "up\n"
        return writer

    writers = [start(seed) for seed in range(2)]
    hits = 0
    try:
        for seed in range(rounds):
            until = time.monotonic() + chance.uniform(0.05, 0.2)
            while time.monotonic() < until or (not hits and time.monotonic() < until + 20):
                statuses = get(tier, *range(12))
                assert set(statuses) <= {OK, MISS}
                hits += statuses.count(OK)
            victim = writers.pop(0)
            victim.kill()
            said, cried = victim.communicate()
            assert (said, cried) == ("", "")
            assert set(put(tier, seed % 12)) <= {OK, Status.NOSPACE}
            writers.append(start(seed + 2))
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert hits > 0
    assert tier.stats().corrupt == 0
    tier.remove([key_of(number) for number in range(12)], NEVER)
    assert put(tier, *range(6)) == get(tier, *range(6)) == [OK] * 6
    tier.close()
