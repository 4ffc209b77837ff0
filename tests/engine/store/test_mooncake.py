"""Whatever happens to a Mooncake Store: a page is right or a miss, and nobody waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from engine.store import mooncake
from engine.store.guard import Guard
from engine.store.mooncake import MooncakeTier
from engine.store.page_codec import HEADER_BYTES, PageLayout, encode_page, layout_digest
from engine.store.tier import Status
from tests.engine.store.mooncake_cluster import (
    CLIENT_TTL_S,
    PATIENCE_S,
    Cluster,
    Inside,
    network,
    stop,
    until,
)
from tests.engine.store.tier_factories import KIND, LAYOUT, OWNERS, key_of, payload_of, record_of

OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT


def test_without_mooncake_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(mooncake.importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1.*pip install 'kagari\[mooncake\]'"):
        MooncakeTier("mooncake://127.0.0.1:50051", LAYOUT, KIND)


class Lab:
    """A cluster of one test, and tiers in it."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(network(), folder)
        self._stack = ExitStack()
        self._stack.callback(self.cluster.stop)

    def tier(self, url: str | None = None, *, kind: str = KIND, joined: bool = True) -> Any:
        with self.cluster.network.inside():
            tier = MooncakeTier(url or self.cluster.url, LAYOUT, kind)
        self._stack.callback(tier.close)
        assert not joined or tier.wait_joined(soon())
        return Inside(self.cluster.network, tier)

    def guard(self, tier: Any, **settings: float) -> Guard:
        with self.cluster.network.inside():
            guard = Guard(tier, **settings)  # type: ignore[arg-type]
        self._stack.callback(guard.close)
        return guard

    def raw(self) -> Any:
        client = self.cluster.raw()
        self._stack.callback(client.close)
        return client

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(mooncake, "RETRY_S", (0.05, 0.2))
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def put(tier: Any, *numbers: int, owner: bytes = OWNERS[0]) -> list[Status]:
    payloads = [memoryview(payload_of(key_of(number))) for number in numbers]
    return tier.put([record_of(number, owner) for number in numbers], payloads, soon())


def get(tier: Any, *numbers: int, seconds: float = PATIENCE_S) -> list[Status]:
    """Whatever is OK is checked to be right."""
    views = [memoryview(bytearray(LAYOUT.page_bytes)) for _ in numbers]
    statuses = tier.get([key_of(number) for number in numbers], views, soon(seconds))
    for number, view, status in zip(numbers, views, statuses, strict=True):
        assert status is not OK or view == payload_of(key_of(number))
    return statuses


def name_of(number: int, kind: str = KIND) -> str:
    return f"kv1/{layout_digest(LAYOUT).hex()}/{kind}/{key_of(number).hex()}"


def test_an_engine_starts_without_its_store_and_joins_it_when_it_is_there(lab: Lab) -> None:
    begun = time.monotonic()
    tier = lab.tier(joined=False)
    assert put(tier, 1) == get(tier, 1) == [Status.UNAVAILABLE]
    assert tier.purge(OWNERS[0], soon()) is Status.UNAVAILABLE
    assert time.monotonic() - begun < PATIENCE_S / 3
    lab.cluster.master()
    lab.cluster.owner()
    assert tier.wait_joined(soon())
    assert put(tier, 1) == get(tier, 1) == [OK]


def test_a_node_finds_what_another_process_put_and_purges_it_after_that_is_gone(lab: Lab) -> None:
    lab.cluster.master()
    lab.cluster.owner()
    script = f"""
import os, time
from engine.store.mooncake import MooncakeTier
from tests.engine.store.tier_factories import KIND, LAYOUT, OWNERS, key_of, payload_of, record_of
tier = MooncakeTier({lab.cluster.url!r}, LAYOUT, KIND)
assert tier.wait_joined(time.monotonic() + 30)
for owner, numbers in zip(OWNERS, ((1, 2), (3, 4))):
    payloads = [memoryview(payload_of(key_of(number))) for number in numbers]
    print(tier.put([record_of(n, owner) for n in numbers], payloads, time.monotonic() + 30))
os._exit(0)
"""
    with lab.cluster.network.inside():
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.stdout == f"{[OK, OK]}\n" * 2, done.stderr
    tier = lab.tier()
    assert get(tier, 1, 2, 3, 4, 5) == [OK, OK, OK, OK, MISS]
    assert tier.purge(OWNERS[0], soon()) is OK
    assert get(tier, 1, 2, 3, 4) == [MISS, MISS, OK, OK]
    assert sorted(lab.cluster.ask("/get_all_keys").split()) == sorted(map(name_of, (3, 4)))


def test_nodes_whose_bits_differ_share_no_page_and_purge_each_others(lab: Lab) -> None:
    lab.cluster.master()
    lab.cluster.owner()
    one, other = lab.tier(), lab.tier(kind="other")
    assert put(one, 1, 2) == [OK, OK]
    assert get(other, 1, 2) == [MISS, MISS]
    assert put(other, 2) == [OK]
    assert sorted(lab.cluster.ask("/get_all_keys").split()) == sorted(
        (name_of(1), name_of(2), name_of(2, "other"))
    )
    assert one.purge(OWNERS[0], soon()) is OK
    assert get(one, 1, 2) == [MISS, MISS]
    assert get(other, 2) == [MISS]


def test_a_purge_that_cannot_list_the_store_says_so(lab: Lab) -> None:
    lab.cluster.master()
    lab.cluster.owner()
    tier = lab.tier(lab.cluster.url.replace("admin_port=21052", "admin_port=21053"))
    assert put(tier, 1) == [OK]
    assert tier.purge(OWNERS[0], soon()) is Status.UNAVAILABLE


def test_what_others_put_under_our_names_is_refused_and_dropped(lab: Lab) -> None:
    lab.cluster.master()
    lab.cluster.owner()
    tier, client = lab.tier(), lab.raw()
    whole = bytearray(HEADER_BYTES + LAYOUT.page_bytes)
    encode_page(record_of(1), payload_of(key_of(1)), layout=LAYOUT, into=memoryview(whole))
    flipped = bytes([*whole[:-1], whole[-1] ^ 1])
    other = PageLayout("bf16", num_layers=4, num_kv_heads=1, page_size=16, head_dim=64)
    assert other.page_bytes == LAYOUT.page_bytes
    foreign = bytearray(len(whole))
    encode_page(record_of(1), payload_of(key_of(1)), layout=other, into=memoryview(foreign))
    for put_instead, status in (
        (flipped, CORRUPT),
        (bytes(whole[:-1]), CORRUPT),
        (bytes(whole) + b"x", Status.STALE),
        (bytes(foreign), Status.STALE),
        (b"x", CORRUPT),
    ):
        assert client.put(name_of(1), put_instead) == 0
        assert get(tier, 1) == [status]
        assert get(tier, 1) == [MISS]
        assert put(tier, 1) == get(tier, 1) == [OK]
        assert tier.remove([key_of(1)], soon()) == [OK]
    encode_page(record_of(2), payload_of(key_of(2)), layout=LAYOUT, into=memoryview(whole))
    assert client.put(name_of(1), bytes(whole)) == 0  # a good page, of another key
    assert get(tier, 1) == [Status.STALE]


@pytest.mark.slow
def test_a_killed_owner_is_unavailable_and_then_a_miss_and_another_owner_takes_over(
    lab: Lab,
) -> None:
    lab.cluster.master()
    owner = lab.cluster.owner()
    tier = lab.tier()
    assert put(tier, 1, 2) == [OK, OK]
    owner.kill()
    assert get(tier, 1, 2) == [Status.UNAVAILABLE] * 2
    until(lambda: get(tier, 1, 2) == [MISS, MISS], CLIENT_TTL_S + PATIENCE_S)
    assert put(tier, 3) == [Status.NOSPACE]  # no segment is left
    lab.cluster.owner()
    assert put(tier, 1, 3) == get(tier, 1, 3) == [OK, OK]


def test_a_stopped_owner_costs_a_deadline_and_its_view_is_quarantined(lab: Lab) -> None:
    lab.cluster.master()
    owner = lab.cluster.owner()
    guard = lab.guard(lab.tier(), failures_to_open=2, pause_s=0.1)
    assert put(guard, 1) == get(guard, 1) == [OK]
    stop(owner)
    views = [memoryview(bytearray(LAYOUT.page_bytes)) for _ in range(2)]
    said: list[list[object]] = [[], []]
    begun = time.monotonic()
    for view, heard in zip(views, said, strict=True):
        guard.submit_get(
            [key_of(1)],
            [view],
            begun + 0.3,
            on_done=heard.append,
            on_quiet=lambda heard=heard: heard.append("quiet"),
        )
    until(lambda: said == [[[Status.TIMEOUT]]] * 2)
    assert 0.3 <= time.monotonic() - begun < mooncake.HANG_S
    assert (guard.quarantined, guard.state) == (2, "broken")
    owner.send_signal(signal.SIGCONT)
    until(lambda: guard.quarantined == 0)
    assert said == [[[Status.TIMEOUT], "quiet"]] * 2
    until(lambda: get(guard, 1) == [OK])
    assert guard.state == "ok"


def test_a_killed_master_is_unavailable_and_a_restarted_one_has_forgotten_all(lab: Lab) -> None:
    master = lab.cluster.master()
    lab.cluster.owner()
    tier = lab.tier()
    guard = lab.guard(tier, failures_to_open=1, pause_s=0.1)
    assert put(guard, 1) == get(guard, 1) == [OK]
    master.kill()
    master.wait(PATIENCE_S)
    assert get(guard, 1, seconds=0.5) in ([Status.UNAVAILABLE], [Status.TIMEOUT])
    assert guard.state == "broken"
    lab.cluster.master()
    until(lambda: get(guard, 1) == [MISS])
    until(lambda: put(guard, 1) == [OK])  # the owner mounts its memory again
    assert get(guard, 1) == [OK]


def test_a_full_store_has_no_room_and_what_it_holds_is_right(lab: Lab) -> None:
    lab.cluster.master()
    lab.cluster.owner(16)
    tier = lab.tier()
    statuses = put(tier, *range(1200))  # 19 MB
    assert set(statuses) == {OK, Status.NOSPACE}
    held = [number for number, status in enumerate(statuses) if status is OK]
    assert len(held) > 500
    found = get(tier, *held)
    assert set(found) <= {OK, MISS}  # it evicts by its own mind
    assert found.count(OK) > 400
    assert tier.stats().refused == statuses.count(Status.NOSPACE)


@pytest.mark.slow
def test_a_segment_of_ones_own_is_given_back_when_the_tier_closes(lab: Lab) -> None:
    lab.cluster.master()
    tier = lab.tier(lab.cluster.url.replace("segment_mb=0", "segment_mb=16"))
    assert put(tier, 1) == get(tier, 1) == [OK]
    assert lab.cluster.ask("/get_all_segments").strip()
    tier.close()
    until(lambda: not lab.cluster.ask("/get_all_segments").strip(), CLIENT_TTL_S + PATIENCE_S)


@pytest.mark.slow
def test_a_process_ends_in_order_while_a_call_hangs(lab: Lab) -> None:
    lab.cluster.master()
    owner = lab.cluster.owner()
    assert put(lab.tier(), 1) == [OK]
    script = f"""
import time
from engine.store.guard import Guard
from engine.store.mooncake import MooncakeTier
from tests.engine.store.tier_factories import KIND, LAYOUT, key_of
tier = MooncakeTier({lab.cluster.url!r}, LAYOUT, KIND)
assert tier.wait_joined(time.monotonic() + 30)
guard = Guard(tier)
view = memoryview(bytearray(LAYOUT.page_bytes))
input()
print(guard.get([key_of(1)], [view], time.monotonic() + 0.3), guard.quarantined)
guard.close()
"""
    with lab.cluster.network.inside():
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    stop(owner)
    said, _ = process.communicate("go\n", timeout=60)
    assert said == f"{[Status.TIMEOUT]} 1\n"
    assert process.returncode == 0
