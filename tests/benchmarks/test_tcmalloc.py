"""The allocator that vLLM asks for: the system's, or unpacked beside vLLM, or told as absent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.peers.tcmalloc import PACKAGE, bring, find

NAME = "x86_64-linux-gnu/libtcmalloc_minimal.so.4"


@pytest.fixture
def nothing(tmp_path: Path) -> Path:
    folder = tmp_path / "nothing"
    folder.mkdir()
    return folder


def place(folder: Path) -> Path:
    path = folder / NAME
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_the_systems_own_is_taken_first(tmp_path, nothing) -> None:
    here, there = place(tmp_path / "system"), place(tmp_path / "home/debian/usr/lib")
    assert find(tmp_path / "home", tmp_path / "system") == here
    assert find(tmp_path / "home", nothing) == there
    assert find(nothing, nothing) is None
    assert bring(tmp_path / "home", system=nothing, run=None, which=None) is None  # type: ignore[arg-type]


def test_the_package_is_unpacked_beside_the_peer(tmp_path, nothing) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, cwd: str | None = None, **_: object) -> None:
        commands.append(command)
        if command[0] == "apt-get":
            (Path(str(cwd)) / f"{PACKAGE}_2.10-1_amd64.deb").touch()
        else:
            place(Path(command[3]) / "usr/lib")

    assert bring(tmp_path, system=nothing, run=run, which=lambda tool: tool) is None
    assert find(tmp_path, nothing) == tmp_path / "debian/usr/lib" / NAME
    assert [command[0] for command in commands] == ["apt-get", "dpkg-deb"]


def test_why_it_cannot_be_had_is_said_with_the_remedy(tmp_path, nothing) -> None:
    def refuse(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(100, command)

    told = bring(tmp_path, system=nothing, run=refuse, which=lambda tool: tool)
    assert told == f"tcmalloc is absent and not downloaded: apt-get install {PACKAGE}"
    elsewhere = bring(tmp_path, system=nothing, run=refuse, which=lambda _: None)
    assert elsewhere is not None
    assert "there is no apt-get" in elsewhere
    assert list(tmp_path.iterdir()) == [nothing]
