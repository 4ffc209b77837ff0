"""Installing peers: made once, resumed, renewed with the recipe; one that fails stops no other."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import catalogue
from benchmarks.peers.catalogue import STAMP, Absent, Peer, Present, find, missing_tools
from tests.processes import wait_gone

PEER = Peer("tiny", "1.0", ("tiny==1.0",), proof="import tiny_peer", compares="nothing")


def wheel(folder: Path) -> Path:
    """A package of one module, made by hand: nothing is asked of an index."""
    path = folder / "tiny-1.0-py3-none-any.whl"
    info = "tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_peer.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheel(tmp_path)
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path),
        "CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    folder = tmp_path / "peers"
    folder.mkdir()
    return folder


@pytest.fixture
def only_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue.BY_NAME, "tiny", PEER)


def test_a_peer_counts_only_with_the_stamp_of_its_recipe(tmp_path, only_tiny) -> None:
    home = tmp_path / "tiny"
    home.mkdir()
    assert find("tiny", tmp_path) == Absent(PEER, "`make peers PEER=tiny` brings it")
    (home / STAMP).write_text("tiny==0.9\n")
    stale = find("tiny", tmp_path)
    assert isinstance(stale, Absent)
    assert "another recipe" in stale.why
    (home / STAMP).write_text(PEER.recipe)
    assert find("tiny", tmp_path) == Present(PEER, home)


def test_it_goes_on_where_it_broke_off_and_stamps_only_what_works(offline, only_tiny) -> None:
    broken = replace(PEER, proof="import absent_module")
    refusal = command.install(broken, offline)
    assert refusal is not None
    assert "does not start" in refusal.found
    assert isinstance(find("tiny", offline), Absent)
    kept = offline / "tiny/kept"
    kept.touch()
    assert command.install(PEER, offline) is None
    assert isinstance(find("tiny", offline), Present)
    assert kept.exists(), "the environment was made anew"


def test_one_that_cannot_be_had_is_refused_in_four_parts_and_the_others_still_come(
    tmp_path, monkeypatch, capsys
) -> None:
    needy = replace(PEER, name="needy", tools=("no-such-compiler",), packages="compiler")
    here = tmp_path / "tiny"
    here.mkdir()
    (here / STAMP).write_text(PEER.recipe)
    monkeypatch.setenv("PEERS", str(tmp_path))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    for name, peer in (("needy", needy), ("tiny", PEER)):
        monkeypatch.setitem(catalogue.BY_NAME, name, peer)
    assert command.main(["needy", "tiny"]) == 1
    printed = capsys.readouterr()
    assert "tiny 1.0" in printed.out
    told = printed.err.splitlines()
    assert told[0] == "error: peer needy"
    assert [line.split()[0] for line in told[1:4]] == ["found:", "allowed:", "remedy:"]
    assert "apt-get install compiler" in told[3]
    assert command.main(["tiny"]) == 0


def test_a_name_that_is_no_peer_is_an_error_of_the_command_line(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["lama.cpp"])
    assert "there are vllm-router" in capsys.readouterr().err


def test_missing_tools_are_told_before_anything_is_made() -> None:
    peer = replace(PEER, tools=("cmake", "g++"))
    assert missing_tools(peer, lambda tool: "/bin/g++" if tool == "g++" else None) == ["cmake"]


def test_no_room_is_told_before_anything_is_made(tmp_path) -> None:
    refusal = command.install(replace(PEER, disk_gb=1e9), tmp_path)
    assert refusal is not None
    assert "GB free" in refusal.found
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_late_is_ended_with_its_children(tmp_path) -> None:
    command_line = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with (tmp_path / "log").open("wb") as log, pytest.raises(command.StepFailed, match="within"):
        command._step("it hangs", command_line, log.fileno(), {}, limit_s=0.5)
    wait_gone([int((tmp_path / "log").read_text())], 5)
