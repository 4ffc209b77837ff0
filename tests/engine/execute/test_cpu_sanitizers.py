"""The CPU kernels under sanitizers: memory, undefined behaviour, and races of the pool."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.execute.kernels.cpu import build

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILD_S, RUN_S = 300, 600

# Two callers, several numbers of threads, threads that sleep: each share must be run once. The
# kernels are stand-ins, for only the host's unit is compiled.
POOL = """
#include <pthread.h>
#include <unistd.h>
#include "abi.h"

const Kernels kagari_isa_0 = {}, kagari_isa_1 = {}, kagari_isa_2 = {}, kagari_isa_3 = {},
              kagari_isa_4 = {};
extern "C" int32_t kagari_open(int32_t, int32_t);
extern "C" void kagari_close();

constexpr int COUNT = 100, JOBS = 1000;
struct Ran { int times[COUNT]; };

void add(void* ran, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) static_cast<Ran*>(ran)->times[i]++;
}

void* call(void* ran) {
  for (int i = 0; i < JOBS; i++) {
    kagari_parallel(COUNT, 1 + i % 7, add, ran);
    if (i % 100 == 0) usleep(300);
  }
  return nullptr;
}

int main() {
  const int numbers[] = {4, 2, 3, 1};
  for (int threads : numbers) {
    if (kagari_open(0, threads) != 0) return 2;
    Ran ran[2] = {};
    pthread_t other;
    pthread_create(&other, nullptr, call, ran);
    call(ran + 1);
    pthread_join(other, nullptr);
    for (const Ran& each : ran)
      for (int times : each.times)
        if (times != JOBS) return 3;
  }
  kagari_close();
  return 0;
}
"""


@pytest.fixture
def compiler() -> build.Compiler:
    found = build.find_compiler()
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


def runtime(compiler: build.Compiler, name: str) -> str:
    """Where the compiler keeps a library; it answers with the bare name of one it lacks."""
    command = [*compiler.command, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"this compiler has no {name}")
    return path


def test_the_pool_has_no_races(compiler: build.Compiler, tmp_path: Path) -> None:
    runtime(compiler, "libtsan.so")
    source, program = tmp_path / "pool.cpp", tmp_path / "pool"
    source.write_text(POOL)
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread"]
    files = [str(source), str(build.SOURCES / "host.cpp"), f"-I{build.SOURCES}", "-o", str(program)]
    subprocess.run([*compiler.command, *flags, *files], check=True, timeout=BUILD_S)
    # Without random addresses: older runtimes do not start where they are spread too far.
    done = subprocess.run(
        ["setarch", "-R", str(program)], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_kernels_stay_within_their_memory_and_the_language(
    compiler: build.Compiler, tmp_path: Path
) -> None:
    """The kernels' own tests, on a library that stops the process at the first wrong step."""
    # The second, lest the first look for it in vain when torch throws.
    preloaded = [runtime(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    library = tmp_path / "kernels.so"
    build.compile_library(
        library,
        compiler,
        deadline=time.monotonic() + BUILD_S,
        extra=("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    )
    tests = [str(HERE / f"test_cpu_{part}.py") for part in ("row_ops", "gemm", "attention")]
    chosen = ["-m", "not slow", "-k", "not company"]  # the largest ones
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen, *tests],
        cwd=ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(preloaded),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it needs to the end
            "KAGARI_CPU_KERNELS": str(library),
        },
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
