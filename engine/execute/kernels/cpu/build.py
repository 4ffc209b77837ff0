"""Compiles the kernels once and keeps the result in the cache folder, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden"),
    *("-fno-exceptions", "-fno-rtti", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"),
)
# Never -march=native: the file serves whichever CPU loads it, by the instruction sets it has.
UNITS = {
    "host": ("host.cpp",),
    "pack": ("pack.cpp",),
    "scalar": ("kernels.cpp", "-DKAGARI_ISA=0"),
    "avx2": ("kernels.cpp", "-DKAGARI_ISA=1", "-mavx2", "-mfma", "-mf16c"),
    "avx512": ("kernels.cpp", "-DKAGARI_ISA=2", "-march=x86-64-v4", "-mavx512vnni"),
    "avx512_bf16": (
        *("kernels.cpp", "-DKAGARI_ISA=3", "-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    ),
    "amx": (
        *("kernels.cpp", "-DKAGARI_ISA=4", "-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        *("-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    ),
}
LINK_FLAGS = ("-shared", "-pthread", "-Wl,--as-needed")
BUILD_S = 120.0  # for everything: waiting for another builder, compiling, linking
KEPT_BUILDS = 4
TOLD_LINES = 6  # of a compiler's errors


class NoKernels(Exception):
    """There is no library for this machine; the text says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    version: str  # all that it says to --version


def cache_folder() -> Path:
    """Below KAGARI_CACHE, else ~/.cache/kagari."""
    named = os.environ.get("KAGARI_CACHE") or "~/.cache/kagari"
    return Path(named).expanduser().absolute() / "kernels"


def find_compiler() -> Compiler | None:
    """The first of $CXX, g++, clang++ that answers."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in ([named] if named else []) + [["g++"], ["clang++"]]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = subprocess.run(
                [*command, "--version"], capture_output=True, text=True, timeout=10, check=True
            )
            return Compiler(tuple(command), asked.stdout)
    return None


def library_file(*, build_s: float = BUILD_S) -> Path:
    """The compiled kernels: KAGARI_CPU_KERNELS, else from the cache, else compiled now (seconds).

    Without a compiler a build by any compiler serves. Raises NoKernels.
    """
    if named := os.environ.get("KAGARI_CPU_KERNELS"):
        return Path(named)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NoKernels(f"the kernels are for Linux on x86-64, not {platform.platform(terse=True)}")
    sources = [path.read_text() for path in sorted(SOURCES.glob("*.[ch]*"))]
    key = _digest(sources, FLAGS, UNITS, LINK_FLAGS, platform.machine(), platform.libc_ver())
    folder, compiler = cache_folder(), find_compiler()
    if compiler is None:
        builds = list(filter(_is_trusted, folder.glob(f"{key}-*.so")))
        if not builds:
            raise NoKernels("no C++ compiler was found (g++, clang++ or $CXX), and no build")
        return max(builds, key=_last_used)
    build = folder / f"{key}-{_digest(compiler.version)}.so"
    if _is_trusted(build):
        with contextlib.suppress(OSError):
            os.utime(build)
        return build
    deadline = time.monotonic() + build_s
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_builder(folder, deadline=deadline):
            if not _is_trusted(build):  # another builder may have been first
                _make(build, compiler, deadline=deadline)
    except OSError as error:
        raise NoKernels(f"{folder} cannot be written ({error}): set KAGARI_CACHE") from error
    return build


def build_id(library: Path) -> str:
    """Equal ids: equal sources, flags and compilers; so equal bits, by one instruction set."""
    if library.parent == cache_folder():
        return library.stem
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]  # KAGARI_CPU_KERNELS


def discard(build: Path) -> None:
    """Forgets one that could not be loaded, so that the next library_file compiles anew."""
    if build.parent == cache_folder():  # not KAGARI_CPU_KERNELS
        build.unlink(missing_ok=True)


def compile_library(
    to: Path, compiler: Compiler, *, deadline: float, extra: Sequence[str] = ()
) -> None:
    """Compiles the units beside `to`, two at a time, and links them; extra: flags for both.

    Raises NoKernels.
    """

    def compile_unit(name: str) -> str:
        unit = str(to.with_name(f"{name}.o"))
        source, *flags = UNITS[name]
        command = [*compiler.command, *FLAGS, *flags, *extra, "-c", str(SOURCES / source)]
        _run([*command, "-o", unit], deadline=deadline)
        return unit

    with ThreadPoolExecutor(2) as pool:
        units = list(pool.map(compile_unit, reversed(UNITS)))  # the longest first
    _run([*compiler.command, *LINK_FLAGS, *extra, *units, "-o", str(to)], deadline=deadline)


def _run(command: list[str], *, deadline: float) -> None:
    """In a process group of its own: a compiler's driver leaves its children when it is killed."""
    left = deadline - time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "LC_ALL": "C"},
    ) as process:
        try:
            _, told = process.communicate(timeout=max(0.0, left))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise NoKernels("compiling took too long and was ended") from None
            raise
    if process.returncode:
        lines = "\n".join(told.strip().splitlines()[-TOLD_LINES:])
        raise NoKernels(f"{command[0]} failed with {process.returncode}:\n{lines}")


@contextlib.contextmanager
def _only_builder(folder: Path, *, deadline: float) -> Iterator[None]:
    """One builder at a time, by a lock that ends with its process. Raises NoKernels."""
    with (folder / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NoKernels(
                        f"another process has been compiling for too long ({folder})"
                    ) from None
                time.sleep(0.05)
        yield


def _make(build: Path, compiler: Compiler, *, deadline: float) -> None:
    """Puts a new build in place by one rename, once all of it is on the disk."""
    for leftover in build.parent.glob("building-*"):  # a killed builder's: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=build.parent) as folder:
        made = Path(folder) / "kernels.so"
        compile_library(made, compiler, deadline=deadline)
        made.chmod(0o755)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(build)
    for old in sorted(build.parent.glob("*.so"), key=_last_used)[:-KEPT_BUILDS]:
        old.unlink(missing_ok=True)


def _is_trusted(build: Path) -> bool:
    """Whether it is there, and nobody but this user or root can have changed it."""
    try:
        status = build.stat()
    except OSError:
        return False
    return status.st_uid in {0, os.getuid()} and not status.st_mode & 0o022


def _last_used(build: Path) -> float:
    try:
        return build.stat().st_mtime
    except OSError:
        return 0.0


def _digest(*told: object) -> str:
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
