"""Slower tiers of a node: flags and folders, what passes to engines and back, the last flush."""

from __future__ import annotations

import shutil
import sys
from array import array
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from node_agent.config import NodeConfig, parse_config
from node_agent.errors import NodeError
from node_agent.outbox import MAX_ORDERS, EngineOutbox
from node_agent.tiers import DEFAULT_DISK_MB, DEFAULT_HOST_MB, MB, ROOM, disk_folder, tier_flags
from policies.contract import wire
from tests.node_agent.conftest import FakeGateway, StartNode, submit, until
from tests.node_agent.test_node_books import drained

ENGINE = Path(__file__).with_name("tiered_engine.py")
Usage = namedtuple("Usage", "total used free")

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def config(home: Path, **more: object) -> NodeConfig:
    return NodeConfig(("ws://x",), "t", ("m",), home, **more)  # type: ignore[arg-type]


def flags_of(*arguments: str) -> NodeConfig:
    return parse_config(["--gateway", "ws://x:1", "--join-token", "t", *arguments])


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ROOM * DEFAULT_DISK_MB * MB
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))


# --- flags and folders ---------------------------------------------------------------------------


def test_by_default_pages_go_to_memory_and_to_a_private_folder_in_home(
    tmp_path: Path, roomy: None
) -> None:
    home = tmp_path / "home"
    flags = tier_flags(config(home), "n1", "org/model@main")
    folder = disk_folder(config(home), "n1", "org/model@main")
    assert folder.parent == home / "kv" / "n1"
    assert flags == (
        *("--kv-host-mb", str(DEFAULT_HOST_MB), "--kv-disk-mb", str(DEFAULT_DISK_MB)),
        *("--kv-disk-dir", str(folder)),
    )
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    again = tier_flags(config(home), "n1", "org/model@main")
    assert again == flags  # a node finds its pages again


def test_no_two_engines_meet_in_one_folder(tmp_path: Path) -> None:
    shared = config(tmp_path / "home", kv_disk_dir=tmp_path / "disk")
    names = [("n1", "a/b"), ("n1", "a-b"), ("n1", "/models/b"), ("n2", "a/b"), ("n1", "..")]
    folders = {disk_folder(shared, *name) for name in names}
    assert len(folders) == len(names)
    assert all(folder.parent.parent == tmp_path / "disk" for folder in folders)


def test_a_default_disk_tier_needs_room_and_one_that_was_asked_for_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = ROOM * DEFAULT_DISK_MB * MB - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    little = tier_flags(config(tmp_path), "n1", "m")
    assert little == ("--kv-host-mb", str(DEFAULT_HOST_MB), "--kv-disk-mb", "0")
    assert not (tmp_path / "kv").exists()
    assert tier_flags(config(tmp_path, kv_disk_mb=4096), "n1", "m")[3] == "4096"
    with pytest.raises(NodeError) as refused:
        tier_flags(config(tmp_path, kv_disk_mb=16_384), "n1", "m")
    assert refused.value.field == "--kv-disk-mb"
    # What an earlier life preallocated is used again: a restart must not find its own disk full.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, 0))
    held = disk_folder(config(tmp_path), "n1", "m")
    (held / "pages").mkdir()
    (held / "pages" / "slots").write_bytes(b"x" * 2 * MB)
    assert tier_flags(config(tmp_path, kv_disk_mb=2), "n1", "m")[3] == "2"


def test_tiers_may_be_off_or_shared_and_a_script_has_none(tmp_path: Path, roomy: None) -> None:
    off = config(tmp_path, kv_host_mb=0, kv_disk_mb=0, cluster_store="mooncake://m:1")
    assert tier_flags(off, "n1", "m") == (
        *("--kv-host-mb", "0", "--kv-disk-mb", "0", "--cluster-store", "mooncake://m:1"),
    )
    named = {"kv_host_share": tmp_path, "kv_disk_mb": 0}
    assert tier_flags(config(tmp_path, **named), "n1", "m")[4:] == (
        *("--kv-host-share", str(tmp_path)),
    )
    assert "--kv-host-share" not in tier_flags(config(tmp_path, kv_host_mb=0, **named), "n1", "m")
    assert tier_flags(config(tmp_path, script=tmp_path / "s.json"), "n1", "m") == ()
    assert not (tmp_path / "kv").exists()


def test_a_disk_tier_that_is_switched_off_leaves_no_pages_behind(
    tmp_path: Path, roomy: None
) -> None:
    tier_flags(config(tmp_path), "n1", "m")
    folder = disk_folder(config(tmp_path), "n1", "m")
    (folder / "kind").mkdir()
    (folder / "kind" / "pages.slots").write_bytes(b"pages")
    tier_flags(config(tmp_path), "n1", "other")
    tier_flags(config(tmp_path, kv_disk_mb=0), "n1", "m")
    assert not folder.exists(), "no purge would find them"
    assert disk_folder(config(tmp_path), "n1", "other").is_dir()


def test_a_folder_that_cannot_be_made_is_refused_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NodeError) as refused:
        tier_flags(config(tmp_path, kv_disk_mb=1, kv_disk_dir=tmp_path / "file"), "n1", "m")
    assert refused.value.field == "--kv-disk-dir"


def test_the_flags_of_tiers_are_read_and_checked(tmp_path: Path) -> None:
    read = flags_of(
        *("--kv-host-mb", "64", "--kv-disk-mb", "128", "--kv-disk-dir", str(tmp_path)),
        *("--cluster-store", "mooncake://master:50051", "--kv-host-share", str(tmp_path / "a")),
    )
    assert read.kv_host_share == tmp_path / "a"
    assert (read.kv_host_mb, read.kv_disk_mb, read.kv_disk_dir) == (64, 128, tmp_path)
    assert read.cluster_store == "mooncake://master:50051"
    for arguments in (
        ("--kv-host-mb", "-1"),
        ("--kv-disk-mb", str(1 << 25)),
        ("--cluster-store", "redis://x:1"),
        ("--cluster-store", "mooncake://x"),
        ("--cluster-store", "mooncake://x:port"),
    ):
        with pytest.raises(NodeError) as refused:
            flags_of(*arguments)
        assert refused.value.field == arguments[0]


# --- orders --------------------------------------------------------------------------------------


def test_orders_keep_their_order_pass_submits_and_are_bounded() -> None:
    outbox = EngineOutbox()
    outbox.submit(1, submit("a"))
    pin = wire.Pin(0, "p", b"", bytes(32), 60.0, 10)
    assert outbox.order(pin)
    assert outbox.order(wire.Unpin(0, "p"))
    outbox.abort(1, (9,))
    kinds = [(channel, type(message)) for channel, message in drained(outbox)]
    assert kinds == [(1, wire.Abort), (0, wire.Pin), (0, wire.Unpin), (1, wire.Submit)]
    assert all(outbox.order(wire.Unpin(0, "p")) for _ in range(MAX_ORDERS))
    assert not outbox.order(pin)
    outbox.clear()
    assert outbox.order(pin)


async def test_pins_and_purges_reach_the_engine_and_every_gateway_hears_the_result(
    start_node: StartNode, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    first, second = FakeGateway(), FakeGateway()
    async with first.listening(), second.listening():
        node = start_node(first, second, command=command(told))
        async with node.running():
            for gateway in (first, second):
                await gateway.engines()
            prompt = wire.pack_ids(array("I", range(40)))
            await first.send(
                wire.Pin(0, "p1", prompt, bytes(32), 60.0, 10),
                wire.Purge(0, "u1", bytes(32)),
                wire.Unpin(0, "p1"),
                wire.Quotas(0, ((bytes(16), 0.5),)),
                wire.Quotas(3, ()),
                wire.Pin(3, "p2", prompt, bytes(32), 60.0, 10),
                wire.Purge(3, "u2", bytes(32)),
            )
            for gateway in (first, second):
                assert await gateway.first(wire.PinResult) is not None
                assert await gateway.first(wire.PurgeResult) == wire.PurgeResult(0, "u1", 3)
            await until(lambda: len(first.of(wire.PinResult)) == 2, "the refusal")
            done, lost = sorted(first.of(wire.PinResult), key=lambda one: one.pin_id)
            assert (done.pages, done.code) == (2, "")
            assert (lost.engine, lost.pages, lost.code) == (3, 0, "engine_lost")
            assert len(first.of(wire.PurgeResult)) == 1  # nobody says that u2's pages are gone
            await until(lambda: told.read_text().count("\n") == 4, "what the engine was told")
            assert told.read_text().split("\n")[:-1] == [
                *("0 Pin", "0 Purge", "0 Unpin", "0 Quotas"),
            ]
            await until(lambda: first.of(wire.Report)[-1].engines[0].tiers, "a report with tiers")
            (engine,) = first.of(wire.Report)[-1].engines
            assert (engine.tiers[0].tier, engine.pages_pinned, engine.integrity_faults) == (
                *("disk", 2, 1),
            )


async def test_at_its_end_a_node_tells_engines_that_nothing_more_comes(
    start_node: StartNode, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    gateway = FakeGateway()
    async with gateway.listening():
        node = start_node(gateway, command=command(told))
        async with node.running():
            await gateway.engines()
            node.stop.ask()
            await until(lambda: node.is_over, "the end")
            assert told.read_text() == "0 Drain\n"
            assert node.engines[0].restarts == 0


def command(told: Path) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    def make(arguments: tuple[str, ...]) -> tuple[str, ...]:
        return (sys.executable, str(ENGINE), str(told), *arguments)

    return make
