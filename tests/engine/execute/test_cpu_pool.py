"""The CPU kernels' threads: every chunk once, by whoever is awake, and nobody waits for ever."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.execute.kernels.cpu import library
from engine.execute.kernels.cpu.library import Library, Norm, Program, Step

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60
WIDTH, ROWS = 64, 2000  # 16 chunks
THREADS = [1, 2, 3, 8]


def opened(threads: int) -> Library:
    loaded = library.load(isa="scalar", threads=threads)
    if loaded is None:
        pytest.skip(f"no CPU kernels here: {library.why_absent()}")
    return loaded


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    loaded = opened(getattr(request, "param", 2))
    yield loaded
    loaded.close()


class Sums:
    """Adds 1 to every number of x: an op that shows how often each of its chunks was run."""

    def __init__(self) -> None:
        self.x, self.ones = torch.zeros(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
        self.norm = Norm(x=self.x.data_ptr(), added=self.ones.data_ptr(), eps=1, width=WIDTH)

    def program(self, times: int) -> Program:
        return library.program([self.norm] * times)


def all_equal(x: Tensor, value: int) -> bool:
    return bool((x == value).all())


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("kernels", THREADS, indirect=True)
def test_every_chunk_is_run_once(kernels: Library) -> None:
    """Also by more threads than there are CPUs."""
    sums, before = Sums(), kernels.stats().jobs
    for _ in range(20):
        kernels.run(sums.program(50), Step(rows=ROWS))
    assert all_equal(sums.x, 1000)
    stats = kernels.stats()
    assert stats.jobs - before == (1000 if kernels.threads > 1 else 0)
    assert 0 <= stats.beside <= kernels.threads - 1


def test_threads_that_have_gone_to_sleep_come_back(kernels: Library) -> None:
    sums = Sums()
    for _ in range(30):
        kernels.run(sums.program(10), Step(rows=ROWS))
        time.sleep(0.002)
    assert all_equal(sums.x, 300)


def test_idle_threads_use_no_time(kernels: Library) -> None:
    sums = Sums()
    kernels.run(sums.program(10), Step(rows=ROWS))
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25


def test_few_rows_never_reach_the_pool(kernels: Library) -> None:
    sums, before = Sums(), kernels.stats().jobs
    kernels.run(sums.program(1), Step(rows=1))
    assert kernels.stats().jobs == before
    assert all_equal(sums.x[0], 1)
    assert all_equal(sums.x[1:], 0)


def test_threads_keep_subnormals_whatever_their_opener_does() -> None:
    """A thread is born with the rounding of the one that starts it."""
    torch.set_flush_denormal(True)
    try:
        loaded = opened(2)
    finally:
        torch.set_flush_denormal(False)
    sums = Sums()
    sums.ones.fill_(1e-40)
    for _ in range(20):
        loaded.run(sums.program(50), Step(rows=ROWS))
    loaded.close()
    assert bool((sums.x == sums.x[0, 0]).all())
    assert sums.x[0, 0] > 0


def test_opening_again_ends_the_threads_before() -> None:
    alone = num_threads()
    for threads in (4, 2, 6, 1, 3):
        sums, loaded = Sums(), opened(threads)
        assert num_threads() == alone + threads - 1
        loaded.run(sums.program(20), Step(rows=ROWS))
        assert all_equal(sums.x, 20)
    loaded.close()
    assert num_threads() == alone
    sums = Sums()
    loaded.run(sums.program(2), Step(rows=ROWS))
    assert all_equal(sums.x, 2), "closed: on the caller's thread"


@pytest.mark.parametrize("kernels", THREADS, indirect=True)
@pytest.mark.parametrize("away_s", [0.0, 0.0001, 0.001])
def test_a_started_program_is_carried_out_once_whoever_comes_first(
    kernels: Library, away_s: float
) -> None:
    sums = Sums()
    program, step = sums.program(20), Step(rows=ROWS)
    kernels.finish()  # nothing was started
    for _ in range(40):
        kernels.start(program, step, 20)
        time.sleep(away_s)
        kernels.finish()
    assert all_equal(sums.x, 800)
    kernels.run(program, step)
    assert all_equal(sums.x, 820)


def test_a_thread_computes_while_the_caller_is_elsewhere(kernels: Library) -> None:
    sums = Sums()
    kernels.start(sums.program(50), Step(rows=ROWS), 30)
    deadline = time.monotonic() + PATIENCE_S
    while not all_equal(sums.x, 30) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all_equal(sums.x, 30)
    kernels.finish()
    assert all_equal(sums.x, 30)


@pytest.mark.parametrize("kernels", [1], indirect=True)
def test_without_threads_a_started_program_waits_for_its_caller(kernels: Library) -> None:
    sums = Sums()
    program, step = sums.program(3), Step(rows=ROWS)
    kernels.start(program, step, 3)
    time.sleep(0.01)
    assert all_equal(sums.x, 0)
    kernels.finish()
    assert all_equal(sums.x, 3)


def test_a_program_that_was_started_outlives_the_threads() -> None:
    loaded, sums = opened(3), Sums()
    program, step = sums.program(200), Step(rows=ROWS)
    for _ in range(20):
        loaded.start(program, step, 200)
        loaded.close()
        loaded.finish()
    assert all_equal(sums.x, 4000)


def test_two_callers_do_not_mix_their_jobs(kernels: Library) -> None:
    """Not meant to happen; whoever comes second goes alone."""
    both = [Sums(), Sums()]

    def call(sums: Sums) -> None:
        for _ in range(20):
            kernels.run(sums.program(20), Step(rows=ROWS))

    callers = [threading.Thread(target=call, args=(sums,)) for sums in both]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert [all_equal(sums.x, 400) for sums in both] == [True, True]


@pytest.mark.parametrize("neighbours", [1, 3])
def test_busy_neighbours_delay_but_do_not_stop(kernels: Library, neighbours: int) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
    try:
        sums, before = Sums(), kernels.stats().jobs
        for _ in range(10):
            kernels.run(sums.program(300), Step(rows=ROWS))
        assert all_equal(sums.x, 3000)
        stats = kernels.stats()
        assert stats.jobs - before == 3000
        assert 0 <= stats.beside <= 1
    finally:
        for process in busy:
            process.kill()
            process.wait()


# --- in processes of their own ------------------------------------------------------------------

BEGIN = """
import os, sys, resource
import torch
from engine.execute.kernels.cpu import library
from engine.execute.kernels.cpu.library import Norm, Step
torch.set_num_threads(1)  # its own threads do not survive a fork
x, ones = torch.zeros(2000, 64), torch.ones(2000, 64)
program = library.program([Norm(x=x.data_ptr(), added=ones.data_ptr(), eps=1, width=64)] * 50)
"""


def in_a_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_runs_alone_and_may_open_again(kernels: Library) -> None:
    """It has none of the threads: neither a job nor joining them may wait for one."""
    told = in_a_process("""
loaded = library.load(isa="scalar", threads=3)
loaded.run(program, Step(rows=2000))
child = os.fork()
loaded.run(program, Step(rows=2000))
ok = bool((x == 100).all())
if child == 0:
    again = library.load(isa="scalar", threads=2)
    again.run(program, Step(rows=2000))
    again.close()
    os._exit(0 if ok and bool((x == 150).all()) else 1)
print(ok, os.waitpid(child, 0)[1])
""")
    assert told == "True 0\n"


def test_threads_that_cannot_start_are_an_error(kernels: Library) -> None:
    """A stack for each does not fit in the memory that the process may have."""
    told = in_a_process("""
loaded = library.load(isa="scalar", threads=2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), resource.RLIM_INFINITY))
try:
    library.load(isa="scalar", threads=200)
except OSError as error:
    print(error)
loaded = library.load(isa="scalar", threads=2)
loaded.run(program, Step(rows=2000))
print(loaded.threads, bool((x == 50).all()))
""")
    assert told == "200 threads cannot be started\n2 True\n"


def test_more_threads_than_it_has_places_for_are_an_error() -> None:
    for threads in (0, 10_000):
        with pytest.raises(OSError, match=f"{threads} threads"):
            opened(threads)
    opened(1).close()
