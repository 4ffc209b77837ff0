"""How the CPU kernels come to be: compiled once, kept whole, refused with a reason, checked.

Most tests put a compiler of their own in place, a script that notes each call and "links" by
copying a file: what is tested is everything around the compiler.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import ConfigError
from engine.execute.kernels.cpu import __main__ as command
from engine.execute.kernels.cpu import build, library, self_check

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60
COMPILER = """#!/bin/sh
[ "$1" = --version ] && {{ echo "{version}"; exit 0; }}
echo $$ >> "{calls}"
{before}
for word; do [ "$last" = -o ] && out=$word; last=$word; done
case "$out" in *.so) cp "{result}" "$out" ;; *) : > "$out" ;; esac
"""

FakeCompiler = Callable[..., Path]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    path = tmp_path / "calls"
    path.touch()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("KAGARI_CPU_KERNELS", "KAGARI_CPU_ISA", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("KAGARI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_compiler(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """Makes the script and names it in CXX. before: shell that runs in each call but --version."""

    def make(*, before: str = "", version: str = "1", result: Path | None = None) -> Path:
        script, made = tmp_path / "compiler", tmp_path / "result"
        made.write_bytes(b"a library")
        script.write_text(
            COMPILER.format(version=version, calls=calls, before=before, result=result or made)
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    return make


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def take_away() -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")

    return take_away


def num_calls(calls: Path) -> int:
    return len(calls.read_text().split())


def builder() -> "subprocess.Popen[str]":
    """Another process that wants the library, and prints where it is."""
    code = "from engine.execute.kernels.cpu import build\nprint(build.library_file())"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=-1, text=True)


def wait_until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- the cache ----------------------------------------------------------------------------------


def test_it_is_compiled_once(fake_compiler: FakeCompiler, calls: Path, cache: Path) -> None:
    fake_compiler()
    path = build.library_file()
    assert path.read_bytes() == b"a library"
    assert path.is_relative_to(cache / "kernels")
    assert num_calls(calls) == len(build.UNITS) + 1
    assert build.library_file() == path
    assert num_calls(calls) == len(build.UNITS) + 1


def test_a_build_serves_without_a_compiler(
    fake_compiler: FakeCompiler, no_compiler: Callable[[], None]
) -> None:
    fake_compiler()
    path = build.library_file()
    no_compiler()
    assert build.library_file() == path


def test_another_compiler_or_source_compiles_anew(
    fake_compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler()
    first = build.library_file()
    fake_compiler(version="2")
    second = build.library_file()
    paths = {first, second}
    shutil.copytree(build.SOURCES, changed := tmp_path / "changed")
    monkeypatch.setattr(build, "SOURCES", changed)
    for source in {file for file, *_ in build.UNITS.values()} | {"abi.h"}:
        with (changed / source).open("a") as file:
            file.write("// another")
        paths.add(build.library_file())
    assert len(paths) == 6


def spoil_by_letting_all_write(path: Path) -> None:
    path.chmod(0o777)


@pytest.mark.parametrize("spoil", [spoil_by_letting_all_write, Path.unlink])
def test_a_build_that_is_not_trusted_is_replaced(
    fake_compiler: FakeCompiler,
    no_compiler: Callable[[], None],
    calls: Path,
    spoil: Callable[[Path], None],
) -> None:
    fake_compiler()
    path = build.library_file()
    spoil(path)
    assert build.library_file() == path
    assert num_calls(calls) == 2 * (len(build.UNITS) + 1)
    assert path.stat().st_mode & 0o777 == 0o755
    spoil(path)
    no_compiler()
    with pytest.raises(build.NoKernels, match="compiler"):
        build.library_file()


def test_only_the_last_builds_are_kept(fake_compiler: FakeCompiler, cache: Path) -> None:
    for version in range(build.KEPT_BUILDS + 3):
        fake_compiler(version=str(version))
        path = build.library_file()
        age = 1000 - version
        os.utime(path, (time.time() - age, time.time() - age))
    assert len(list((cache / "kernels").glob("*.so"))) == build.KEPT_BUILDS
    assert path.is_file()


def test_a_cache_that_cannot_be_written_is_a_reason(
    fake_compiler: FakeCompiler, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a file there is no folder, not even for root."""
    fake_compiler()
    monkeypatch.setenv("KAGARI_CACHE", str(calls / "cache"))
    with pytest.raises(build.NoKernels, match="set KAGARI_CACHE"):
        build.library_file()


# --- builders beside each other, and their ends -------------------------------------------------


def test_two_processes_compile_once(fake_compiler: FakeCompiler, calls: Path) -> None:
    fake_compiler(before="sleep 0.2")
    both = [builder(), builder()]
    paths = {process.communicate(timeout=PATIENCE_S)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(paths) == 1
    assert num_calls(calls) == len(build.UNITS) + 1


def test_a_killed_builder_is_in_nobodys_way(
    fake_compiler: FakeCompiler, calls: Path, cache: Path
) -> None:
    fake_compiler(before="exec sleep 300")
    killed = builder()
    wait_until(lambda: num_calls(calls) >= 2, "two compilers run")
    killed.kill()
    killed.communicate()
    for process in calls.read_text().split():
        os.kill(int(process), signal.SIGKILL)
    assert list((cache / "kernels").glob("building-*"))
    fake_compiler()
    assert build.library_file().is_file()
    assert not list((cache / "kernels").glob("building-*"))


def test_a_compiler_that_takes_too_long_is_ended(fake_compiler: FakeCompiler, calls: Path) -> None:
    fake_compiler(before="sleep 300; exit 1")
    with pytest.raises(build.NoKernels, match="too long"):
        build.library_file(build_s=1.0)
    compilers = [int(process) for process in calls.read_text().split()]
    assert compilers
    assert not any(map(is_running, compilers))


def test_another_builder_is_not_awaited_for_ever(fake_compiler: FakeCompiler, calls: Path) -> None:
    fake_compiler(before="exec sleep 300")
    other = builder()
    wait_until(lambda: num_calls(calls) >= 1, "the other has the lock")
    with pytest.raises(build.NoKernels, match="another process"):
        build.library_file(build_s=0.2)
    other.kill()
    other.communicate()
    for process in calls.read_text().split():
        os.kill(int(process), signal.SIGKILL)


def test_an_error_is_told_by_the_compilers_last_lines(fake_compiler: FakeCompiler) -> None:
    fake_compiler(before="seq 100 >&2; echo 'no such flag' >&2; exit 3")
    with pytest.raises(build.NoKernels) as told:
        build.library_file()
    lines = str(told.value).splitlines()
    assert "failed with 3" in lines[0]
    assert lines[-1] == "no such flag"
    assert len(lines) == 1 + build.TOLD_LINES
    assert library.load() is None
    assert library.why_absent() == str(told.value)


# --- loading ------------------------------------------------------------------------------------


def test_without_compiler_and_build_there_are_no_kernels(
    no_compiler: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    no_compiler()
    assert library.load() is None
    assert "no C++ compiler" in str(library.why_absent())
    assert command.main() == 1
    assert "no C++ compiler" in capsys.readouterr().err


def test_kernels_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGARI_CPU_ISA", "off")
    assert library.load() is None
    assert library.why_absent() == "KAGARI_CPU_ISA is off"


def test_an_unknown_instruction_set_is_told_in_four_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGARI_CPU_ISA", "sse9")
    with pytest.raises(
        ConfigError, match="found sse9, allowed scalar, avx2, avx512, avx512_bf16, amx, off"
    ) as told:
        library.load()
    assert told.value.field == "KAGARI_CPU_ISA"
    assert command.main() == 2


@pytest.fixture(scope="session")
def real_library() -> Path:
    """The kernels as every other test loads them, compiled at most once for all of them."""
    try:
        return build.library_file()
    except build.NoKernels as error:
        if build.find_compiler() is not None:
            raise  # every test of the kernels would skip itself
        pytest.skip(f"no CPU kernels here: {error}")


def test_a_library_of_another_system_is_compiled_anew(
    real_library: Path, fake_compiler: FakeCompiler, calls: Path
) -> None:
    fake_compiler()
    path = build.library_file()
    assert num_calls(calls) == len(build.UNITS) + 1
    fake_compiler(result=real_library)
    loaded = library.load(isa="scalar")
    assert loaded is not None
    assert loaded.isa == "scalar"
    assert num_calls(calls) == 2 * (len(build.UNITS) + 1)
    assert path.read_bytes() == real_library.read_bytes()


def test_what_can_never_be_loaded_is_a_reason(fake_compiler: FakeCompiler) -> None:
    fake_compiler()
    assert library.load() is None
    assert "cannot be loaded" in str(library.why_absent())


def test_a_named_library_is_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "mine" / "kernels.so"
    named.parent.mkdir()
    named.write_bytes(b"not a library")
    monkeypatch.setenv("KAGARI_CPU_KERNELS", str(named))
    assert library.load() is None
    assert str(named) in str(library.why_absent())
    assert named.is_file()


def test_the_command_prints_path_and_instruction_set(
    real_library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAGARI_CPU_KERNELS", str(real_library))
    monkeypatch.setenv("KAGARI_CPU_ISA", "scalar")
    assert command.main() == 0
    assert capsys.readouterr().out == f"{real_library} (scalar)\n"


def test_an_instruction_set_that_computes_wrongly_is_passed_over(
    real_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAGARI_CPU_KERNELS", str(real_library))
    best = library.load()
    assert best is not None
    assert best.distrusted == ()
    if best.isa == "scalar":
        pytest.skip("this CPU has the scalar kernels alone")
    probe, asked = self_check.probe, iter([1.0, 1.1, 1.0, 1.0])  # the second time: of the best

    def lying(functions: ctypes.CDLL) -> tuple[torch.Tensor, ...]:
        first, *rest = probe(functions)
        return (first * next(asked), *rest)

    monkeypatch.setattr(self_check, "probe", lying)
    self_check.agrees.cache_clear()
    lower = library.load()
    self_check.agrees.cache_clear()
    assert lower is not None
    assert lower.isa == library.ISAS[library.ISAS.index(best.isa) - 1]
    assert lower.distrusted == (best.isa,)


# A stack for signals with no room for the tiles: the system then refuses them to the process.
WITHOUT_TILES = """
import ctypes
from engine.execute.kernels.cpu import library

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(room), 0, len(room))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
loaded = library.load()
print(loaded.isa, loaded.distrusted)
"""


def test_tiles_that_the_system_refuses_are_not_used(
    real_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAGARI_CPU_KERNELS", str(real_library))
    best = library.load()
    if best is None or best.isa != "amx":
        pytest.skip("this CPU has no AMX")
    command = [sys.executable, "-c", WITHOUT_TILES]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.split() == ["avx512_bf16", "()"], run.stderr


# In place of the kernels: seconds to compile become a moment, with the same flags.
STAND_IN = """
#include "abi.h"
#define JOINED(isa) kagari_isa_##isa
#define NAMED(isa) JOINED(isa)
extern "C" const Kernels NAMED(KAGARI_ISA) = {};
"""


def test_the_real_compiler_takes_every_flag(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler here")
    shutil.copytree(build.SOURCES, changed := tmp_path / "changed")
    (changed / "kernels.cpp").write_text(STAND_IN)
    monkeypatch.setattr(build, "SOURCES", changed)
    path = build.library_file()
    assert path.is_relative_to(cache)
    assert sorted(path.parent.iterdir()) == [path.parent / ".lock", path]
    functions = ctypes.CDLL(str(path))
    assert all(hasattr(functions, name) for name in library.FUNCTIONS)
    scalar = library.ISAS.index("scalar")
    assert functions.kagari_open(scalar, 1) == 0
    functions.kagari_close()


def test_what_the_real_compiler_made_is_loaded(
    real_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAGARI_CPU_KERNELS", str(real_library))
    loaded = library.load()
    assert loaded is not None
    assert loaded.distrusted == ()


@pytest.mark.slow
def test_the_real_compiler_makes_what_is_loaded_from_nothing(cache: Path) -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler here")
    path = build.library_file()
    assert path.is_relative_to(cache)
    loaded = library.load()
    assert loaded is not None
    assert loaded.distrusted == ()
