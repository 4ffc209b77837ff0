"""`python -m benchmarks.peers [NAME …]`: installs peers, each in an environment of its own, once.

One that cannot be installed here is named with the reason and the others still come; then the exit
status is 1. Interrupted, it goes on where pip was. It leaves the cores to whoever else wants them.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.peers import tcmalloc
from benchmarks.peers.catalogue import (
    BY_NAME,
    CATALOGUE,
    STAMP,
    Absent,
    Peer,
    Present,
    find,
    missing_tools,
    peers_folder,
)

ROOT = Path(__file__).resolve().parents[2]
INSTALL_LIMIT_S = 2 * 3600.0  # llama.cpp compiles for half an hour on two busy cores
PROOF_LIMIT_S = 600.0
TOLD_LINES = 6


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a peer cannot be had here, in the four parts of every error."""

    peer: Peer
    found: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"error: peer {self.peer.name}\n  found:   {self.found}\n"
            f"  allowed: {self.allowed}\n  remedy:  {self.remedy};\n"
            f"           without it {self.peer.compares} names it as absent"
        )


class StepFailed(Exception):
    """A command of a recipe failed; its output is in the log."""


def install(peer: Peer, folder: Path) -> Refusal | None:
    """None when it is there afterwards."""
    missing = missing_tools(peer)
    if missing:
        return Refusal(
            peer,
            f"{' and '.join(missing)} not on PATH",
            f"a machine with {' and '.join(peer.tools)}",
            f"apt-get install {peer.packages}, then make peers PEER={peer.name}",
        )
    home, log = folder / peer.name, folder / f"{peer.name}.log"
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < peer.disk_gb:
        return Refusal(
            peer,
            f"{free_gb:.1f} GB free in {folder}",
            f"{peer.disk_gb:g} GB for it",
            "make room, or choose another folder: make peers PEERS=/elsewhere",
        )
    try:
        _run_recipe(peer, home, log)
    except StepFailed as failed:
        lines = log.read_text(errors="replace").splitlines()[-TOLD_LINES:]
        return Refusal(
            peer,
            "\n           ".join([f"{failed}; the log ends:", *lines]),
            f"{peer.label} from a package index, for this Python and processor",
            f"read {log}; give pip an index that has it (PIP_INDEX_URL), then"
            f" make peers PEER={peer.name}",
        )
    stamp = home / f"{STAMP}.new"
    stamp.write_text(peer.recipe)
    stamp.rename(home / STAMP)
    return None


def _run_recipe(peer: Peer, home: Path, log_path: Path) -> None:
    python = home / "bin/python"
    stamp = home / STAMP
    with log_path.open("ab") as log:
        if stamp.exists():
            shutil.rmtree(home)  # of another recipe; pip keeps what it downloaded and compiled
        if not _works(python):
            shutil.rmtree(home, ignore_errors=True)
            make_venv = ["sh", str(ROOT / ".ci/make-venv"), sys.executable, str(home)]
            _step("its environment cannot be made", make_venv, log.fileno(), {})
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        if peer.torch is not None:
            index = os.environ.get("TORCH_INDEX")
            torch = [*pip, "install", *(["--index-url", index] if index else []), peer.torch]
            _step(f"{peer.torch} cannot be installed", torch, log.fileno(), {})
        wanted = [*filter(None, [peer.torch]), *peer.requirements]
        _step(
            f"{' '.join(peer.requirements)} cannot be installed",
            [*pip, "install", *(["--no-cache-dir"] if peer.compiled else []), *wanted],
            log.fileno(),
            peer.environment,
        )
        if peer.uninstall:
            command = [*pip, "uninstall", "--yes", *peer.uninstall]
            _step("what does it harm cannot be removed", command, log.fileno(), {})
        proof = [str(python), "-c", peer.proof]
        _step("it does not start", proof, log.fileno(), {}, limit_s=PROOF_LIMIT_S)


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    tried = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
    return tried.returncode == 0


def _step(
    fault: str,
    command: list[str],
    log: int,
    environment: object,
    *,
    limit_s: float = INSTALL_LIMIT_S,
) -> None:
    """Runs in a group of its own, so that a compiler does not outlive its deadline or our end."""
    assert isinstance(environment, dict)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise StepFailed(f"{fault} within {limit_s / 60:.0f} minutes") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if status != 0:
        raise StepFailed(fault)


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Two at the same environment take turns; the second finds it made."""
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _lacks_tcmalloc(peer: Peer, home: Path) -> bool:
    """Brings what its driver preloads; says why where it cannot: the peer runs, only slower."""
    why = tcmalloc.bring(home) if peer.wants_tcmalloc else None
    if why is not None:
        print(f"{peer.label}: {why}", file=sys.stderr, flush=True)
    return why is not None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install the peers that benchmarks compare with.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BY_NAME)}; without any: all"
    )
    chosen = parser.parse_args(arguments).names
    unknown = [name for name in chosen if name not in BY_NAME]
    if unknown:
        parser.error(f"no peer is called {', '.join(unknown)}: there are {', '.join(BY_NAME)}")
    folder = peers_folder()
    folder.mkdir(parents=True, exist_ok=True)
    os.nice(10)
    refused = 0
    for peer in [BY_NAME[name] for name in chosen] or CATALOGUE:
        began = time.monotonic()
        with alone(folder, peer.name):
            match find(peer.name, folder):
                case Present(_, home):
                    print(f"{peer.label} ({home})", flush=True)
                    refused += _lacks_tcmalloc(peer, home)
                    continue
                case Absent():
                    log = folder / f"{peer.name}.log"
                    print(f"{peer.label}: installing, log {log}", flush=True)
                    refusal = install(peer, folder)
        if refusal is None:
            took = time.monotonic() - began
            print(f"{peer.label} ({folder / peer.name}), {took:.0f} s", flush=True)
            refused += _lacks_tcmalloc(peer, folder / peer.name)
        else:
            refused += 1
            print(refusal, file=sys.stderr, flush=True)
    try:
        print(f"transformers {version('transformers')} (this environment)")
    except PackageNotFoundError:
        print("transformers absent: make install brings it")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
